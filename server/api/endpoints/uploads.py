"""Uploads: a session, its files in parts, and the completion that proves the adapter.

Multipart forms are not used: a part is the raw body of a PUT, spooled to disk and hashed as it
arrives.
"""

import asyncio
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from pydantic import Field, JsonValue
from sqlalchemy import Connection
from starlette.requests import ClientDisconnect

from registry.catalog.adapter_rows import Version, find_version_row
from registry.errors import Invalid, StorageError
from registry.uploads import ends as upload_ends
from registry.uploads import opening as upload_opening
from registry.uploads import parts as upload_parts
from registry.uploads import rows as upload_rows
from registry.uploads.presigned import PartUrl, offer_files, storage_of
from registry.uploads.rows import (
    COMPLETE,
    GATEWAY,
    OPEN,
    PRESIGNED,
    Transfer,
    Upload,
    UploadFile,
    UploadPart,
)
from registry.uploads.rules import RegistryLimits
from registry.uploads.sweep import discard
from server.api import errors
from server.api.bodies import BodyFields, json_body, refuse_compressed
from server.api.deps import (
    ProverDep,
    RegistryLimitsDep,
    SpoolDep,
    StorageDep,
    UploadBuildsDep,
    tenants_router,
)
from server.api.endpoints.adapters import AdapterWriter
from server.api.limit_headers import retry_headers
from server.api.upload_view import UploadAnswer, UploadFileAnswer, upload_view
from server.billing.prices import Price, price_for, price_of_adapter
from server.database.clock import now_ms
from server.inference.routes import refuse_name_of_route
from server.limits.inflow import Arrival
from server.text.json_object import JsonObject
from server.tools.proof import checked_template

router = tenants_router()

# How long a completion waits for the proof before it answers, and when to ask again then.
_PROOF_WAIT_S = 30.0
_PROOF_RETRY_S = 5.0
# Bytes are gathered: a call of a thread for every 64 kB took longer than the network.
_WRITE_BYTES = 1 << 20

_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


# Longer than any valid name; the registry checks names.
_Name = Annotated[str, Field(max_length=128)]

_BaseName = Annotated[str, Field(max_length=256)]

_Described = Annotated[dict[_Name, JsonValue], Field(max_length=16)]


class _File(BodyFields):
    """A file to be sent.

    size_bytes: its size in bytes.   sha256: the sha256 of its content, in lower-case hex.
    """

    size_bytes: int = Field(ge=1, lt=2**63)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _NewFiles(BodyFields):
    """The files of an adapter, which are sent afterwards.

    files: `adapter_config.json` and `adapter_model.safetensors`, by name; `tokenizer.json`,
    `tokenizer_config.json` and `chat_template.jinja` too, where training changed them.
    transfer: `gateway` for parts that come to this server, `presigned` for the URLs in the answer.
    base_model: the name of the adapter's base model; null to find it by the files.
    """

    files: dict[_Name, _File] = Field(max_length=16)
    transfer: Transfer = GATEWAY
    base_model: _BaseName | None = None

    def declared(self) -> JsonObject:
        """The fields of an Upload that the body has."""
        files = {
            name: UploadFile(name, it.size_bytes, it.sha256) for name, it in self.files.items()
        }
        return {"files": files, "transfer": self.transfer, "base_model": self.base_model}


class _Proof(BodyFields):
    """A proof of a version on another base model.

    alias: an alias that the new version gets beside `latest`; null for none.
    base_model: the name of the other base model; null for the only other one that is served.
    """

    alias: _Name | None = None
    base_model: _BaseName | None = None


class _NewUpload(_NewFiles):
    """An upload of a new version.

    alias: an alias that the version gets beside `latest`; null for none.
    response_template: the format of its tool calls, by the name of a built-in one or as a
    description; null for the base model's.
    """

    alias: _Name | None = None
    response_template: _Name | _Described | None = None


@dataclass(frozen=True, slots=True)
class _UploadContext(AdapterWriter):
    """The parts that calls about uploads have in common, and the key that a call was made with."""

    storage: StorageDep
    operators_limits: RegistryLimitsDep

    @property
    def limits(self) -> RegistryLimits:
        """Limits on what this tenant may store and upload."""
        return self.limits_of(self.operators_limits)

    def new(self, name: str | None, files: dict[str, UploadFile], **fields: Any) -> Upload:
        its = self.identity
        return upload_opening.new_upload(its.tenant_id, its.key_id, name, files, now_ms(), **fields)

    async def read_upload(self, upload_id: str) -> Upload:
        """Read one of the tenant's uploads. Raises UploadNotFound."""
        return await self.database.read(
            lambda conn: upload_rows.get_upload(conn, self.identity.tenant_id, upload_id, now_ms())
        )

    async def cancelled(self, upload_id: str) -> Upload:
        return await self.database.write(
            lambda conn: upload_ends.cancel_upload(
                conn, self.identity.tenant_id, upload_id, now_ms()
            )
        )

    async def open(self, new: Upload) -> UploadAnswer:
        """Open an upload; where the store cannot offer its parts, it is cancelled again."""
        known = None if new.is_dry_run else await self._known(new)

        def write(conn: Connection) -> Upload:
            if not new.is_dry_run:
                refuse_name_of_route(conn, new.tenant_id, new.adapter_name)
            return upload_opening.open_upload(
                conn, new, self.view.catalog, self.storage, self.limits, known
            )

        upload = await self.database.write(write)
        try:
            return await self.rendered(upload)
        except StorageError:
            await self.cancelled(upload.upload_id)
            raise

    async def rendered(self, upload: Upload) -> UploadAnswer:
        """An upload as its tenant sees it, with the parts that are yet to be sent to the store."""
        missing: dict[str, tuple[PartUrl, ...]] = {}
        if upload.state == OPEN and upload.transfer == PRESIGNED:
            storage, begin = storage_of(self.storage), self.database.begin
            upload, missing = await asyncio.to_thread(
                offer_files, begin, storage, upload, self.operators_limits
            )

        def read(conn: Connection) -> tuple[Version | None, Price]:
            tenant_id, at_ms = upload.tenant_id, now_ms()
            if upload.adapter_id is None or upload.version is None:
                price = price_for(conn, at_ms, tenant_id=tenant_id, base_model=base_model or "")
                return None, price
            version = find_version_row(conn, tenant_id, upload.adapter_id, upload.version)
            return version, price_of_adapter(conn, at_ms, tenant_id, upload.adapter_id)

        # The base model that the files are for is not known until they are read.
        base_model = upload.base_model or (upload.built.base_model if upload.built else None)
        version, price = await self.database.read(read)
        return upload_view(upload, missing, base_model, version, price, self.view)

    async def _known(self, new: Upload) -> Version | None:
        """The version made of these files; None if there is none, or no object of it is sound."""
        known = await self.database.read(
            lambda conn: upload_opening.find_known(conn, new, self.view.catalog.bases)
        )
        if known is None:
            return None
        residency = self.view.bases.residency(known.object_key, known.base)
        is_sound = residency is None or residency.tier != "failed"
        is_there = is_sound and await asyncio.to_thread(
            upload_opening.has_object, self.storage, known
        )
        return known if is_there else None


_ContextDep = Annotated[_UploadContext, Depends()]


@router.post("/adapters/{name}/uploads", status_code=201)
async def create_upload(
    name: str,
    context: _ContextDep,
    body: Annotated[_NewUpload, json_body(_NewUpload)],
) -> UploadAnswer:
    """Begin an upload of an adapter's files: PEFT's two, and its tokenizer's if that has changed.

    The upload is complete at once if the same files were uploaded before, for the same format of
    tool calls: `response_template` is a built-in format's name, or a description of its own.
    `base_model` names the base model of the adapter; without it, the adapter's config and tensors
    decide.
    """
    template = None
    if (given := body.response_template) is not None:
        template = await asyncio.to_thread(checked_template, given, "response_template")
    new = context.new(name, alias=body.alias, response_template=template, **body.declared())
    return await context.open(new)


@router.post("/adapters:validate", status_code=201)
async def create_dry_run(
    context: _ContextDep,
    body: Annotated[_NewFiles, json_body(_NewFiles)],
) -> UploadAnswer:
    """Begin an upload that is only checked: its completion shows a passport and stores nothing."""
    return await context.open(context.new(None, **body.declared()))


@router.post("/adapters/{name}/versions/{version}/prove", status_code=202)
async def prove_again(
    name: str,
    version: int,
    prover: ProverDep,
    context: _ContextDep,
    body: Annotated[_Proof, json_body(_Proof)],
) -> UploadAnswer:
    """Prove a version on another base model than its own; it becomes a new version.

    `base_model` names the other base model; it may be left out if only one other is served.
    """
    new = context.new(name, {}, alias=body.alias, base_model=body.base_model)
    upload = await context.database.write(
        lambda conn: upload_opening.prove_again(
            conn, new, version, context.view.catalog, context.limits
        )
    )
    prover.wake()
    return await context.rendered(upload)


@router.delete("/uploads/{upload_id}")
async def cancel_upload(
    upload_id: str,
    context: _ContextDep,
) -> UploadAnswer:
    """Cancel an open upload and delete what was sent."""
    upload = await context.cancelled(upload_id)
    begin = context.database.begin
    await asyncio.to_thread(discard, begin, context.storage, upload, now_ms())
    return await context.rendered(upload)


@router.get("/uploads/{upload_id}")
async def get_upload(
    upload_id: str,
    context: _ContextDep,
) -> UploadAnswer:
    """Get an upload: its state, the bytes received and, once they exist, passport and version."""
    return await context.rendered(await context.read_upload(upload_id))


@router.put("/uploads/{upload_id}/files/{filename}")
async def put_part(
    upload_id: str,
    filename: str,
    request: Request,
    spool: SpoolDep,
    context: _ContextDep,
    content_range: Annotated[str | None, Header(max_length=64)] = None,
) -> UploadFileAnswer:
    """Send the next part of a file, placed by Content-Range, or a whole small file without it."""
    tenant_id, part_bytes = context.identity.tenant_id, context.operators_limits.part_bytes
    # Checked before the first byte, so that a refused part takes no place in the spool.
    upload_parts.check_takes_parts(await context.read_upload(upload_id))
    most_bytes = _announced(request, part_bytes)
    async with spool.place(tenant_id, most_bytes) as place:
        size_bytes, sha256 = await _receive(request, place.arrival, place.path, most_bytes)
        start, total = _placed(content_range, size_bytes)
        file = await asyncio.to_thread(
            upload_parts.put_part,
            context.database.begin,
            context.storage,
            tenant_id,
            upload_id,
            UploadPart(filename, start, size_bytes, sha256),
            place.path,
            total,
            part_bytes,
            now_ms(),
        )
    return UploadFileAnswer.of_record(file)


@router.post("/uploads/{upload_id}/complete")
async def complete_upload(
    upload_id: str,
    upload_builds: UploadBuildsDep,
    prover: ProverDep,
    context: _ContextDep,
    response: Response,
) -> UploadAnswer:
    """Check, store, prove and publish what was uploaded.

    A call meanwhile joins the first one, and a later call returns its result. The status is 200
    when all is done, and 202 while an engine has yet to prove the adapter: ask again.
    """
    upload = await upload_builds.build(context.identity.tenant_id, upload_id)
    upload = upload_ends.check_fault(await prover.wait_proved(upload, _PROOF_WAIT_S))
    if upload.state != COMPLETE:
        response.status_code = 202
        response.headers.update(retry_headers(_PROOF_RETRY_S))
    return await context.rendered(upload)


def _announced(request: Request, limit_bytes: int) -> int:
    """Most bytes that the body may have: what its Content-Length says, and a part at most."""
    length = request.headers.get("content-length", "")
    return min(int(length), limit_bytes) if length.isdecimal() else limit_bytes


async def _receive(
    request: Request, arrival: Arrival, path: Path, limit_bytes: int
) -> tuple[int, str]:
    """Spool the body, refused at the first byte over the limit of a part; its size and sha256."""
    refuse_compressed(request)
    hasher, size_bytes, waiting, pieces = hashlib.sha256(), 0, bytearray(), request.stream()
    try:
        with path.open("wb") as file:
            while piece := await arrival.next(pieces):
                size_bytes += len(piece)
                if size_bytes > limit_bytes:
                    raise errors.request_too_large(limit_bytes)
                hasher.update(piece)
                waiting += piece
                if len(waiting) >= _WRITE_BYTES:
                    await asyncio.to_thread(file.write, waiting)
                    waiting = bytearray()
            await asyncio.to_thread(file.write, waiting)
    except ClientDisconnect:
        raise Invalid("The part ended early; send it again.") from None
    except TimeoutError:
        raise errors.part_timeout() from None
    return size_bytes, hasher.hexdigest()


def _placed(content_range: str | None, size_bytes: int) -> tuple[int, int]:
    """(start, total) of a part: its first byte in the file, and the file's size in bytes."""
    if content_range is None:
        return 0, size_bytes
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    if not match:
        raise Invalid("Content-Range must read 'bytes FIRST-LAST/TOTAL'.", param="Content-Range")
    first, last, total = (int(group) for group in match.groups())
    if last - first + 1 != size_bytes or last >= total:
        raise Invalid(
            f"Content-Range says {last - first + 1} of {total} bytes; the body has {size_bytes}.",
            param="Content-Range",
        )
    return first, total
