"""From the parts of a complete upload to a stored canonical object. Bytes only, no database."""

import hashlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.adapter_rows import READY, Version
from registry.base_model import BaseModel
from registry.errors import InvalidAdapter, StorageError
from registry.peft_config import CONFIG_FILE
from registry.peft_format import WEIGHTS_FILE, ObjectInfo, write_canonical
from registry.storage import Storage
from registry.upload_rows import Upload, UploadFile, UploadPart
from registry.validate import AdapterLimits, CheckedAdapter, check_adapter


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """What is to be built. version: what the upload became, if it is complete already."""

    upload: Upload
    parts: tuple[UploadPart, ...]
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class BuiltAdapter:
    """A canonical object that lies in the store (of a dry run: nowhere) and has no row yet."""

    upload: Upload
    digest: str
    object_key: str
    rank: int
    size_bytes: int
    base_revision: str
    passport: dict[str, Any]

    def as_version(self, adapter_id: str, number: int, created_at_ms: int) -> Version:
        return Version(
            adapter_id=adapter_id,
            version=number,
            digest=self.digest,
            object_key=self.object_key,
            rank=self.rank,
            size_bytes=self.size_bytes,
            base_revision=self.base_revision,
            passport=self.passport,
            state=READY,
            created_at_ms=created_at_ms,
            created_by_key=self.upload.created_by_key,
        )


def object_key(tenant_id: str, digest: str) -> str:
    """Shared by a tenant's equal adapters, never across tenants."""
    return f"tenants/{tenant_id}/{digest}"


def build_adapter(
    plan: CompletionPlan,
    base: BaseModel,
    storage: Storage,
    limits: AdapterLimits,
    work_dir: Path | None,
) -> BuiltAdapter:
    """Assemble, check, write and store. Leaves nothing in work_dir, nor in the store on failure.

    Raises InvalidAdapter and TooLarge for the caller's fault, StorageError for the world's.
    """
    upload = plan.upload
    with tempfile.TemporaryDirectory(prefix=f"{upload.upload_id}-", dir=work_dir) as name:
        folder = Path(name)
        for file in upload.files.values():
            parts = (part for part in plan.parts if part.filename == file.filename)
            _assemble(folder / file.filename, file, parts, storage)
        config_bytes = (folder / CONFIG_FILE).read_bytes()
        checked = check_adapter(config_bytes, folder / WEIGHTS_FILE, base, limits)
        written = _write_object(folder / "canonical", folder / WEIGHTS_FILE, checked)
        key = object_key(upload.tenant_id, written.digest)
        if not upload.is_dry_run:
            # The object before the row: without a row it is waste, a row without it an outage.
            storage.put(key, folder / "canonical")
    return BuiltAdapter(
        upload=upload,
        digest=written.digest,
        object_key=key,
        rank=checked.passport.rank,
        size_bytes=written.size_bytes,
        base_revision=base.base_revision,
        passport=checked.passport.to_dict(),
    )


def _assemble(
    target: Path, file: UploadFile, parts: Iterable[UploadPart], storage: Storage
) -> None:
    """Write a file from its parts in order, and compare it with what was declared."""
    whole = hashlib.sha256()
    size_bytes = 0
    with target.open("wb") as copy:
        for part in parts:
            hasher = hashlib.sha256()
            for chunk in storage.read(part.object_key):
                hasher.update(chunk)
                whole.update(chunk)
                size_bytes += len(chunk)
                copy.write(chunk)
            if part.sha256 is not None and hasher.hexdigest() != part.sha256:
                raise StorageError(key=part.object_key, reason="other bytes than were put")
    if size_bytes != file.size_bytes or whole.hexdigest() != file.sha256:
        raise InvalidAdapter(
            code="digest_mismatch",
            message=f"{file.filename} arrived with sha256 {whole.hexdigest()}, declared was "
            f"{file.sha256}; upload it again.",
            param=file.filename,
        )


def _write_object(target: Path, weights: Path, checked: CheckedAdapter) -> ObjectInfo:
    with target.open("wb") as destination, weights.open("rb") as source:
        return write_canonical(
            destination, source, checked.header, checked.modules, checked.invocation_tokens
        )
