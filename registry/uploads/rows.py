"""Uploads as rows: sessions that take an adapter's files and become a version.

Functions take the caller's connection inside the caller's transaction and never commit. Every query
names the tenant.
"""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Exists,
    Row,
    Table,
    insert,
    select,
    update,
)

from registry.catalog.adapter_rows import BuiltAdapter
from registry.errors import Conflict, NotFound, shown
from registry.tables import upload_files, uploads

# Opens a transaction of the caller's database, which commits on leaving and rolls back on an error.
Begin = Callable[[], AbstractContextManager[Connection]]

UploadState = Literal["open", "proving", "complete", "failed", "expired", "cancelled"]
OPEN: Final = "open"
PROVING: Final = "proving"
COMPLETE: Final = "complete"
FAILED: Final = "failed"
EXPIRED: Final = "expired"
CANCELLED: Final = "cancelled"

_UPLOAD_ID = re.compile(r"up_[0-9a-f]{32}")

Transfer = Literal["gateway", "presigned"]
GATEWAY: Transfer = "gateway"
PRESIGNED: Transfer = "presigned"


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A declared file, with its sha256 in hex, and the bytes that have arrived.

    received_bytes: bytes that came through the gateway; for a presigned file only the store knows.
    multipart_id: the store's id of a presigned file's multipart upload.
    """

    filename: str
    size_bytes: int
    sha256: str
    received_bytes: int = 0
    multipart_id: str | None = None


@dataclass(frozen=True, slots=True)
class UploadPart:
    """The bytes [start, start + size_bytes) of a file, kept under `part_key` until the upload ends.

    sha256: None for a presigned file, which can only be compared with the file's own sha256.
    """

    filename: str
    start: int
    size_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Upload:
    """A session: open -> proving -> complete; open or proving -> failed; open -> expired or
    cancelled.

    files: empty if the upload proves an object that is stored already; it begins as proving then.
    built: the canonical object, from proving on; a dry run's was not stored.
    alias: moves to the version beside `latest`.
    response_template: the format of its tool calls as checked JSON; None for the base model's.
    adapter_id, version: set when the upload is complete, except for a dry run.
    error: set when the upload has failed.
    base_model: the name that the upload gives of the adapter's base model; None if it gives none.
    expires_at_ms: when an open upload expires, or a proving upload fails for want of a proof.
    """

    upload_id: str
    tenant_id: str
    adapter_name: str
    state: UploadState
    created_by_key: str
    created_at_ms: int
    expires_at_ms: int
    files: dict[str, UploadFile]
    alias: str | None = None
    error_code: str | None = None
    error_param: str | None = None
    error: str | None = None
    adapter_id: str | None = None
    version: int | None = None
    transfer: Transfer = GATEWAY
    is_dry_run: bool = False
    built: BuiltAdapter | None = None
    response_template: str | None = None
    base_model: str | None = None


_FIELDS = [name for name in Upload.__slots__ if name != "files"]
"""Fields that are columns of `uploads`."""


def get_upload(conn: Connection, tenant_id: str, upload_id: str, now_ms: int) -> Upload:
    """Read an upload, whose state is EXPIRED once its time is over. Raises NotFound."""
    upload = find_upload(conn, tenant_id, upload_id) if _UPLOAD_ID.fullmatch(upload_id) else None
    if upload is None:
        message = f"The upload {shown(upload_id)} does not exist; create a new one."
        raise NotFound(message, code="upload_not_found", param="upload_id")
    if upload.state == OPEN and upload.expires_at_ms <= now_ms:
        # The sweep writes the state to the row later.
        return replace(upload, state=EXPIRED)
    return upload


def find_upload(conn: Connection, tenant_id: str, upload_id: str) -> Upload | None:
    """The upload in the state of its row, even if its time is over."""
    query = select(uploads).where(
        uploads.c.upload_id == upload_id, uploads.c.tenant_id == tenant_id
    )
    row = conn.execute(query).first()
    return to_upload(conn, row) if row else None


def insert_upload(conn: Connection, upload: Upload) -> None:
    row = {name: getattr(upload, name) for name in _FIELDS}
    conn.execute(insert(uploads).values(row | {"built": _json(upload.built)}))
    for file in upload.files.values():
        here = {"upload_id": upload.upload_id, "tenant_id": upload.tenant_id}
        conn.execute(insert(upload_files).values(here | asdict(file)))


def is_of(table: Table, upload: Upload) -> ColumnElement[bool]:
    """SQL for whether a row of this table is of the upload."""
    return (table.c.upload_id == upload.upload_id) & (table.c.tenant_id == upload.tenant_id)


def is_open(upload: Upload) -> Exists:
    """Condition for statements that may only change an open upload."""
    its = is_of(uploads, upload), uploads.c.state == OPEN
    return select(uploads.c.upload_id).where(*its).exists()


def move_upload(conn: Connection, upload: Upload, state: UploadState, **changes: Any) -> Upload:
    """Move an upload from the state that the caller saw, and return it with the other changes.

    Raises Conflict if the upload is no longer in that state.
    """
    moved = replace(upload, state=state, **changes)
    row = {name: getattr(moved, name) for name in ("state", *changes)}
    if "built" in row:
        row["built"] = _json(moved.built)
    done = conn.execute(
        update(uploads).where(is_of(uploads, upload), uploads.c.state == upload.state).values(row)
    )
    if done.rowcount == 0:
        found = find_upload(conn, upload.tenant_id, upload.upload_id)
        raise not_open(found or upload)
    return moved


def not_open(upload: Upload) -> Conflict:
    """The fault of an upload that takes no more bytes: it proves or has ended."""
    message = f"The upload {upload.upload_id} is {upload.state}; create a new one."
    return Conflict(message, code="upload_not_open")


def part_key(upload: Upload, filename: str, start: int = 0) -> str:
    """Key of the object of a part; a presigned file is one part."""
    return f"uploads/{upload.upload_id}/{filename}/{start:016d}"


def check_received(upload: Upload) -> None:
    """Raise Conflict unless every declared byte has been received."""
    lacking = {it.filename: it.size_bytes - it.received_bytes for it in upload.files.values()}
    missing = ", ".join(f"{count} bytes of {name}" for name, count in lacking.items() if count > 0)
    if missing:
        message = f"The upload is not complete; send the missing {missing}."
        raise Conflict(message, code="upload_not_complete")


def to_upload(conn: Connection, row: Row[Any]) -> Upload:
    """Make an upload from its row, and read its files."""
    query = select(*(upload_files.c[name] for name in UploadFile.__slots__)).where(
        upload_files.c.upload_id == row.upload_id, upload_files.c.tenant_id == row.tenant_id
    )
    found = conn.execute(query.order_by(upload_files.c.filename))
    fields = {name: row._mapping[name] for name in _FIELDS}
    fields["built"] = BuiltAdapter(**json.loads(row.built)) if row.built else None
    return Upload(**fields, files={file.filename: UploadFile(*file) for file in found})


def _json(built: BuiltAdapter | None) -> str | None:
    return json.dumps(asdict(built)) if built else None
