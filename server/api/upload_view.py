"""Uploads as their tenant sees them."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from registry.catalog.adapter_rows import Version
from registry.uploads.presigned import PartUrl
from registry.uploads.rows import Transfer, Upload, UploadFile, UploadState
from server.api.adapter_view import AdapterView, PassportFields, VersionAnswer, passport_view
from server.api.answer import Answer
from server.billing.prices import Price

_SHA256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
_FILE = {"size_bytes": 8_716_288, "sha256": _SHA256, "received_bytes": 4_194_304}


class SentFile(Answer):
    """A file of an upload, and the bytes of it that have arrived.   sha256: hex."""

    size_bytes: int = Field(examples=[8_716_288])
    sha256: str = Field(examples=[_SHA256])
    received_bytes: int = Field(examples=[4_194_304])


class UploadFileAnswer(SentFile):
    """The answer to a part of a file."""

    object: Literal["upload.file"] = "upload.file"
    filename: str = Field(examples=["adapter_model.safetensors"])


class PartToSend(Answer):
    """A part that is yet to be sent to the store, and its URL.   number: counts from 1."""

    number: int = Field(examples=[2])
    start: int = Field(examples=[4_194_304])
    size_bytes: int = Field(examples=[4_194_304])
    url: str = Field(examples=["https://store.example.com/bucket/part?signature=..."])


class PresignedFile(SentFile):
    """A file of an open upload that goes straight to the store."""

    parts: list[PartToSend]


class UploadFault(Answer):
    """The reason why an upload has failed."""

    code: str | None = Field(examples=["not_finite"])
    param: str | None = Field(examples=["adapter_model.safetensors"])
    message: str = Field(examples=["Tensor lm_head.lora_A has a NaN or an infinity; train again."])


class UploadAnswer(Answer):
    """An upload. passport, version: null until there are any.

    adapter: null for a dry run.   base_model: the one that the upload names, or that its files are
    for; null until they are read.
    created_at, expires_at: in Unix seconds.
    """

    id: str = Field(examples=["up_d2f0c5a97be14b3f8a60c1d4e7f29b83"])
    object: Literal["upload"] = "upload"
    adapter: str | None = Field(examples=["my-adapter"])
    alias: str | None = Field(examples=["production"])
    base_model: str | None = Field(examples=["base"])
    dry_run: bool
    transfer: Transfer
    state: UploadState
    files: dict[str, SentFile | PresignedFile] = Field(
        examples=[{"adapter_model.safetensors": _FILE}]
    )
    created_at: int = Field(examples=[1_798_761_600])
    expires_at: int = Field(examples=[1_798_848_000])
    error: UploadFault | None
    passport: PassportFields | None
    version: VersionAnswer | None


def upload_view(
    upload: Upload,
    missing: Mapping[str, Sequence[PartUrl]],
    base_model: str | None,
    version: Version | None,
    price: Price,
    view: AdapterView,
) -> UploadAnswer:
    """An upload. missing: the parts that are yet to be sent to the store, by file."""
    passport = upload.built.passport if upload.built else None
    fault = None
    if upload.error:
        fault = UploadFault(code=upload.error_code, param=upload.error_param, message=upload.error)
    return UploadAnswer.of_record(
        upload,
        id=upload.upload_id,
        adapter=None if upload.is_dry_run else upload.adapter_name,
        base_model=base_model,
        dry_run=upload.is_dry_run,
        files={name: _file(file, missing.get(name)) for name, file in upload.files.items()},
        error=fault,
        passport=passport_view(passport, passport["size_bytes"], price) if passport else None,
        version=view.version(version, price) if version else None,
    )


def _file(file: UploadFile, missing: Sequence[PartUrl] | None) -> SentFile | PresignedFile:
    if missing is None:
        return SentFile.of_record(file)
    return PresignedFile.of_record(file, parts=[PartToSend.of_record(part) for part in missing])
