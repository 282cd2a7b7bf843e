"""Uploads: sessions that take an adapter's files in parts and become a version.

Methods take the caller's connection inside the caller's transaction and never commit. No
transaction may stay open during a transfer of bytes, so methods that transfer bytes open their own.
registry.upload_build ends the transfer of the files, registry.upload_proof the upload's proof.
"""

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from registry import adapter_rows, part_rows, presigned, upload_rows
from registry.adapter_rows import Version
from registry.base_ref import BaseRef
from registry.build import BuiltAdapter, built_fields
from registry.catalog import Catalog
from registry.errors import (
    InvalidUpload,
    ObjectNotFound,
    UploadIsPresigned,
    UploadNotFound,
    UploadNotOpen,
    UploadOffsetMismatch,
)
from registry.names import check_alias, check_new_name
from registry.presigned import OfferedFile
from registry.storage import PresignedStorage, Storage
from registry.transactions import Begin
from registry.upload_rows import (
    CANCELLED,
    COMPLETE,
    EXPIRED,
    GATEWAY,
    OPEN,
    PRESIGNED,
    FileSpec,
    Transfer,
    Upload,
    UploadFile,
    UploadPart,
)
from registry.upload_rules import RegistryLimits, check_files, check_part, check_quotas
from registry.validator import Validator
from registry.work_dir import WorkDir

# Adapter name of a dry run; no adapter can have this name.
DRY_RUN_NAME = "-"

_UPLOAD_ID = re.compile(r"up_[0-9a-f]{32}")


class Uploads:
    """Uploads of all tenants.

    work: where uploads are assembled; None for the system's temporary folder.
    """

    def __init__(
        self,
        catalog: Catalog,
        storage: Storage,
        limits: RegistryLimits | None = None,
        clock: Callable[[], float] = time.time,
        work: WorkDir | None = None,
    ) -> None:
        self.catalog = catalog
        self.storage = storage
        self.limits = limits or RegistryLimits()
        self.validator = Validator(self.limits.adapter)
        self.work = work or WorkDir()
        self._clock = clock

    def create_upload(
        self,
        conn: Connection,
        tenant_id: str,
        key_id: str,
        name: str,
        files: Mapping[str, FileSpec],
        alias: str | None = None,
        *,
        transfer: Transfer = GATEWAY,
        response_template: str | None = None,
        base_model: str | None = None,
        known: Version | None = None,
        limits: RegistryLimits | None = None,
    ) -> Upload:
        """Declare the files of a new version.

        response_template: the format of its tool calls as checked JSON; None for the base model's.
        base_model: the name of the base model that it is for; None to find it from its config.
        known: the version that `find_known` found, if its object exists. Its files are not sent
        again: the upload is complete at once, and `latest` and the alias move to that version.
        limits: the tenant's own limits; None for the default.
        Raises InvalidName, InvalidUpload, UnknownBaseModel, TooLarge, QuotaExceeded.
        """
        check_new_name(name, self.catalog.bases.names)
        if alias is not None:
            check_alias(alias)
        upload = self._new_upload(tenant_id, key_id, name, files, transfer, base_model)
        upload = replace(upload, alias=alias, response_template=response_template)
        adapter_rows.lock_tenant(conn, tenant_id)
        if known != self.find_known(conn, tenant_id, name, files, response_template, base_model):
            known = None
        check_quotas(conn, upload, limits or self.limits, is_known=known is not None)
        if known is None:
            upload_rows.insert_upload(conn, upload)
            return upload
        upload = replace(upload, files={name: _arrived(f) for name, f in upload.files.items()})
        upload_rows.insert_upload(conn, upload)
        self.publish(conn, upload, BuiltAdapter(upload, **built_fields(known)))
        upload_rows.mark_discarded(conn, tenant_id, upload.upload_id, self.now_ms())
        return self.get_upload(conn, tenant_id, upload.upload_id)

    def find_known(
        self,
        conn: Connection,
        tenant_id: str,
        name: str,
        files: Mapping[str, FileSpec],
        response_template: str | None = None,
        base_model: str | None = None,
    ) -> Version | None:
        """The ready version that was made from exactly these files, with this format of calls.

        base_model: only for the base model of this name; None for any that is served. Raises
        UnknownBaseModel.
        """
        bases = self.catalog.bases
        wanted = bases.candidates(base_model)
        found = upload_rows.find_same_files(conn, tenant_id, name, files, response_template)
        return next((it for it in found if bases.serving(it.base) in wanted), None)

    def has_object(self, version: Version) -> bool:
        """Whether the store has the version's object; a lost object must be uploaded again."""
        try:
            return self.storage.size(version.object_key) == version.size_bytes
        except ObjectNotFound:
            return False

    def create_dry_run(
        self,
        conn: Connection,
        tenant_id: str,
        key_id: str,
        files: Mapping[str, FileSpec],
        *,
        transfer: Transfer = GATEWAY,
        base_model: str | None = None,
    ) -> Upload:
        """Declare files that are only checked and do not become a version.

        base_model: as for `create_upload`. Raises InvalidUpload, UnknownBaseModel, TooLarge,
        QuotaExceeded.
        """
        upload = self._new_upload(tenant_id, key_id, DRY_RUN_NAME, files, transfer, base_model)
        upload = replace(upload, is_dry_run=True)
        adapter_rows.lock_tenant(conn, tenant_id)
        check_quotas(conn, upload, self.limits)
        upload_rows.insert_upload(conn, upload)
        return upload

    def get_upload(self, conn: Connection, tenant_id: str, upload_id: str) -> Upload:
        """Read an upload, whose state is EXPIRED once its time is over. Raises UploadNotFound."""
        upload = None
        if _UPLOAD_ID.fullmatch(upload_id):
            upload = upload_rows.find_upload(conn, tenant_id, upload_id)
        if upload is None:
            raise UploadNotFound(upload_id=upload_id)
        if upload.state == OPEN and upload.expires_at_ms <= self.now_ms():
            # The sweep writes the state to the row later.
            return replace(upload, state=EXPIRED)
        return upload

    def cancel_upload(self, conn: Connection, tenant_id: str, upload_id: str) -> Upload:
        """Cancel an open upload; repeating is harmless. Raises UploadNotFound, UploadNotOpen."""
        adapter_rows.lock_tenant(conn, tenant_id)
        upload = self.get_upload(conn, tenant_id, upload_id)
        if upload.state == OPEN:
            upload_rows.move_upload(conn, upload, CANCELLED)
        elif upload.state != CANCELLED:
            raise UploadNotOpen(upload_id=upload_id, state=upload.state)
        return self.get_upload(conn, tenant_id, upload_id)

    def get_version(self, conn: Connection, upload: Upload) -> Version | None:
        """The version that an upload became; None for a dry run and an upload not complete yet."""
        if upload.adapter_id is None or upload.version is None:
            return None
        return adapter_rows.find_version_row(
            conn, upload.tenant_id, upload.adapter_id, upload.version
        )

    def offer_files(self, begin: Begin, upload: Upload) -> dict[str, OfferedFile]:
        """Progress of the files of an open presigned upload, with fresh URLs for missing parts.

        The store is asked, but no bytes are transferred. Raises InvalidUpload, UploadNotOpen,
        StorageError.
        """
        storage = self.presigned_storage()
        files = presigned.begin_files(storage, begin, upload)
        limits = self.limits
        return {
            name: presigned.offer_file(
                storage, upload, file, limits.part_bytes, limits.presigned_ttl_s
            )
            for name, file in files.items()
        }

    def presigned_storage(self) -> PresignedStorage:
        """The store, if it takes parts by URL. Raises InvalidUpload if it does not."""
        if not isinstance(self.storage, PresignedStorage):
            raise InvalidUpload(
                code="presigned_not_supported",
                message="This server's store takes no presigned parts; send them to the gateway "
                "with transfer 'gateway'.",
                param="transfer",
            )
        return self.storage

    def put_part(
        self,
        begin: Begin,
        tenant_id: str,
        upload_id: str,
        filename: str,
        start: int,
        path: Path,
        size_bytes: int,
        sha256: str,
        total_bytes: int,
    ) -> UploadFile:
        """Take the part that lies at `path`, and return its file.

        A part that was taken before changes nothing, nor does a part of a complete upload, which
        has all declared bytes.
        begin: opens two short transactions; none is open while the part goes to the store.
        size_bytes, sha256: figures of the part, computed while it was received.
        total_bytes: size of the whole file, as the caller sent it.
        Raises UploadNotFound, UploadNotOpen, UploadIsPresigned, InvalidUpload, TooLarge,
        UploadOffsetMismatch, NoRoom, StorageError.
        """
        key = f"uploads/{upload_id}/{filename}/{start:016d}"
        part = UploadPart(filename, start, size_bytes, sha256, key)
        with begin() as conn:
            upload = self.get_upload(conn, tenant_id, upload_id)
            self.check_takes_parts(upload)
            file = check_part(upload, part, total_bytes, self.limits.part_bytes)
            if upload.state == COMPLETE:
                return file
            if start != file.received_bytes:
                return _answer_repeated(conn, upload, part)
        # The object is put before its row, so that a counted part always exists.
        self.storage.put(key, path)
        with begin() as conn:
            is_counted = part_rows.advance_file(conn, tenant_id, upload_id, part)
            upload = self.get_upload(conn, tenant_id, upload_id)
            if is_counted:
                return upload.files[filename]
            # Another call was first: one with this part, or one that ended the upload.
            if upload.state == OPEN:
                return _answer_repeated(conn, upload, part)
        self.storage.delete(key)
        raise UploadNotOpen(upload_id=upload_id, state=upload.state)

    def check_takes_parts(self, upload: Upload) -> None:
        """Raise UploadNotOpen or UploadIsPresigned unless the upload takes parts here."""
        if upload.state not in (OPEN, COMPLETE):
            raise UploadNotOpen(upload_id=upload.upload_id, state=upload.state)
        if upload.transfer == PRESIGNED:
            raise UploadIsPresigned(upload_id=upload.upload_id)

    def publish(self, conn: Connection, upload: Upload, built: BuiltAdapter) -> None:
        """Make the object a version, move `latest` and the upload's alias to it, and complete the
        upload.

        If the adapter has a version with the same bytes, that version is used. upload: as the
        caller read it under the tenant's lock. Raises UploadNotOpen, QuotaExceeded.
        """
        version = self.catalog.publish(conn, upload.adapter_name, built, upload.alias)
        is_moved = upload_rows.move_upload(
            conn,
            upload,
            COMPLETE,
            built=built_fields(built),
            adapter_id=version.adapter_id,
            version=version.version,
        )
        if not is_moved:
            # The upload's time is over; the sweep ends uploads without the tenant's lock.
            raise UploadNotOpen(upload_id=upload.upload_id, state=EXPIRED)

    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _new_upload(
        self,
        tenant_id: str,
        key_id: str,
        name: str,
        files: Mapping[str, FileSpec],
        transfer: Transfer,
        base_model: str | None,
    ) -> Upload:
        check_files(files, self.limits)
        self.catalog.bases.candidates(base_model)
        if transfer == PRESIGNED:
            self.presigned_storage()
        now_ms = self.now_ms()
        return Upload(
            upload_id=new_upload_id(),
            tenant_id=tenant_id,
            adapter_name=name,
            alias=None,
            state=OPEN,
            created_by_key=key_id,
            created_at_ms=now_ms,
            expires_at_ms=now_ms + self.limits.upload_ttl_s * 1000,
            files={
                filename: UploadFile(filename, spec.size_bytes, spec.sha256, received_bytes=0)
                for filename, spec in sorted(files.items())
            },
            transfer=transfer,
            base_model=base_model,
        )


def new_upload_id() -> str:
    return f"up_{secrets.token_hex(16)}"


def base_of(built: dict[str, Any]) -> BaseRef:
    """The base model in the fields of a built adapter."""
    return BaseRef(built["base_revision"], built["base_model"], built["base_variant"])


def _arrived(file: UploadFile) -> UploadFile:
    return replace(file, received_bytes=file.size_bytes)


def _answer_repeated(conn: Connection, upload: Upload, part: UploadPart) -> UploadFile:
    """The unchanged file, if exactly this part was taken before. Raises UploadOffsetMismatch."""
    file = upload.files[part.filename]
    taken = part_rows.find_part(conn, upload.tenant_id, upload.upload_id, part.filename, part.start)
    if taken != part:
        raise UploadOffsetMismatch(
            filename=part.filename, start=part.start, received_bytes=file.received_bytes
        )
    return file
