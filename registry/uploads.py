"""Uploads: resumable sessions that become versions.

Methods take the caller's connection inside the caller's transaction and never commit. No
transaction may stay open while bytes move: `put_part` opens its own, and completing an upload is
split into steps that registry.completion puts together.
"""

import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Connection

from registry import adapter_rows, upload_rows
from registry.adapter_rows import Version
from registry.build import BuiltAdapter, CompletionPlan, build_adapter
from registry.catalog import Catalog
from registry.errors import (
    Invalid,
    InvalidAdapter,
    TooLarge,
    UploadNotComplete,
    UploadNotFound,
    UploadNotOpen,
    UploadOffsetMismatch,
)
from registry.names import check_alias, check_new_name
from registry.storage import Storage
from registry.upload_rows import (
    COMPLETE,
    EXPIRED,
    FAILED,
    OPEN,
    FileSpec,
    Upload,
    UploadFile,
    UploadPart,
)
from registry.upload_rules import RegistryLimits, check_files, check_part, check_quotas
from registry.validator import Validator

# Opens a transaction of the caller's database: commits on leaving, rolls back on an exception.
Begin = Callable[[], AbstractContextManager[Connection]]

_UPLOAD_ID = re.compile(r"up_[0-9a-f]{32}")


class Uploads:
    """work_dir: where uploads are assembled; None for the system's temporary folder."""

    def __init__(
        self,
        catalog: Catalog,
        storage: Storage,
        limits: RegistryLimits | None = None,
        clock: Callable[[], float] = time.time,
        work_dir: Path | None = None,
    ) -> None:
        self.catalog = catalog
        self.limits = limits or RegistryLimits()
        self._validator = Validator(catalog.base, self.limits.adapter)
        self._storage = storage
        self._clock = clock
        self._work_dir = work_dir

    def create_upload(
        self,
        conn: Connection,
        tenant_id: str,
        key_id: str,
        name: str,
        files: Mapping[str, FileSpec],
        alias: str | None = None,
        *,
        max_adapters: int | None = None,
        max_adapter_bytes_total: int | None = None,
    ) -> Upload:
        """Declare the two files of a new version.

        max_adapters, max_adapter_bytes_total: the tenant's own, None for the default.
        Raises InvalidName, InvalidUpload, TooLarge, QuotaExceeded.
        """
        check_new_name(name, self.catalog.base.model_id)
        if alias is not None:
            check_alias(alias)
        check_files(files, self.limits)
        limits = self.limits
        if max_adapters is not None:
            limits = replace(limits, max_adapters=max_adapters)
        if max_adapter_bytes_total is not None:
            limits = replace(limits, max_adapter_bytes_total=max_adapter_bytes_total)
        new_bytes = sum(spec.size_bytes for spec in files.values())
        adapter_rows.lock_tenant(conn, tenant_id)
        now_ms = self._now_ms()
        check_quotas(conn, tenant_id, name, new_bytes, limits, now_ms)
        upload = Upload(
            upload_id=f"up_{secrets.token_hex(16)}",
            tenant_id=tenant_id,
            adapter_name=name,
            alias=alias,
            state=OPEN,
            created_by_key=key_id,
            created_at_ms=now_ms,
            expires_at_ms=now_ms + self.limits.upload_ttl_s * 1000,
            files={
                filename: UploadFile(filename, spec.size_bytes, spec.sha256, received_bytes=0)
                for filename, spec in sorted(files.items())
            },
        )
        upload_rows.insert_upload(conn, upload)
        return upload

    def get_upload(self, conn: Connection, tenant_id: str, upload_id: str) -> Upload:
        """Raises UploadNotFound."""
        upload = None
        if _UPLOAD_ID.fullmatch(upload_id):
            upload = upload_rows.find_upload(conn, tenant_id, upload_id)
        if upload is None:
            raise UploadNotFound(upload_id=upload_id)
        if upload.state == OPEN and upload.expires_at_ms <= self._now_ms():
            # The sweep will write it down; nobody has to wait for the sweep.
            return replace(upload, state=EXPIRED)
        return upload

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
        """Take the part that lies at `path`. The same part again changes nothing.

        begin: opens one of two short transactions; none is open while the part goes to the store.
        size_bytes, sha256: of the part, as counted while it was received.   total_bytes: of the
        whole file, as the caller sent it. Raises UploadNotFound, UploadNotOpen, InvalidUpload,
        TooLarge, UploadOffsetMismatch, StorageError.
        """
        key = f"uploads/{upload_id}/{filename}/{start:016d}"
        part = UploadPart(filename, start, size_bytes, sha256, key)
        with begin() as conn:
            upload = self.get_upload(conn, tenant_id, upload_id)
            _check_open(upload)
            file = check_part(upload, part, total_bytes, self.limits.part_bytes)
            if start != file.received_bytes:
                return _answer_repeated(conn, upload, part)
        # The object before the row: a part that is counted is there.
        self._storage.put(key, path)
        with begin() as conn:
            is_counted = upload_rows.advance_file(conn, tenant_id, upload_id, part)
            upload = self.get_upload(conn, tenant_id, upload_id)
            if is_counted:
                return upload.files[filename]
            # Someone else moved first: another sender of this part, or the end of the upload.
            if upload.state == OPEN:
                return _answer_repeated(conn, upload, part)
        self._storage.delete(key)
        raise UploadNotOpen(upload_id=upload_id, state=upload.state)

    def prepare_complete(self, conn: Connection, tenant_id: str, upload_id: str) -> CompletionPlan:
        """What `build` needs. A complete upload's plan carries its version: nothing is left to do.

        Raises UploadNotFound, UploadNotOpen, UploadNotComplete, and for a failed upload the fault
        that it failed with.
        """
        upload = self.get_upload(conn, tenant_id, upload_id)
        if upload.state == COMPLETE:
            return CompletionPlan(upload, (), _version_of(conn, upload))
        if upload.state == FAILED:
            raise InvalidAdapter(
                code=upload.error_code or "invalid_adapter",
                message=upload.error or "",
                param=upload.error_param,
            )
        _check_open(upload)
        missing = {
            file.filename: file.size_bytes - file.received_bytes
            for file in upload.files.values()
            if file.received_bytes < file.size_bytes
        }
        if missing:
            raise UploadNotComplete(missing_bytes=missing)
        return CompletionPlan(upload, tuple(upload_rows.list_parts(conn, tenant_id, upload_id)))

    def build(self, plan: CompletionPlan) -> BuiltAdapter:
        """Check the files and store the canonical object. No transaction may be open meanwhile.

        Raises InvalidAdapter or TooLarge (then `fail_complete`), StorageError or
        ValidatorUnavailable (then try again).
        """
        return build_adapter(plan, self._validator, self._storage, self._work_dir)

    def finish_complete(self, conn: Connection, built: BuiltAdapter) -> Version:
        """Make the object a version and move `latest`, and the alias asked for, to it.

        The same bytes as a version that the adapter has are that version. Raises UploadNotOpen.
        """
        tenant_id, upload_id = built.upload.tenant_id, built.upload.upload_id
        adapter_rows.lock_tenant(conn, tenant_id)
        upload = self.get_upload(conn, tenant_id, upload_id)
        if upload.state == COMPLETE:
            return _version_of(conn, upload)
        _check_open(upload)
        version = self.catalog.publish(conn, upload.adapter_name, built, upload.alias)
        result = {"adapter_id": version.adapter_id, "version": version.version}
        upload_rows.close_upload(conn, tenant_id, upload_id, state=COMPLETE, **result)
        return version

    def fail_complete(self, conn: Connection, upload: Upload, error: Invalid | TooLarge) -> None:
        """Close the upload with the fault of its files. An upload that is closed stays as it is."""
        upload_rows.close_upload(
            conn,
            upload.tenant_id,
            upload.upload_id,
            state=FAILED,
            error_code=error.code,
            error_param=error.param,
            error=str(error),
        )

    def discard_object(self, conn: Connection, built: BuiltAdapter) -> None:
        """Delete a stored object that became no version, unless it is or may become another's."""
        tenant_id = built.upload.tenant_id
        # Open uploads first: one that completes between the two questions is seen by the second.
        open_uploads = upload_rows.open_upload_ids(conn, tenant_id) - {built.upload.upload_id}
        if not open_uploads and not adapter_rows.has_digest(conn, tenant_id, built.digest):
            self._storage.delete(built.object_key)

    def expire_uploads(self, conn: Connection) -> list[Upload]:
        """Close what is over its time. Returns the uploads, of any end, that still have parts."""
        upload_rows.expire(conn, self._now_ms())
        return upload_rows.list_undiscarded(conn, self.limits.max_discards_per_sweep)

    def discard_parts(self, upload: Upload) -> None:
        """Delete the parts of a closed upload from the store. Again is harmless."""
        for found in list(self._storage.list(f"uploads/{upload.upload_id}/")):
            self._storage.delete(found.key)

    def forget_parts(self, conn: Connection, upload: Upload) -> None:
        """Write down that `discard_parts` succeeded."""
        upload_rows.mark_discarded(conn, upload.tenant_id, upload.upload_id, self._now_ms())

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _check_open(upload: Upload) -> None:
    if upload.state != OPEN:
        raise UploadNotOpen(upload_id=upload.upload_id, state=upload.state)


def _answer_repeated(conn: Connection, upload: Upload, part: UploadPart) -> UploadFile:
    """The file as it is, if this very part was taken before. Raises UploadOffsetMismatch."""
    file = upload.files[part.filename]
    taken = upload_rows.find_part(
        conn, upload.tenant_id, upload.upload_id, part.filename, part.start
    )
    if taken != part:
        raise UploadOffsetMismatch(
            filename=part.filename, start=part.start, received_bytes=file.received_bytes
        )
    return file


def _version_of(conn: Connection, upload: Upload) -> Version:
    assert upload.adapter_id is not None
    assert upload.version is not None
    version = adapter_rows.find_version_row(
        conn, upload.tenant_id, upload.adapter_id, upload.version
    )
    assert version is not None, "versions are never removed"
    return version
