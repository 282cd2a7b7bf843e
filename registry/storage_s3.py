"""Objects in an S3 bucket. Endpoint, region and credentials come from the environment."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from registry.errors import ObjectNotFound, StorageError
from registry.storage import CHUNK_BYTES, StoredObject, check_key

_CONNECT_TIMEOUT_S = 3.0
_MAX_CONNECTIONS = 64
"""As many threads as the fetcher reads with; more than the default of 10 would be thrown away."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_MISSING = {"404", "NoSuchKey", "NotFound"}


def make_client(attempts: int, read_timeout_s: float) -> Any:
    """boto3's client for S3; it may be shared by threads."""
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        max_pool_connections=_MAX_CONNECTIONS,
        retries={"mode": "standard", "total_max_attempts": attempts},
        # We compare a sha256 of our own; stores that are not Amazon's refuse the newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.session.Session().client("s3", config=config)


class S3Storage:
    """One bucket, under one prefix."""

    def __init__(self, bucket: str, prefix: str, client: Any) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = client

    def put(self, key: str, path: Path) -> None:
        # One PUT: it appears whole or not at all, up to S3's 5 GiB.
        with _translated(key), path.open("rb") as body:
            self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=body)

    def read(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        if end is not None and end <= start:
            self.size(key)
            return
        request = {"Bucket": self._bucket, "Key": self._key(key)}
        if start or end is not None:
            request["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with _translated(key):
            try:
                response = self._client.get_object(**request)
            except ClientError as error:
                if _code(error) == "InvalidRange":
                    return
                raise
            with closing(response["Body"]) as body:
                if "Range" in request:
                    _check_range(response, key, start, end)
                yield from body.iter_chunks(CHUNK_BYTES)

    def size(self, key: str) -> int:
        with _translated(key):
            response = self._client.head_object(Bucket=self._bucket, Key=self._key(key))
        return int(response["ContentLength"])

    def delete(self, key: str) -> None:
        with _translated(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        with _translated(prefix):
            for page in pages:
                for entry in page.get("Contents", ()):
                    key = entry["Key"].removeprefix(self._prefix)
                    yield StoredObject(key, entry["Size"], entry["LastModified"].timestamp())

    def _key(self, key: str) -> str:
        check_key(key)
        return self._prefix + key


def _check_range(response: dict[str, Any], key: str, start: int, end: int | None) -> None:
    """Raises StorageError unless the answer is the range that was asked for, cut at the end."""
    given = response.get("ContentRange", "all of it")
    match = _CONTENT_RANGE.fullmatch(given)
    if match:
        first, last, size = (int(number) for number in match.groups())
        if first == start and last + 1 == min(size, size if end is None else end):
            return
    asked = f"{start}-{'' if end is None else end - 1}"
    raise StorageError(key=key, reason=f"bytes {asked} were asked for, {given} came")


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """boto3's errors as ours."""
    try:
        yield
    except ClientError as error:
        if _code(error) in _MISSING:
            raise ObjectNotFound(key=key) from None
        raise StorageError(key=key, reason=_code(error)) from error
    except (BotoCoreError, HTTPClientError, OSError) as error:
        raise StorageError(key=key, reason=type(error).__name__) from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))
