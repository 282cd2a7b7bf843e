"""Presigned uploads: files go straight to the object store, each as a multipart upload.

Only the store knows which parts have arrived, so it is asked every time; the database keeps only
the ids of the multipart uploads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import update

from registry.errors import Invalid, ObjectNotFound
from registry.formats.peft_format import file_fault
from registry.storage.storage import PresignedStorage, Storage
from registry.tables import upload_files
from registry.transactions import Begin
from registry.uploads.rows import (
    Upload,
    UploadFile,
    UploadPart,
    find_upload,
    is_of,
    is_open,
    not_complete,
    not_open,
)
from registry.uploads.rules import RegistryLimits


@dataclass(frozen=True, slots=True)
class PartUrl:
    """A missing part, and the URL to PUT its bytes to. number: counts from 1."""

    number: int
    start: int
    size_bytes: int
    url: str


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """Bytes of a file that have arrived, and its missing parts."""

    received_bytes: int
    missing: tuple[PartUrl, ...]


def storage_of(storage: Storage) -> PresignedStorage:
    """The store, if it takes parts by URL. Raises Invalid if it does not."""
    if not isinstance(storage, PresignedStorage):
        raise Invalid(
            code="presigned_not_supported",
            message="This server's store takes no presigned parts; send them to the gateway "
            "with transfer 'gateway'.",
            param="transfer",
        )
    return storage


def offer_files(
    begin: Begin, storage: PresignedStorage, upload: Upload, limits: RegistryLimits
) -> dict[str, OfferedFile]:
    """Progress of the files of an open presigned upload, with fresh URLs for missing parts.

    The store is asked, but no bytes are transferred. Raises Conflict, StorageError.
    """
    return {
        name: _offer_file(storage, upload, file, limits)
        for name, file in _begin_files(storage, begin, upload).items()
    }


def _begin_files(storage: PresignedStorage, begin: Begin, upload: Upload) -> dict[str, UploadFile]:
    """Begin a multipart upload for each file that has none; returns all files, each with its id.

    Raises Conflict if the upload ends meanwhile. A gateway that is killed between the store
    and the row leaves a multipart upload without parts, which the sweep aborts.
    """
    files = dict(upload.files)
    for file in upload.files.values():
        if file.multipart_id is not None:
            continue
        key = _file_key(upload, file)
        multipart_id = storage.begin_multipart(key)
        with begin() as conn:
            set_id = conn.execute(
                update(upload_files)
                .where(
                    is_of(upload_files, upload),
                    upload_files.c.filename == file.filename,
                    upload_files.c.multipart_id.is_(None),
                    is_open(upload),
                )
                .values(multipart_id=multipart_id)
            )
            kept = find_upload(conn, upload.tenant_id, upload.upload_id)
        if set_id.rowcount == 0:
            # Another caller began one for this file at the same time, or ended the upload.
            storage.abort_multipart(key, multipart_id)
        assert kept is not None
        if kept.files[file.filename].multipart_id is None:
            raise not_open(kept)
        files[file.filename] = kept.files[file.filename]
    return files


def _offer_file(
    storage: PresignedStorage, upload: Upload, file: UploadFile, limits: RegistryLimits
) -> OfferedFile:
    arrived = _arrived(storage, upload, file, limits.part_bytes)
    assert file.multipart_id is not None
    key, ttl_s = _file_key(upload, file), limits.presigned_ttl_s
    missing = tuple(
        PartUrl(
            number,
            start,
            size_bytes,
            storage.presign_part(key, file.multipart_id, number, size_bytes, ttl_s),
        )
        for number, start, size_bytes in _layout(file, limits.part_bytes)
        if number not in arrived
    )
    return OfferedFile(sum(arrived.values()), missing)


def complete_files(
    storage: PresignedStorage, upload: Upload, part_bytes: int
) -> tuple[UploadPart, ...]:
    """Make each file an object. A repeated call after a failure completes the remaining files.

    Raises Conflict; InvalidAdapter for an object whose size is not the declared size.
    """
    missing = {}
    for file in upload.files.values():
        arrived_bytes = 0
        if file.multipart_id is not None:
            arrived_bytes = sum(_arrived(storage, upload, file, part_bytes).values())
        if arrived_bytes < file.size_bytes:
            missing[file.filename] = file.size_bytes - arrived_bytes
    if missing:
        raise not_complete(missing)
    return tuple(_complete_file(storage, upload, file) for file in upload.files.values())


def abort_files(storage: PresignedStorage, upload: Upload) -> None:
    """Drop the parts of files that never became an object. Repeating is harmless."""
    for file in upload.files.values():
        if file.multipart_id is not None:
            storage.abort_multipart(_file_key(upload, file), file.multipart_id)


def _file_key(upload: Upload, file: UploadFile) -> str:
    """Key of the file once its parts are one object; it is discarded with the upload's parts."""
    return f"uploads/{upload.upload_id}/{file.filename}"


def _complete_file(storage: PresignedStorage, upload: Upload, file: UploadFile) -> UploadPart:
    key = _file_key(upload, file)
    assert file.multipart_id is not None
    try:
        storage.complete_multipart(key, file.multipart_id)
    except ObjectNotFound:
        # An earlier call that failed later completed it; size() checks that the object exists.
        storage.size(key)
    # The size is checked before the file is read to disk: it may be larger than was declared.
    size_bytes = storage.size(key)
    if size_bytes != file.size_bytes:
        message = f"{file.filename} arrived with {size_bytes} bytes, declared were "
        message += f"{file.size_bytes}; upload it again"
        raise file_fault("size_mismatch", message, file.filename)
    return UploadPart(file.filename, 0, size_bytes, None, key)


def _layout(file: UploadFile, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and size of every part of the file."""
    for index, start in enumerate(range(0, file.size_bytes, part_bytes)):
        yield index + 1, start, min(part_bytes, file.size_bytes - start)


def _arrived(
    storage: PresignedStorage, upload: Upload, file: UploadFile, part_bytes: int
) -> dict[int, int]:
    """Bytes, by number, of the parts in the store that have the expected size."""
    assert file.multipart_id is not None
    layout = {number: size_bytes for number, _, size_bytes in _layout(file, part_bytes)}
    key = _file_key(upload, file)
    try:
        stored = storage.list_parts(key, file.multipart_id)
    except ObjectNotFound:
        # A completed multipart upload no longer exists; its object proves that all parts arrived.
        storage.size(key)
        return layout
    return {n: size_bytes for n, size_bytes in stored.items() if layout.get(n) == size_bytes}
