"""Storage URLs: each means a folder or a bucket."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from registry.extras import require
from registry.storage.s3_location import S3Location, parse_s3_url
from registry.storage.storage import LocalStorage, Storage


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
        return parse_s3_url(url)
    is_folder = parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path
    if not is_folder or parts.query or parts.fragment:
        raise ValueError("Storage is file:///folder or s3://bucket/prefix.")
    return Path(unquote(parts.path))
