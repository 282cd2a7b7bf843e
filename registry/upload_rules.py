"""What an upload may declare and what a part may be. Nothing here changes anything."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection

from registry import adapter_rows, upload_rows
from registry.errors import InvalidUpload, QuotaExceeded, TooLarge, shown
from registry.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES
from registry.peft_format import WEIGHTS_FILE
from registry.upload_rows import FileSpec, Upload, UploadFile, UploadPart
from registry.validate import AdapterLimits

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """What a tenant may upload, and how.

    max_adapters, max_adapter_bytes_total: for a tenant that has none of its own.
    part_bytes: of every part but the last.
    """

    adapter: AdapterLimits = field(default_factory=AdapterLimits)
    max_adapters: int = 100
    max_adapter_bytes_total: int = 20 << 30
    max_open_uploads: int = 8
    upload_ttl_s: int = 24 * 3600
    part_bytes: int = 16 << 20
    max_discards_per_sweep: int = 100


def check_files(files: Mapping[str, FileSpec], limits: RegistryLimits) -> None:
    """Exactly the two files that PEFT writes. Raises InvalidUpload, TooLarge."""
    max_bytes = {
        CONFIG_FILE: MAX_CONFIG_BYTES,
        WEIGHTS_FILE: limits.adapter.max_adapter_bytes,
    }
    if files.keys() != max_bytes.keys():
        given = ", ".join(shown(name) for name in list(files)[:4]) or "none"
        raise InvalidUpload(
            code="invalid_files",
            message=f"An adapter is exactly {CONFIG_FILE} and {WEIGHTS_FILE}, not {given}; "
            "archives, pickles and other files are not taken.",
            param="files",
        )
    for name, spec in files.items():
        if spec.size_bytes < 1 or not _SHA256.fullmatch(spec.sha256):
            raise InvalidUpload(
                code="invalid_files",
                message=f"{name} needs a size_bytes from 1 and a sha256 of 64 hex digits.",
                param=name,
            )
        if spec.size_bytes > max_bytes[name]:
            raise TooLarge(what=name, size_bytes=spec.size_bytes, limit_bytes=max_bytes[name])


def check_quotas(
    conn: Connection,
    tenant_id: str,
    name: str,
    new_bytes: int,
    limits: RegistryLimits,
    now_ms: int,
) -> None:
    """Whether the tenant may open this upload. Open uploads count as if they had succeeded.

    Raises QuotaExceeded.
    """
    open_names = upload_rows.open_upload_names(conn, tenant_id, now_ms)
    if len(open_names) >= limits.max_open_uploads:
        raise QuotaExceeded(
            quota="max_open_uploads",
            limit=limits.max_open_uploads,
            remedy="complete an upload or let it expire",
        )
    names = {name, *open_names, *adapter_rows.adapter_names(conn, tenant_id)}
    if len(names) > limits.max_adapters:
        raise QuotaExceeded(
            quota="max_adapters", limit=limits.max_adapters, remedy="delete an adapter first"
        )
    used_bytes = adapter_rows.stored_bytes(conn, tenant_id)
    used_bytes += upload_rows.declared_bytes(conn, tenant_id, now_ms)
    if used_bytes + new_bytes > limits.max_adapter_bytes_total:
        raise QuotaExceeded(
            quota="max_adapter_bytes_total",
            limit=limits.max_adapter_bytes_total,
            remedy="delete an adapter first",
        )


def check_part(upload: Upload, part: UploadPart, total_bytes: int, part_bytes: int) -> UploadFile:
    """The file that the part belongs to. Raises InvalidUpload, TooLarge."""
    file = upload.files.get(part.filename)
    if file is None:
        raise InvalidUpload(
            code="unknown_file",
            message=f"The upload has no file {shown(part.filename)}; "
            f"send {' or '.join(upload.files)}.",
            param="file",
        )
    end = part.start + part.size_bytes
    if end > file.size_bytes:
        raise TooLarge(what=file.filename, size_bytes=end, limit_bytes=file.size_bytes)
    if total_bytes != file.size_bytes:
        raise InvalidUpload(
            code="size_mismatch",
            message=f"{file.filename} was declared with {file.size_bytes} bytes, "
            f"Content-Range says {total_bytes}; create an upload with the right size.",
            param=file.filename,
        )
    is_last = end == file.size_bytes
    if part.start < 0 or not (part.size_bytes == part_bytes or is_last and part.size_bytes > 0):
        raise InvalidUpload(
            code="invalid_part_size",
            message=f"A part has {part_bytes} bytes, the last one may have fewer; "
            f"this one has {part.size_bytes}.",
            param=file.filename,
        )
    if part.size_bytes > part_bytes:
        raise TooLarge(what="part", size_bytes=part.size_bytes, limit_bytes=part_bytes)
    return file
