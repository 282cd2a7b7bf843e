"""Uploads: a session, its two files in parts, and the completion that proves them.

No multipart forms: a part is the raw body of a PUT, spooled to disk and hashed as it arrives.
"""

import asyncio
import hashlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from registry import completion
from registry.upload_rows import FileSpec, Upload, UploadFile
from server import errors
from server.deps import AdaptersKey, GatewayDep
from server.routes.adapters import render_version

router = APIRouter()

_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size_bytes: int = Field(ge=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _NewUpload(BaseModel):
    model_config = ConfigDict(extra="forbid")
    files: dict[str, _File]
    alias: str | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A received part, in a file of its own."""

    path: Path
    size_bytes: int
    sha256: str


@router.post("/adapters/{name}/uploads", status_code=201)
async def create_upload(
    name: str, body: _NewUpload, gateway: GatewayDep, identity: AdaptersKey
) -> dict[str, Any]:
    files = {filename: FileSpec(f.size_bytes, f.sha256) for filename, f in body.files.items()}
    upload = await gateway.database.write(
        lambda conn: gateway.uploads.create_upload(
            conn,
            identity.tenant_id,
            identity.key_id,
            name,
            files,
            alias=body.alias,
            max_adapters=identity.max_adapters,
            max_adapter_bytes_total=identity.max_adapter_bytes_total,
        )
    )
    return _upload(upload)


@router.get("/uploads/{upload_id}")
async def get_upload(upload_id: str, gateway: GatewayDep, identity: AdaptersKey) -> dict[str, Any]:
    return _upload(
        await gateway.database.read(
            lambda conn: gateway.uploads.get_upload(conn, identity.tenant_id, upload_id)
        )
    )


@router.put("/uploads/{upload_id}/files/{filename}")
async def put_part(
    upload_id: str,
    filename: str,
    request: Request,
    gateway: GatewayDep,
    identity: AdaptersKey,
    content_range: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    """The next part of a file, by Content-Range, or a whole small file without one."""
    with tempfile.TemporaryDirectory(prefix="part-", dir=gateway.work_dir) as folder:
        part = await _receive(request, Path(folder) / "part", gateway.uploads.limits.part_bytes)
        start, total = _placed(content_range, part.size_bytes)
        file = await asyncio.to_thread(
            gateway.uploads.put_part,
            gateway.database.begin,
            identity.tenant_id,
            upload_id,
            filename,
            start,
            part.path,
            part.size_bytes,
            part.sha256,
            total,
        )
    return {"object": "upload.file", "filename": filename, **_file(file)}


@router.post("/uploads/{upload_id}/complete")
async def complete_upload(
    upload_id: str, gateway: GatewayDep, identity: AdaptersKey
) -> dict[str, Any]:
    """Verify, validate, store, publish; asked again it gives the same version again."""
    version = await asyncio.to_thread(
        completion.complete_upload,
        gateway.uploads,
        gateway.database.begin,
        identity.tenant_id,
        upload_id,
    )
    upload = await gateway.database.read(
        lambda conn: gateway.uploads.get_upload(conn, identity.tenant_id, upload_id)
    )
    rendered = render_version(gateway, version)
    return {**_upload(upload), "adapter": upload.adapter_name, "version": rendered}


async def _receive(request: Request, path: Path, limit_bytes: int) -> _Part:
    """Spool the body, refused at the first byte over the limit of a part."""
    hasher, size_bytes = hashlib.sha256(), 0
    try:
        with path.open("wb") as file:
            async for chunk in request.stream():
                size_bytes += len(chunk)
                if size_bytes > limit_bytes:
                    raise errors.request_too_large(limit_bytes)
                hasher.update(chunk)
                await asyncio.to_thread(file.write, chunk)
    except ClientDisconnect:
        raise errors.invalid_request("The part ended early; send it again.") from None
    return _Part(path, size_bytes, hasher.hexdigest())


def _placed(content_range: str | None, size_bytes: int) -> tuple[int, int]:
    """(start, total) of a part."""
    if content_range is None:
        return 0, size_bytes
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    if not match:
        raise errors.invalid_request(
            "Content-Range must read 'bytes FIRST-LAST/TOTAL'.", param="Content-Range"
        )
    first, last, total = (int(group) for group in match.groups())
    if last - first + 1 != size_bytes or last >= total:
        raise errors.invalid_request(
            f"Content-Range says {last - first + 1} of {total} bytes; the body has {size_bytes}.",
            param="Content-Range",
        )
    return first, total


def _upload(upload: Upload) -> dict[str, Any]:
    fault = {"code": upload.error_code, "param": upload.error_param, "message": upload.error}
    return {
        "id": upload.upload_id,
        "object": "upload",
        "adapter": upload.adapter_name,
        "alias": upload.alias,
        "state": upload.state,
        "files": {name: _file(file) for name, file in upload.files.items()},
        "created_at": upload.created_at_ms // 1000,
        "expires_at": upload.expires_at_ms // 1000,
        "error": fault if upload.error else None,
    }


def _file(file: UploadFile) -> dict[str, Any]:
    return {
        "size_bytes": file.size_bytes,
        "sha256": file.sha256,
        "received_bytes": file.received_bytes,
    }
