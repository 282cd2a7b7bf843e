"""Rows of uploads and of their files. Every query names the tenant, or spans all tenants."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sqlalchemy import (
    Connection,
    Exists,
    Row,
    func,
    insert,
    or_,
    select,
    update,
)

from registry.adapter_rows import READY, Version, find_version_row
from registry.tables import adapter_versions as versions
from registry.tables import adapters, upload_files, upload_parts, uploads

UploadState = Literal["open", "proving", "complete", "failed", "expired", "cancelled"]
OPEN: Final = "open"
PROVING: Final = "proving"
COMPLETE: Final = "complete"
FAILED: Final = "failed"
EXPIRED: Final = "expired"
CANCELLED: Final = "cancelled"
ENDED = (COMPLETE, FAILED, EXPIRED, CANCELLED)

Transfer = Literal["gateway", "presigned"]
GATEWAY: Transfer = "gateway"
PRESIGNED: Transfer = "presigned"


@dataclass(frozen=True, slots=True)
class FileSpec:
    """Declared size and digest of a file. sha256: hex."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A declared file and the bytes that have arrived.

    received_bytes: bytes that came through the gateway; for a presigned file only the store knows.
    multipart_id: the store's id of a presigned file's multipart upload.
    """

    filename: str
    size_bytes: int
    sha256: str
    received_bytes: int
    multipart_id: str | None = None


@dataclass(frozen=True, slots=True)
class UploadPart:
    """The bytes [start, start + size_bytes) of a file, kept under object_key until the upload ends.

    sha256: None for a presigned file, which can only be compared with the file's own sha256.
    """

    filename: str
    start: int
    size_bytes: int
    sha256: str | None
    object_key: str


@dataclass(frozen=True, slots=True)
class Upload:
    """A session: open -> proving -> complete; open or proving -> failed; open -> expired or
    cancelled.

    files: empty if the upload proves an object that is stored already; it begins as proving then.
    built: from proving on, the canonical object and its passport (see registry.upload_build).
    adapter_id, version: set when the upload is complete, except for a dry run.
    error: set when the upload has failed.
    base_model: the name that the upload gives of the adapter's base model; None if it gives none.
    expires_at_ms: when an open upload expires, or a proving upload fails for want of a proof.
    """

    upload_id: str
    tenant_id: str
    adapter_name: str
    alias: str | None
    state: UploadState
    created_by_key: str
    created_at_ms: int
    expires_at_ms: int
    files: dict[str, UploadFile]
    error_code: str | None = None
    error_param: str | None = None
    error: str | None = None
    adapter_id: str | None = None
    version: int | None = None
    transfer: Transfer = GATEWAY
    is_dry_run: bool = False
    built: dict[str, Any] | None = None
    response_template: str | None = None
    base_model: str | None = None


_FIELDS = [name for name in Upload.__slots__ if name != "files"]
"""Fields that are columns of `uploads`."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Figures of an open or proving upload that quotas count."""

    adapter_name: str
    is_dry_run: bool
    declared_bytes: int


def find_upload(conn: Connection, tenant_id: str, upload_id: str) -> Upload | None:
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


def unfinished_uploads(conn: Connection, tenant_id: str, now_ms: int) -> list[Unfinished]:
    """Open and proving uploads, which may still become versions of the tenant."""
    # A join with GROUP BY would make SQLite walk all uploads: 39 ms for 100,000 instead of 0.3 ms.
    declared_bytes = (
        select(func.coalesce(func.sum(upload_files.c.size_bytes), 0))
        .where(
            upload_files.c.upload_id == uploads.c.upload_id,
            upload_files.c.tenant_id == tenant_id,
        )
        .scalar_subquery()
    )
    query = select(uploads.c.adapter_name, uploads.c.is_dry_run, declared_bytes).where(
        uploads.c.tenant_id == tenant_id,
        uploads.c.state.in_([OPEN, PROVING]),
        or_(uploads.c.state == PROVING, uploads.c.expires_at_ms > now_ms),
    )
    return [
        Unfinished(name, is_dry_run, int(size_bytes))
        for name, is_dry_run, size_bytes in conn.execute(query)
    ]


def count_versions(conn: Connection, tenant_id: str, name: str) -> int:
    """Number of ready versions of the adapter of this name."""
    query = (
        select(func.count())
        .select_from(versions)
        .join(adapters, adapters.c.adapter_id == versions.c.adapter_id)
        .where(
            adapters.c.tenant_id == tenant_id,
            adapters.c.name == name,
            versions.c.tenant_id == tenant_id,
            versions.c.state == READY,
        )
    )
    return int(conn.execute(query).scalar_one())


def created_at_ms(conn: Connection, tenant_id: str, place: int) -> int | None:
    """Creation time of the tenant's upload at `place`, 0 being the newest; None without one."""
    query = select(uploads.c.created_at_ms).where(uploads.c.tenant_id == tenant_id)
    query = query.order_by(uploads.c.created_at_ms.desc()).offset(place).limit(1)
    return conn.execute(query).scalar()


def find_same_files(
    conn: Connection,
    tenant_id: str,
    name: str,
    files: Mapping[str, FileSpec],
    response_template: str | None,
) -> Iterator[Version]:
    """The ready versions that were made from files with exactly these sha256 and no others, for
    this format, the newest first.
    """
    num_files = (
        select(func.count())
        .where(
            upload_files.c.upload_id == uploads.c.upload_id, upload_files.c.tenant_id == tenant_id
        )
        .scalar_subquery()
    )
    query = (
        select(uploads.c.adapter_id, uploads.c.version)
        .distinct()
        .join(
            versions,
            (versions.c.adapter_id == uploads.c.adapter_id)
            & (versions.c.version == uploads.c.version),
        )
        .where(
            uploads.c.tenant_id == tenant_id,
            uploads.c.adapter_name == name,
            uploads.c.state == COMPLETE,
            versions.c.tenant_id == tenant_id,
            versions.c.state == READY,
            versions.c.response_template == response_template,
            num_files == len(files),
        )
    )
    for filename, spec in files.items():
        file = upload_files.alias()
        query = query.join(
            file,
            (file.c.upload_id == uploads.c.upload_id)
            & (file.c.tenant_id == tenant_id)
            & (file.c.filename == filename)
            & (file.c.sha256 == spec.sha256),
        )
    for row in conn.execute(query.order_by(uploads.c.version.desc())).all():
        if version := find_version_row(conn, tenant_id, row.adapter_id, row.version):
            yield version


def set_multipart(
    conn: Connection, tenant_id: str, upload_id: str, filename: str, multipart_id: str
) -> bool:
    """Store the id of a file's multipart upload; False if it has one, or the upload has ended."""
    kept = conn.execute(
        update(upload_files)
        .where(
            upload_files.c.upload_id == upload_id,
            upload_files.c.filename == filename,
            upload_files.c.tenant_id == tenant_id,
            upload_files.c.multipart_id.is_(None),
            is_open(tenant_id, upload_id),
        )
        .values(multipart_id=multipart_id)
    )
    return kept.rowcount == 1


def is_open(tenant_id: str, upload_id: str) -> Exists:
    """Condition for statements that may only change an open upload."""
    query = select(uploads.c.upload_id).where(
        uploads.c.upload_id == upload_id,
        uploads.c.tenant_id == tenant_id,
        uploads.c.state == OPEN,
    )
    return query.exists()


def move_upload(
    conn: Connection,
    upload: Upload,
    state: UploadState,
    *,
    built: dict[str, Any] | None = None,
    **values: object,
) -> bool:
    """Move an upload from the state that the caller saw; False if it is no longer in that state."""
    moved = conn.execute(
        update(uploads)
        .where(
            uploads.c.upload_id == upload.upload_id,
            uploads.c.tenant_id == upload.tenant_id,
            uploads.c.state == upload.state,
        )
        .values(state=state, built=_json(built), **values)
    )
    return moved.rowcount == 1


def end_overdue(
    conn: Connection, now_ms: int, state: UploadState, ended: UploadState, **values: str
) -> None:
    """Move the uploads of all tenants whose time in `state` is over to the state `ended`."""
    conn.execute(
        update(uploads)
        .where(
            uploads.c.discarded_at_ms.is_(None),
            uploads.c.expires_at_ms <= now_ms,
            uploads.c.state == state,
        )
        .values(state=ended, **values)
    )


def list_undiscarded(conn: Connection, limit: int) -> list[Upload]:
    """Ended uploads of all tenants whose parts may still be in the store, oldest first."""
    query = (
        select(uploads)
        .where(uploads.c.discarded_at_ms.is_(None), uploads.c.state.in_(ENDED))
        .order_by(uploads.c.expires_at_ms)
        .limit(limit)
    )
    return [to_upload(conn, row) for row in conn.execute(query).all()]


def mark_discarded(conn: Connection, tenant_id: str, upload_id: str, now_ms: int) -> bool:
    """Record that the store has no parts of the upload; False if the upload has not ended."""
    marked = conn.execute(
        update(uploads)
        .where(
            uploads.c.upload_id == upload_id,
            uploads.c.tenant_id == tenant_id,
            uploads.c.state.in_(ENDED),
        )
        .values(discarded_at_ms=now_ms)
    )
    if marked.rowcount == 0:
        return False
    conn.execute(
        upload_parts.delete().where(
            upload_parts.c.upload_id == upload_id, upload_parts.c.tenant_id == tenant_id
        )
    )
    return True


def to_upload(conn: Connection, row: Row[Any]) -> Upload:
    """Make an upload from its row, and read its files."""
    query = select(*(upload_files.c[name] for name in UploadFile.__slots__)).where(
        upload_files.c.upload_id == row.upload_id, upload_files.c.tenant_id == row.tenant_id
    )
    found = conn.execute(query.order_by(upload_files.c.filename))
    fields = {name: row._mapping[name] for name in _FIELDS}
    fields["built"] = json.loads(row.built) if row.built else None
    return Upload(**fields, files={file.filename: UploadFile(*file) for file in found})


def _json(built: dict[str, Any] | None) -> str | None:
    return json.dumps(built) if built else None
