"""Rows of the received parts of uploads. Every query names the tenant."""

from dataclasses import asdict, dataclass

from sqlalchemy import Connection, func, insert, select, update

from registry.tables import upload_files, upload_parts
from registry.upload_rows import UploadPart, is_open

_COLUMNS = [upload_parts.c[name] for name in UploadPart.__slots__]


@dataclass(frozen=True, slots=True)
class Pending:
    """Bytes of parts of unfinished uploads: those of all tenants, and those of one of them."""

    of_all: int
    of_tenant: int


def advance_file(conn: Connection, tenant_id: str, upload_id: str, part: UploadPart) -> bool:
    """Add a part if the upload is open and the part starts where the received bytes end.

    Returns whether the part was added.
    """
    advanced = conn.execute(
        update(upload_files)
        .where(
            upload_files.c.upload_id == upload_id,
            upload_files.c.filename == part.filename,
            upload_files.c.tenant_id == tenant_id,
            upload_files.c.received_bytes == part.start,
            is_open(tenant_id, upload_id),
        )
        .values(received_bytes=part.start + part.size_bytes)
    )
    if advanced.rowcount == 0:
        return False
    conn.execute(
        insert(upload_parts).values(upload_id=upload_id, tenant_id=tenant_id, **asdict(part))
    )
    return True


def list_parts(conn: Connection, tenant_id: str, upload_id: str) -> list[UploadPart]:
    """Received parts of an upload, in order of file and start."""
    query = (
        select(*_COLUMNS)
        .where(upload_parts.c.upload_id == upload_id, upload_parts.c.tenant_id == tenant_id)
        .order_by(upload_parts.c.filename, upload_parts.c.start)
    )
    return [UploadPart(*row) for row in conn.execute(query)]


def find_part(
    conn: Connection, tenant_id: str, upload_id: str, filename: str, start: int
) -> UploadPart | None:
    query = select(*_COLUMNS).where(
        upload_parts.c.upload_id == upload_id,
        upload_parts.c.filename == filename,
        upload_parts.c.start == start,
        upload_parts.c.tenant_id == tenant_id,
    )
    row = conn.execute(query).first()
    return UploadPart(*row) if row else None


def pending_bytes(conn: Connection, tenant_id: str) -> Pending:
    """Bytes that the store holds of unfinished uploads. There is a row for each part alone."""
    size_bytes = func.sum(upload_parts.c.size_bytes)
    of_tenant = size_bytes.filter(upload_parts.c.tenant_id == tenant_id)
    row = conn.execute(select(func.coalesce(size_bytes, 0), func.coalesce(of_tenant, 0))).one()
    return Pending(int(row[0]), int(row[1]))
