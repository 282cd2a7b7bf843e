"""Uploads, their two files and received parts as rows. Every query names the tenant."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row, func, insert, select, update

from registry.tables import upload_files, upload_parts, uploads

OPEN = "open"
PROVING = "proving"
COMPLETE = "complete"
FAILED = "failed"
EXPIRED = "expired"

Transfer = Literal["gateway", "presigned"]
GATEWAY: Transfer = "gateway"
PRESIGNED: Transfer = "presigned"


@dataclass(frozen=True, slots=True)
class FileSpec:
    """What a file is declared to be. sha256: hex."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A declared file and how much of it has arrived.

    received_bytes: through the gateway; of a presigned file only the store knows.
    multipart_id: the store's own, of a presigned file.
    """

    filename: str
    size_bytes: int
    sha256: str
    received_bytes: int
    multipart_id: str | None = None


@dataclass(frozen=True, slots=True)
class UploadPart:
    """The bytes [start, start + size_bytes) of a file, kept under object_key until the end.

    sha256: None where nobody counted on the way: the file's own is all there is to compare.
    """

    filename: str
    start: int
    size_bytes: int
    sha256: str | None
    object_key: str


@dataclass(frozen=True, slots=True)
class Upload:
    """A session: open -> proving -> complete; open or proving -> failed; open -> expired.

    built: from proving on, the canonical object and its passport (see registry.completion).
    adapter_id, version: of a complete one that is no dry run.   error: of a failed one.
    expires_at_ms: when an open one expires, and when a proving one gives up.
    """

    upload_id: str
    tenant_id: str
    adapter_name: str
    alias: str | None
    state: str
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


def find_upload(conn: Connection, tenant_id: str, upload_id: str) -> Upload | None:
    query = select(uploads).where(
        uploads.c.upload_id == upload_id, uploads.c.tenant_id == tenant_id
    )
    row = conn.execute(query).first()
    return _upload(conn, row) if row else None


def insert_upload(conn: Connection, upload: Upload) -> None:
    conn.execute(
        insert(uploads).values(
            upload_id=upload.upload_id,
            tenant_id=upload.tenant_id,
            adapter_name=upload.adapter_name,
            alias=upload.alias,
            state=upload.state,
            created_by_key=upload.created_by_key,
            created_at_ms=upload.created_at_ms,
            expires_at_ms=upload.expires_at_ms,
            transfer=upload.transfer,
            is_dry_run=upload.is_dry_run,
        )
    )
    conn.execute(
        insert(upload_files),
        [
            {
                "upload_id": upload.upload_id,
                "filename": file.filename,
                "tenant_id": upload.tenant_id,
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "received_bytes": file.received_bytes,
            }
            for file in upload.files.values()
        ],
    )


def open_upload_names(conn: Connection, tenant_id: str, now_ms: int) -> list[str]:
    """The adapter name of every open upload, one entry per upload."""
    query = select(uploads.c.adapter_name).where(
        uploads.c.tenant_id == tenant_id,
        uploads.c.state == OPEN,
        uploads.c.expires_at_ms > now_ms,
    )
    return list(conn.execute(query).scalars())


def open_upload_ids(conn: Connection, tenant_id: str) -> set[str]:
    query = select(uploads.c.upload_id).where(
        uploads.c.tenant_id == tenant_id, uploads.c.state == OPEN
    )
    return set(conn.execute(query).scalars())


def declared_bytes(conn: Connection, tenant_id: str, now_ms: int) -> int:
    """Bytes that the tenant's open uploads may still bring."""
    query = (
        select(func.coalesce(func.sum(upload_files.c.size_bytes), 0))
        .join(uploads, uploads.c.upload_id == upload_files.c.upload_id)
        .where(
            uploads.c.tenant_id == tenant_id,
            uploads.c.state == OPEN,
            uploads.c.expires_at_ms > now_ms,
        )
    )
    return int(conn.execute(query).scalar_one())


def advance_file(conn: Connection, tenant_id: str, upload_id: str, part: UploadPart) -> bool:
    """Count the part in, if the upload is open and the part starts where the bytes end."""
    is_open = (
        select(uploads.c.upload_id)
        .where(
            uploads.c.upload_id == upload_id,
            uploads.c.tenant_id == tenant_id,
            uploads.c.state == OPEN,
        )
        .exists()
    )
    advanced = conn.execute(
        update(upload_files)
        .where(
            upload_files.c.upload_id == upload_id,
            upload_files.c.filename == part.filename,
            upload_files.c.tenant_id == tenant_id,
            upload_files.c.received_bytes == part.start,
            is_open,
        )
        .values(received_bytes=part.start + part.size_bytes)
    )
    if advanced.rowcount == 0:
        return False
    conn.execute(
        insert(upload_parts).values(
            upload_id=upload_id,
            filename=part.filename,
            start=part.start,
            tenant_id=tenant_id,
            size_bytes=part.size_bytes,
            sha256=part.sha256,
            object_key=part.object_key,
        )
    )
    return True


def list_parts(conn: Connection, tenant_id: str, upload_id: str) -> list[UploadPart]:
    """Received parts, by file and start."""
    query = (
        select(upload_parts)
        .where(upload_parts.c.upload_id == upload_id, upload_parts.c.tenant_id == tenant_id)
        .order_by(upload_parts.c.filename, upload_parts.c.start)
    )
    return [_part(row) for row in conn.execute(query)]


def find_part(
    conn: Connection, tenant_id: str, upload_id: str, filename: str, start: int
) -> UploadPart | None:
    query = select(upload_parts).where(
        upload_parts.c.upload_id == upload_id,
        upload_parts.c.filename == filename,
        upload_parts.c.start == start,
        upload_parts.c.tenant_id == tenant_id,
    )
    row = conn.execute(query).first()
    return _part(row) if row else None


def close_upload(conn: Connection, tenant_id: str, upload_id: str, **values: object) -> bool:
    """Move an open upload to another state; False if it was not open."""
    closed = conn.execute(
        update(uploads)
        .where(
            uploads.c.upload_id == upload_id,
            uploads.c.tenant_id == tenant_id,
            uploads.c.state == OPEN,
        )
        .values(values)
    )
    return closed.rowcount == 1


def expire(conn: Connection, now_ms: int) -> None:
    """Close the open uploads of all tenants whose time is over."""
    conn.execute(
        update(uploads)
        .where(
            uploads.c.discarded_at_ms.is_(None),
            uploads.c.expires_at_ms <= now_ms,
            uploads.c.state == OPEN,
        )
        .values(state=EXPIRED)
    )


def list_undiscarded(conn: Connection, limit: int) -> list[Upload]:
    """Closed uploads of all tenants whose parts may still be in the store, oldest first."""
    query = (
        select(uploads)
        .where(uploads.c.discarded_at_ms.is_(None), uploads.c.state != OPEN)
        .order_by(uploads.c.expires_at_ms)
        .limit(limit)
    )
    return [_upload(conn, row) for row in conn.execute(query).all()]


def mark_discarded(conn: Connection, tenant_id: str, upload_id: str, now_ms: int) -> None:
    conn.execute(
        upload_parts.delete().where(
            upload_parts.c.upload_id == upload_id, upload_parts.c.tenant_id == tenant_id
        )
    )
    conn.execute(
        update(uploads)
        .where(uploads.c.upload_id == upload_id, uploads.c.tenant_id == tenant_id)
        .values(discarded_at_ms=now_ms)
    )


def _upload(conn: Connection, row: Row[Any]) -> Upload:
    query = select(upload_files).where(
        upload_files.c.upload_id == row.upload_id, upload_files.c.tenant_id == row.tenant_id
    )
    files = {
        file.filename: UploadFile(
            file.filename, file.size_bytes, file.sha256, file.received_bytes, file.multipart_id
        )
        for file in conn.execute(query.order_by(upload_files.c.filename))
    }
    return Upload(
        upload_id=row.upload_id,
        tenant_id=row.tenant_id,
        adapter_name=row.adapter_name,
        alias=row.alias,
        state=row.state,
        created_by_key=row.created_by_key,
        created_at_ms=row.created_at_ms,
        expires_at_ms=row.expires_at_ms,
        error_code=row.error_code,
        error_param=row.error_param,
        error=row.error,
        adapter_id=row.adapter_id,
        version=row.version,
        files=files,
        transfer=row.transfer,
        is_dry_run=row.is_dry_run,
        built=json.loads(row.built) if row.built else None,
    )


def _part(row: Row[Any]) -> UploadPart:
    return UploadPart(row.filename, row.start, row.size_bytes, row.sha256, row.object_key)
