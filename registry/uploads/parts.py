"""Parts of uploads that come through the gateway: each is put into the store, then counted."""

from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Connection, func, insert, select, update

from registry.errors import Conflict, Invalid, TooLarge, shown
from registry.storage.storage import Storage
from registry.tables import upload_files, upload_parts
from registry.uploads.rows import (
    COMPLETE,
    OPEN,
    PRESIGNED,
    Begin,
    Upload,
    UploadFile,
    UploadPart,
    get_upload,
    is_of,
    is_open,
    not_open,
    part_key,
)


@dataclass(frozen=True, slots=True)
class Pending:
    """Bytes of parts of unfinished uploads: those of all tenants, and those of one of them."""

    of_all: int
    of_tenant: int


def put_part(
    begin: Begin,
    storage: Storage,
    tenant_id: str,
    upload_id: str,
    part: UploadPart,
    path: Path,
    total_bytes: int,
    part_bytes: int,
    now_ms: int,
) -> UploadFile:
    """Take a part that was received and lies at `path`, and return its file.

    A part that was taken before changes nothing, nor does a part of a complete upload, which has
    all declared bytes.
    begin: opens two short transactions; none is open while the part goes to the store.
    total_bytes: size of the whole file, as the client sent it.
    part_bytes: size of every part but a file's last.
    Raises NotFound, Conflict, Invalid, TooLarge, NoRoom, StorageError.
    """
    with begin() as conn:
        upload = get_upload(conn, tenant_id, upload_id, now_ms)
        check_takes_parts(upload)
        file = _check_part(upload, part, total_bytes, part_bytes)
        if upload.state == COMPLETE:
            return file
        if part.start != file.received_bytes:
            return _answer_repeated(conn, upload, part)
    # The object is put before its row, so that a counted part always exists.
    key = part_key(upload, part.filename, part.start)
    storage.put(key, path)
    with begin() as conn:
        is_counted = _advance_file(conn, upload, part)
        upload = get_upload(conn, tenant_id, upload_id, now_ms)
        if is_counted:
            return upload.files[part.filename]
        # Another call was first: one with this part, or one that ended the upload.
        if upload.state == OPEN:
            return _answer_repeated(conn, upload, part)
    storage.delete(key)
    raise not_open(upload)


def check_takes_parts(upload: Upload) -> None:
    """Raise Conflict unless the upload takes parts here."""
    if upload.state not in (OPEN, COMPLETE):
        raise not_open(upload)
    if upload.transfer == PRESIGNED:
        raise Conflict(
            f"The parts of the upload {upload.upload_id} go to the object store; "
            f"PUT them to the URLs that GET /v1/uploads/{upload.upload_id} lists.",
            code="upload_is_presigned",
        )


def pending_bytes(conn: Connection, tenant_id: str) -> Pending:
    """Bytes of parts in the store. A part has a row until `sweep.discard` has deleted it."""
    size_bytes = func.sum(upload_parts.c.size_bytes)
    of_tenant = size_bytes.filter(upload_parts.c.tenant_id == tenant_id)
    row = conn.execute(select(func.coalesce(size_bytes, 0), func.coalesce(of_tenant, 0))).one()
    return Pending(int(row[0]), int(row[1]))


def _check_part(upload: Upload, part: UploadPart, total_bytes: int, part_bytes: int) -> UploadFile:
    """Check a part and return the file that it belongs to. Raises Invalid, TooLarge."""
    file = upload.files.get(part.filename)
    if file is None:
        raise Invalid(
            code="unknown_file",
            message=f"The upload has no file {shown(part.filename)}; "
            f"send {' or '.join(upload.files)}.",
            param="file",
        )
    end = part.start + part.size_bytes
    if end > file.size_bytes:
        raise TooLarge.of(file.filename, end, file.size_bytes)
    if total_bytes != file.size_bytes:
        raise Invalid(
            code="size_mismatch",
            message=f"{file.filename} was declared with {file.size_bytes} bytes, "
            f"Content-Range says {total_bytes}; create an upload with the right size.",
            param=file.filename,
        )
    is_shorter = 0 < part.size_bytes < part_bytes and end == file.size_bytes
    if part.size_bytes != part_bytes and not is_shorter:
        raise Invalid(
            code="invalid_part_size",
            message=f"A part has {part_bytes} bytes, the last one may have fewer; "
            f"this one has {part.size_bytes}.",
            param=file.filename,
        )
    return file


def _answer_repeated(conn: Connection, upload: Upload, part: UploadPart) -> UploadFile:
    """The unchanged file, if exactly this part was taken before. Raises Conflict."""
    file = upload.files[part.filename]
    is_it = [upload_parts.c[name] == value for name, value in asdict(part).items()]
    query = select(upload_parts.c.start).where(is_of(upload_parts, upload), *is_it)
    if conn.execute(query).first() is None:
        received_bytes = file.received_bytes
        raise Conflict(
            f"{part.filename} has {received_bytes} bytes, the part starts at {part.start}; "
            f"send the part that starts at {received_bytes}.",
            code="upload_offset_mismatch",
            param=part.filename,
            details={"received_bytes": received_bytes},
        )
    return file


def _advance_file(conn: Connection, upload: Upload, part: UploadPart) -> bool:
    """Add a part if the upload is open and the part starts where the received bytes end.

    Returns whether the part was added.
    """
    advanced = conn.execute(
        update(upload_files)
        .where(
            is_of(upload_files, upload),
            upload_files.c.filename == part.filename,
            upload_files.c.received_bytes == part.start,
            is_open(upload),
        )
        .values(received_bytes=part.start + part.size_bytes)
    )
    if advanced.rowcount == 0:
        return False
    its = {"upload_id": upload.upload_id, "tenant_id": upload.tenant_id}
    conn.execute(insert(upload_parts).values(its | asdict(part)))
    return True
