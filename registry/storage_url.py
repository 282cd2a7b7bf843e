"""Which store a URL means."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from registry.storage import LocalStorage, Storage


def open_storage(url: str, *, attempts: int = 4, read_timeout_s: float = 30.0) -> Storage:
    """The store behind `file:///folder` or `s3://bucket/prefix`. Raises ValueError.

    attempts: that one call makes; 1 for a caller that tries again by itself.
    read_timeout_s: how long a bucket may say nothing.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return LocalStorage(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        # Imported here: only a process that is given a bucket needs boto3.
        from registry.storage_s3 import S3Storage, make_client

        client = make_client(attempts, read_timeout_s)
        return S3Storage(parts.netloc, unquote(parts.path).strip("/"), client)
    raise ValueError(f"Storage is file:///folder or s3://bucket/prefix, not {url!r}.")
