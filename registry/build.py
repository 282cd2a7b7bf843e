"""Building of a stored canonical object from an upload's parts; no database is used."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.adapter_rows import READY, Version
from registry.base_model import BaseModel
from registry.errors import InvalidAdapter, StorageError, ValidatorUnavailable
from registry.own_tokenizer import TOKENIZER_FILES
from registry.peft_config import CONFIG_FILE
from registry.peft_format import WEIGHTS_FILE
from registry.storage import Storage, folder_of
from registry.token_rows import most_bytes_of_rows
from registry.upload_rows import Upload, UploadFile, UploadPart
from registry.validator import Validator
from registry.work_dir import WorkDir


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """An upload to build, the parts of its files, and the base models that it may be for."""

    upload: Upload
    parts: tuple[UploadPart, ...]
    bases: tuple[BaseModel, ...]


@dataclass(frozen=True, slots=True)
class BuiltAdapter:
    """A canonical object that is stored (except for a dry run's) but has no version row yet."""

    upload: Upload
    digest: str
    object_key: str
    rank: int
    size_bytes: int
    base_revision: str
    base_model: str
    base_variant: str
    passport: dict[str, Any]
    tokenizer: str | None = None

    def as_version(self, adapter_id: str, number: int, created_at_ms: int) -> Version:
        return Version(
            adapter_id=adapter_id,
            version=number,
            state=READY,
            created_at_ms=created_at_ms,
            created_by_key=self.upload.created_by_key,
            response_template=self.upload.response_template,
            **built_fields(self),
        )


def built_fields(source: BuiltAdapter | Version) -> dict[str, Any]:
    """Fields of a built adapter or version that an upload's row stores."""
    return {name: getattr(source, name) for name in BuiltAdapter.__slots__ if name != "upload"}


def object_key(tenant_id: str, digest: str) -> str:
    """Key of a canonical object: shared by a tenant's equal adapters, never across tenants."""
    return f"tenants/{tenant_id}/{digest}"


def tenant_of(object_key: str) -> str:
    """Id of the tenant in a key that `object_key` made."""
    return object_key.split("/")[1]


def build_adapter(
    plan: BuildPlan, validator: Validator, storage: Storage, work: WorkDir
) -> BuiltAdapter:
    """Assemble the files, have them checked and made canonical, and store the canonical object.

    Leaves no files in `work`. Raises InvalidAdapter and TooLarge for a fault of the files, NoRoom,
    StorageError and ValidatorUnavailable for a fault of ours; then completing may be repeated.
    """
    upload = plan.upload
    size_bytes = sum(file.size_bytes for file in upload.files.values())
    most_bytes = size_bytes + max(map(most_bytes_of_rows, plan.bases), default=0)
    stored = (folder_of(storage), most_bytes)
    try:
        # The files and the canonical object lie there together.
        with work.folder(f"{upload.upload_id}-", size_bytes + most_bytes, stored) as folder:
            for file in upload.files.values():
                parts = [part for part in plan.parts if part.filename == file.filename]
                _assemble(folder / file.filename, file, parts, storage)
            validated = validator.check(
                plan.bases,
                upload.tenant_id,
                folder / CONFIG_FILE,
                folder / WEIGHTS_FILE,
                folder / "canonical",
                {name: folder / name for name in TOKENIZER_FILES if name in upload.files},
            )
            key = object_key(upload.tenant_id, validated.digest)
            if not upload.is_dry_run:
                # The object is put before its row: an object without a row is only waste, a row
                # without an object is an outage.
                storage.put(key, folder / "canonical")
    except OSError as error:
        raise ValidatorUnavailable(reason=str(error)) from error
    base = next(base for base in plan.bases if base.model_id == validated.base_model)
    return BuiltAdapter(
        upload=upload,
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


def _assemble(
    target: Path, file: UploadFile, parts: Sequence[UploadPart], storage: Storage
) -> None:
    """Write a file from its parts in order, and compare it with the declared size and sha256."""
    whole = hashlib.sha256()
    size_bytes = 0
    with target.open("wb") as copy:
        for part in parts:
            for chunk in storage.read(part.object_key):
                whole.update(chunk)
                size_bytes += len(chunk)
                copy.write(chunk)
    if size_bytes == file.size_bytes and whole.hexdigest() == file.sha256:
        return
    # Parts that came through the gateway have a sha256, which tells the store's faults from the
    # sender's.
    for part in parts:
        if part.sha256 is not None and _sha256(storage.read(part.object_key)) != part.sha256:
            raise StorageError(key=part.object_key, reason="other bytes than were put")
    raise InvalidAdapter(
        code="digest_mismatch",
        message=f"{file.filename} arrived with sha256 {whole.hexdigest()}, declared was "
        f"{file.sha256}; upload it again.",
        param=file.filename,
    )


def _sha256(chunks: Iterable[bytes]) -> str:
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()
