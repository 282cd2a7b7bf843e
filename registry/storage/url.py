"""Storage URLs: each means a folder, or a bucket and the way to access it.

    file:///folder
    s3://bucket/prefix?endpoint_url=https://minio:9000&region=eu-west-1&sse=aws:kms

The URL appears in command lines, settings and logs. It must therefore contain no credentials: they
come from the environment, and no error message repeats a value.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from registry.errors import shown
from registry.extras import require
from registry.storage.storage import LocalStorage, Storage

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REGION = re.compile(r"[a-z0-9-]+")
_KEYS = ("endpoint_url", "region", "addressing_style", "sse", "kms_key_id")
_ADDRESSING_STYLES = ("path", "virtual", "auto")
_ENCRYPTIONS = ("AES256", "aws:kms")
_FROM_ENVIRONMENT = (
    "credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
)


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket and the way to access it.

    endpoint_url, region: None for those that boto3 finds in the environment, or else Amazon's.
    addressing_style: "virtual" puts the bucket into the host name, "path" into the path; "auto" is
    "path" for a custom endpoint, else "virtual".
    sse: encryption of stored objects; None for the bucket's default.
    kms_key_id: the key for "aws:kms"; None for the account's.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: str = "auto"
    sse: str | None = None
    kms_key_id: str | None = None


def open_storage(url: str, *, attempts: int = 4, read_timeout_s: float = 30.0) -> Storage:
    """Open the store of `file:///folder` or `s3://bucket/prefix?...`.

    attempts: tries of one call to a bucket; 1 for a caller that retries by itself.
    read_timeout_s: longest silence of a bucket during a read. Raises ValueError, ExtraMissing.
    """
    place = parse_storage_url(url)
    if isinstance(place, Path):
        return LocalStorage(place)
    require("Storage in a bucket", "boto3")
    # boto3 is imported here, since only a process with a bucket needs it.
    from registry.storage.s3 import S3Storage, make_client

    return S3Storage(place, make_client(place, attempts, read_timeout_s))


def parse_storage_url(url: str) -> Path | S3Location:
    """Parse a storage URL to a folder or a bucket, without opening it. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "s3":
        return _parse_s3_url(url)
    is_folder = parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path
    if not is_folder or parts.query or parts.fragment:
        raise ValueError("Storage is file:///folder or s3://bucket/prefix.")
    return Path(unquote(parts.path))


def _parse_s3_url(url: str) -> S3Location:
    """Parse an s3:// URL. Raises ValueError if it has unknown parts or contradicts itself."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError(f"A storage URL names a bucket and no user; {_FROM_ENVIRONMENT}.")
    if not _BUCKET.fullmatch(parts.netloc) or parts.fragment:
        raise ValueError("Storage is s3://bucket/prefix, then ?key=value&... where needed.")
    settings = _parse_query(parts.query)
    _check_endpoint(settings.get("endpoint_url"))
    if not _REGION.fullmatch(settings.get("region", "us-east-1")):
        raise ValueError("region in a storage URL is a name like eu-west-1.")
    _check_one_of("addressing_style", settings.get("addressing_style"), _ADDRESSING_STYLES)
    _check_one_of("sse", settings.get("sse"), _ENCRYPTIONS)
    if "kms_key_id" in settings and settings.get("sse") != "aws:kms":
        raise ValueError("kms_key_id in a storage URL needs sse=aws:kms beside it.")
    return S3Location(parts.netloc, unquote(parts.path).strip("/"), **settings)


def _parse_query(query: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True, max_num_fields=100):
        if key not in _KEYS:
            raise ValueError(
                f"A storage URL has no key {shown(key)}; "
                f"it may have {', '.join(_KEYS)}, and {_FROM_ENVIRONMENT}."
            )
        if key in settings or not value:
            raise ValueError(f"{key} in a storage URL has one value; give it once, or not at all.")
        settings[key] = value
    return settings


def _check_endpoint(endpoint_url: str | None) -> None:
    if endpoint_url is None:
        return
    parts = urlsplit(endpoint_url)
    if "@" in parts.netloc:
        raise ValueError(f"endpoint_url in a storage URL has no user; {_FROM_ENVIRONMENT}.")
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ValueError("endpoint_url in a storage URL is http://host:port or https://host:port.")


def _check_one_of(key: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise ValueError(f"{key} in a storage URL is one of {', '.join(allowed)}.")
