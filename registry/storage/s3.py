"""Objects in an S3 bucket. Credentials come from the environment, other settings from the URL."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from registry.errors import ObjectNotFound, StorageError
from registry.storage.faults import StorageFaults
from registry.storage.storage import CHUNK_BYTES, StoredObject, check_key
from registry.storage.url import S3Location

_CONNECT_TIMEOUT_S = 3.0
_MAX_CONNECTIONS = 64
"""Size of the connection pool: the fetcher's read threads. The default of 10 would discard more."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_MISSING = {"404", "NoSuchKey", "NoSuchUpload", "NotFound"}
_PART_BYTES = 16 << 20
_TRANSFER = TransferConfig(
    multipart_threshold=_PART_BYTES + 1,
    multipart_chunksize=_PART_BYTES,
    max_concurrency=4,
    # On some machines boto3 would choose a different client, which has different retries.
    preferred_transfer_client="classic",
)


def make_client(location: S3Location, attempts: int, read_timeout_s: float) -> Any:
    """Make boto3's client for S3, which threads may share."""
    config = Config(
        # Some regions would presign with version 2, which does not sign the length of a part.
        signature_version="s3v4",
        s3={"addressing_style": location.addressing_style},
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        max_pool_connections=_MAX_CONNECTIONS,
        retries={"mode": "standard", "total_max_attempts": attempts},
        # Objects are verified by sha256; stores other than Amazon's refuse the newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session(region_name=location.region)
    return session.client("s3", endpoint_url=location.endpoint_url, config=config)


class S3Storage:
    """Objects under one prefix of one bucket. Implements PresignedStorage."""

    def __init__(self, location: S3Location, client: Any) -> None:
        self.faults = StorageFaults()
        self._bucket = location.bucket
        self._prefix = f"{location.prefix}/" if location.prefix else ""
        self._encryption = _encryption(location)
        self._client = client

    def put(self, key: str, path: Path) -> None:
        # A small file is one PUT; a large file is sent in parts, which are dropped if one fails.
        # boto3 gets the file's name, not an open file, and so streams every part from disk.
        with self._translated(key), create_transfer_manager(self._client, _TRANSFER) as transfers:
            transfers.upload(str(path), self._bucket, self._key(key), self._encryption).result()

    def read(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        if end is not None and end <= start:
            self.size(key)
            return
        request = self._named(key)
        if start or end is not None:
            request["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with self._translated(key):
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
        with self._translated(key):
            response = self._client.head_object(**self._named(key))
        return int(response["ContentLength"])

    def delete(self, key: str) -> None:
        with self._translated(key):
            self._client.delete_object(**self._named(key))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        for entry in self._listed("list_objects_v2", "Contents", prefix):
            key = entry["Key"].removeprefix(self._prefix)
            yield StoredObject(key, entry["Size"], entry["LastModified"].timestamp())

    def begin_multipart(self, key: str) -> str:
        with self._translated(key):
            response = self._client.create_multipart_upload(**self._named(key), **self._encryption)
        return str(response["UploadId"])

    def presign_part(
        self, key: str, multipart_id: str, number: int, size_bytes: int, expires_s: int
    ) -> str:
        part = {"UploadId": multipart_id, "PartNumber": number, "ContentLength": size_bytes}
        with self._translated(key):
            return str(
                self._client.generate_presigned_url(
                    "upload_part", Params=self._named(key) | part, ExpiresIn=expires_s
                )
            )

    def list_parts(self, key: str, multipart_id: str) -> dict[int, int]:
        return {part["PartNumber"]: part["Size"] for part in self._parts(key, multipart_id)}

    def complete_multipart(self, key: str, multipart_id: str) -> None:
        parts = [
            {"PartNumber": part["PartNumber"], "ETag": part["ETag"]}
            for part in self._parts(key, multipart_id)
        ]
        with self._translated(key):
            self._client.complete_multipart_upload(
                **self._named(key), UploadId=multipart_id, MultipartUpload={"Parts": parts}
            )

    def abort_multipart(self, key: str, multipart_id: str) -> None:
        with suppress(ObjectNotFound), self._translated(key):
            self._client.abort_multipart_upload(**self._named(key), UploadId=multipart_id)

    def abort_multiparts(self, prefix: str, begun_before: float) -> int:
        num_aborted = 0
        for upload in self._listed("list_multipart_uploads", "Uploads", prefix):
            if upload["Initiated"].timestamp() < begun_before:
                self.abort_multipart(upload["Key"].removeprefix(self._prefix), upload["UploadId"])
                num_aborted += 1
        return num_aborted

    def _parts(self, key: str, multipart_id: str) -> Iterator[dict[str, Any]]:
        return self._entries("list_parts", "Parts", key, Key=self._key(key), UploadId=multipart_id)

    def _listed(self, operation: str, what: str, prefix: str) -> Iterator[dict[str, Any]]:
        return self._entries(operation, what, prefix, Prefix=self._prefix + prefix)

    def _entries(
        self, operation: str, what: str, key: str, **arguments: str
    ) -> Iterator[dict[str, Any]]:
        """The entries under the name `what` in the answers to a listing, page after page."""
        pages = self._client.get_paginator(operation).paginate(Bucket=self._bucket, **arguments)
        with self._translated(key):
            for page in pages:
                yield from page.get(what, ())

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Translate boto3's errors to StorageError and ObjectNotFound."""
        try:
            yield
        except ClientError as error:
            if _code(error) in _MISSING:
                raise ObjectNotFound(key=key) from None
            raise self.faults.error(key, _code(error)) from error
        except (BotoCoreError, HTTPClientError, OSError) as error:
            raise self.faults.error(key, type(error).__name__) from error

    def _named(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._key(key)}

    def _key(self, key: str) -> str:
        check_key(key)
        return self._prefix + key


def _encryption(location: S3Location) -> dict[str, str]:
    """Encryption arguments of a request that makes an object."""
    asked = {"ServerSideEncryption": location.sse, "SSEKMSKeyId": location.kms_key_id}
    return {name: value for name, value in asked.items() if value is not None}


def _check_range(response: dict[str, Any], key: str, start: int, end: int | None) -> None:
    """Raise StorageError unless the answer is the requested range, cut at the object's end."""
    given = response.get("ContentRange", "all of it")
    match = _CONTENT_RANGE.fullmatch(given)
    if match:
        first, last, size = (int(number) for number in match.groups())
        if first == start and last + 1 == min(size, size if end is None else end):
            return
    asked = f"{start}-{'' if end is None else end - 1}"
    raise StorageError(key=key, reason=f"bytes {asked} were asked for, {given} came")


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))
