"""Objects in an S3 bucket. Endpoint, region and credentials come from the environment."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from registry.errors import ObjectNotFound, StorageError
from registry.storage import CHUNK_BYTES, check_key

_CONFIG = Config(
    connect_timeout=5,
    read_timeout=30,
    retries={"mode": "standard", "total_max_attempts": 4},
    # We compare a sha256 of our own; stores that are not Amazon's refuse the newer checksums.
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
)
_MISSING = {"404", "NoSuchKey", "NotFound"}


class S3Storage:
    """One bucket, under one prefix. boto3 clients may be shared by threads."""

    def __init__(self, bucket: str, prefix: str = "", client: Any = None) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = client or boto3.session.Session().client("s3", config=_CONFIG)

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
                yield from body.iter_chunks(CHUNK_BYTES)

    def size(self, key: str) -> int:
        with _translated(key):
            response = self._client.head_object(Bucket=self._bucket, Key=self._key(key))
        return int(response["ContentLength"])

    def delete(self, key: str) -> None:
        with _translated(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def list(self, prefix: str) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        with _translated(prefix):
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield entry["Key"].removeprefix(self._prefix)

    def _key(self, key: str) -> str:
        check_key(key)
        return self._prefix + key


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
