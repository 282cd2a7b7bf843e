"""Presigned uploads: files go straight to the object store, each as a multipart upload.

Only the store knows which parts have arrived, so it is asked every time; the database keeps only
the ids of the multipart uploads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sqlalchemy import update

from registry.errors import Invalid, ObjectNotFound
from registry.formats.peft_format import file_fault
from registry.storage.storage import PresignedStorage, Storage
from registry.tables import upload_files
from registry.uploads.rows import (
    Begin,
    Upload,
    UploadFile,
    UploadPart,
    check_received,
    find_upload,
    is_of,
    is_open,
    not_open,
    part_key,
)
from registry.uploads.rules import RegistryLimits


@dataclass(frozen=True, slots=True)
class PartUrl:
    """A missing part, and the URL to PUT its bytes to. number: counts from 1."""

    number: int
    start: int
    size_bytes: int
    url: str


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
) -> tuple[Upload, dict[str, tuple[PartUrl, ...]]]:
    """An open presigned upload with the bytes received by now, and a fresh URL for each missing
    part, by file.

    The store is asked, but no bytes are transferred. Raises Conflict, StorageError.
    """
    upload = _begun(begin, storage, upload)
    arrived = _arrived(storage, upload, limits.part_bytes)

    def url_of(file: UploadFile, number: int, start: int, size_bytes: int) -> PartUrl:
        assert file.multipart_id is not None
        key, ttl_s = part_key(upload, file.filename), limits.presigned_ttl_s
        url = storage.presign_part(key, file.multipart_id, number, size_bytes, ttl_s)
        return PartUrl(number, start, size_bytes, url)

    missing = {
        name: tuple(
            url_of(file, *part)
            for part in _layout(file, limits.part_bytes)
            if part[0] not in arrived[name]
        )
        for name, file in upload.files.items()
    }
    return _with_received(upload, arrived), missing


def _begun(begin: Begin, storage: PresignedStorage, upload: Upload) -> Upload:
    """Begin a multipart upload for each file that has none; returns the upload with their ids.

    Raises Conflict if the upload ends meanwhile. A gateway that is killed between the store
    and the row leaves a multipart upload without parts, which the sweep aborts.
    """
    files = dict(upload.files)
    for file in upload.files.values():
        if file.multipart_id is not None:
            continue
        key = part_key(upload, file.filename)
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
    return replace(upload, files=files)


def complete_files(
    storage: PresignedStorage, upload: Upload, part_bytes: int
) -> tuple[UploadPart, ...]:
    """Make each file an object. A repeated call after a failure completes the remaining files.

    Raises Conflict; InvalidAdapter for an object whose size is not the declared size.
    """
    check_received(_with_received(upload, _arrived(storage, upload, part_bytes)))
    return tuple(_complete_file(storage, upload, file) for file in upload.files.values())


def abort_files(storage: PresignedStorage, upload: Upload) -> None:
    """Drop the parts of files that never became an object. Repeating is harmless."""
    for file in upload.files.values():
        if file.multipart_id is not None:
            storage.abort_multipart(part_key(upload, file.filename), file.multipart_id)


def _complete_file(storage: PresignedStorage, upload: Upload, file: UploadFile) -> UploadPart:
    key = part_key(upload, file.filename)
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
    return UploadPart(file.filename, 0, size_bytes, None)


def _layout(file: UploadFile, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and size of every part of the file."""
    for index, start in enumerate(range(0, file.size_bytes, part_bytes)):
        yield index + 1, start, min(part_bytes, file.size_bytes - start)


def _arrived(
    storage: PresignedStorage, upload: Upload, part_bytes: int
) -> dict[str, dict[int, int]]:
    """Bytes, by file and number, of the parts in the store that have the expected size."""
    arrived = {}
    for name, file in upload.files.items():
        layout = {number: size_bytes for number, _, size_bytes in _layout(file, part_bytes)}
        key, stored = part_key(upload, name), dict[int, int]()
        try:
            if file.multipart_id is not None:
                stored = storage.list_parts(key, file.multipart_id)
        except ObjectNotFound:
            # A completed multipart upload no longer exists; its object proves that all arrived.
            storage.size(key)
            stored = layout
        arrived[name] = {n: it for n, it in stored.items() if layout.get(n) == it}
    return arrived


def _with_received(upload: Upload, arrived: dict[str, dict[int, int]]) -> Upload:
    files = {
        name: replace(file, received_bytes=sum(arrived[name].values()))
        for name, file in upload.files.items()
    }
    return replace(upload, files=files)
