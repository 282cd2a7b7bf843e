"""Builds of uploads in a worker thread: the files become a checked canonical object in the store.

No transaction is open while bytes move.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from sqlalchemy import Connection, select

from registry.catalog import adapter_rows
from registry.catalog.adapter_rows import BuiltAdapter, object_key
from registry.catalog.catalog import Catalog
from registry.checks.validator import Validator, most_canonical_bytes, unavailable
from registry.errors import (
    Conflict,
    Invalid,
    ObjectNotFound,
    StorageError,
    TooLarge,
)
from registry.formats.own_tokenizer import TOKENIZER_FILES
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE, ObjectInfo, file_fault, write_hashed
from registry.storage.free_space import WorkDir
from registry.storage.storage import Storage, folder_of
from registry.tables import upload_parts
from registry.uploads import presigned
from registry.uploads.ends import publish
from registry.uploads.rows import (
    COMPLETE,
    FAILED,
    OPEN,
    PRESIGNED,
    PROVING,
    Begin,
    Upload,
    UploadFile,
    UploadPart,
    check_received,
    get_upload,
    is_of,
    move_upload,
    part_key,
)
from registry.uploads.rules import RegistryLimits
from registry.uploads.sweep import discard


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadBuilder:
    """Builds uploads. Any thread may call it.

    work: where files are assembled.   now_ms: the time, in Unix milliseconds.
    """

    begin: Begin
    catalog: Catalog
    storage: Storage
    limits: RegistryLimits
    validator: Validator
    work: WorkDir
    now_ms: Callable[[], int]

    def build(self, tenant_id: str, upload_id: str) -> Upload:
        """Assemble and check the files and store the object; then the upload is proving or
        complete.

        An upload that is not open any more is returned unchanged. Raises NotFound; Conflict if
        bytes are missing; Invalid or TooLarge for a fault of the files, or if the named base model
        is no longer served, which end the upload; NoRoom, StorageError or Unavailable for a fault
        of ours, after which the call may be repeated.
        """
        with self.begin() as conn:
            upload = get_upload(conn, tenant_id, upload_id, self.now_ms())
            if upload.state != OPEN:
                return upload
            parts = _received_parts(conn, upload)
        try:
            if upload.transfer == PRESIGNED:
                storage = presigned.storage_of(self.storage)
                parts = presigned.complete_files(storage, upload, self.limits.part_bytes)
            built = self._object_of(upload, parts)
        except (Invalid, TooLarge) as error:
            fault = {"error_code": error.code, "error_param": error.param, "error": str(error)}
            # One that has ended meanwhile stays as it is.
            with suppress(Conflict), self.begin() as conn:
                move_upload(conn, upload, FAILED, **fault)
            discard(self.begin, self.storage, upload, self.now_ms())
            raise
        except ObjectNotFound:
            # The parts are gone: another call completed the upload meanwhile, or it has expired.
            with self.begin() as conn:
                upload = get_upload(conn, tenant_id, upload_id, self.now_ms())
            if upload.state == OPEN:
                raise
            return upload
        # If this fails, the object is an orphan, which the sweep deletes.
        with self.begin() as conn:
            upload = self._note_built(conn, tenant_id, upload_id, built)
        discard(self.begin, self.storage, upload, self.now_ms())
        return upload

    def _object_of(self, upload: Upload, parts: Sequence[UploadPart]) -> BuiltAdapter:
        """Assemble the files, have them checked and made canonical, and store the canonical object.

        Leaves no files in `work`.
        """
        bases = self.catalog.bases.candidates(upload.base_model)
        size_bytes = sum(file.size_bytes for file in upload.files.values())
        most_bytes = most_canonical_bytes(bases, size_bytes)
        stored = (folder_of(self.storage), most_bytes)
        try:
            # The files and the canonical object lie there together.
            with self.work.folder(
                f"{upload.upload_id}-", size_bytes + most_bytes, stored
            ) as folder:
                for file in upload.files.values():
                    its = [part for part in parts if part.filename == file.filename]
                    _assemble(folder / file.filename, upload, file, its, self.storage)
                validated = self.validator.check(
                    bases,
                    folder / CONFIG_FILE,
                    folder / WEIGHTS_FILE,
                    folder / "canonical",
                    {name: folder / name for name in TOKENIZER_FILES if name in upload.files},
                )
                key = object_key(upload.tenant_id, validated.digest)
                if not upload.is_dry_run:
                    # The object is put before its row: an object without a row is only waste, a
                    # row without an object is an outage.
                    self.storage.put(key, folder / "canonical")
        except OSError as error:
            raise unavailable(str(error)) from error
        base = next(base for base in bases if base.model_id == validated.base_model)
        return BuiltAdapter(
            digest=validated.digest,
            object_key=key,
            rank=validated.passport["rank"],
            size_bytes=validated.size_bytes,
            base_revision=base.base_revision,
            passport=validated.passport,
            base_model=base.model_id,
            base_variant=base.variant,
            tokenizer=validated.tokenizer,
        )

    def _note_built(
        self, conn: Connection, tenant_id: str, upload_id: str, built: BuiltAdapter
    ) -> Upload:
        """Make the upload proving, or complete if there is nothing to prove; returns the upload.

        A dry run needs no proof, nor does an object that is a version of this adapter already.
        Raises Conflict, and StorageError if the object is missing: then the upload is still
        open.
        """
        adapter_rows.lock_tenant(conn, tenant_id)
        upload = get_upload(conn, tenant_id, upload_id, self.now_ms())
        if upload.state != OPEN:
            return upload
        if upload.is_dry_run:
            unproved = replace(built, passport={**built.passport, "canary": None})
            return move_upload(conn, upload, COMPLETE, built=unproved)
        stored_bytes = self.storage.size(built.object_key)
        if stored_bytes != built.size_bytes:
            raise StorageError(
                key=built.object_key,
                reason=f"{stored_bytes} bytes are stored, {built.size_bytes} were put",
            )
        if adapter_rows.find_same_version(
            conn, tenant_id, upload.adapter_name, built, upload.response_template
        ):
            return publish(conn, self.catalog, upload, built)
        until_ms = self.now_ms() + self.limits.proof_ttl_s * 1000
        return move_upload(conn, upload, PROVING, built=built, expires_at_ms=until_ms)


def _received_parts(conn: Connection, upload: Upload) -> Sequence[UploadPart]:
    """The parts that came through the gateway, in order of file and start. Raises Conflict."""
    if upload.transfer == PRESIGNED:
        return ()
    check_received(upload)
    query = select(*(upload_parts.c[name] for name in UploadPart.__slots__))
    query = query.where(is_of(upload_parts, upload)).order_by(*upload_parts.primary_key)
    return [UploadPart(*row) for row in conn.execute(query)]


def _assemble(
    target: Path, upload: Upload, file: UploadFile, parts: Sequence[UploadPart], storage: Storage
) -> None:
    """Write a file from its parts in order, and compare it with the declared size and sha256."""
    keys = [part_key(upload, part.filename, part.start) for part in parts]
    with target.open("wb") as copy:
        whole = write_hashed(copy, chain.from_iterable(map(storage.read, keys)))
    if whole == ObjectInfo(file.sha256, file.size_bytes):
        return
    # Parts that came through the gateway have a sha256, which tells the store's faults from the
    # sender's.
    for part, key in zip(parts, keys, strict=True):
        if part.sha256 and part.sha256 != hashlib.sha256(b"".join(storage.read(key))).hexdigest():
            raise StorageError(key=key, reason="other bytes than were put")
    message = f"{file.filename} arrived with sha256 {whole.digest}, declared was "
    raise file_fault("digest_mismatch", f"{message}{file.sha256}; upload it again", file.filename)
