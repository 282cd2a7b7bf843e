"""Parts sent to presigned URLs, and requests that the store's signature checks refuse.

Requests go over HTTP to moto, through a proxy that computes each signature again.
"""

import os
import time
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import httpx
import pytest

from registry.errors import ObjectNotFound, StorageError
from registry.storage.url import open_storage
from tests.registry.factories import keys

PART_BYTES = 5 << 20
EXPIRES_S = 600


@pytest.fixture
def upload(bucket):
    """A multipart upload of the object `up/k` that has no parts yet."""
    multipart_id = bucket.begin_multipart("up/k")
    yield multipart_id
    bucket.abort_multipart("up/k", multipart_id)
    bucket.delete("up/k")


def presign(bucket, upload, number, num_bytes, key="up/k"):
    return bucket.presign_part(key, upload, number, num_bytes, EXPIRES_S)


def put(url, data, **headers):
    """PUT as curl would, without credentials or proxy; return the status and S3's error code."""
    # verify: loading certificates, which plain HTTP does not use, takes longer than the request.
    answer = httpx.put(url, content=data, headers=headers, trust_env=False, verify=False)
    return answer.status_code, answer.text.partition("<Code>")[2].partition("</Code>")[0]


def altered(url, **query):
    """The URL with other values in its query."""
    parts = urlsplit(url)
    values = {name: values[0] for name, values in parse_qs(parts.query).items()}
    assert values != values | query, "nothing altered"
    return urlunsplit(parts._replace(query=urlencode(values | query)))


def test_parts_put_by_plain_http_become_the_object_in_the_order_of_their_numbers(bucket, upload):
    parts = {1: os.urandom(PART_BYTES), 2: os.urandom(PART_BYTES), 3: b"the end"}
    for number in (3, 1, 2):
        url = presign(bucket, upload, number, len(parts[number]))
        assert put(url, parts[number]) == (200, "")
    assert bucket.list_parts("up/k", upload) == {1: PART_BYTES, 2: PART_BYTES, 3: 7}
    assert keys(bucket, "up/") == [], "the object appears on completion"
    bucket.complete_multipart("up/k", upload)
    assert b"".join(bucket.read("up/k")) == b"".join(parts.values())


def test_parts_are_listed_and_completed_over_pages(bucket, upload):
    def two_at_a_time(params, **_):
        params["MaxParts"] = 2

    events, name = bucket._client.meta.events, "provide-client-params.s3.ListParts"
    for number in range(1, 6):
        data = bytes([number]) * (PART_BYTES if number < 5 else 1)
        assert put(presign(bucket, upload, number, len(data)), data)[0] == 200
    events.register(name, two_at_a_time)
    try:
        assert list(bucket.list_parts("up/k", upload)) == [1, 2, 3, 4, 5]
        bucket.complete_multipart("up/k", upload)
    finally:
        events.unregister(name, two_at_a_time)
    assert bucket.size("up/k") == 4 * PART_BYTES + 1


def test_an_object_of_presigned_parts_is_encrypted_as_the_url_says(s3, bucket):
    store = open_storage(f"s3://bucket/encrypted?endpoint_url={s3.url}&sse=AES256", attempts=1)
    upload = store.begin_multipart("k")
    assert put(presign(store, upload, 1, 5, "k"), b"hello")[0] == 200
    store.complete_multipart("k", upload)
    head = bucket._client.head_object(Bucket="bucket", Key="encrypted/k")
    assert head["ServerSideEncryption"] == "AES256"


def test_a_part_that_comes_again_replaces_the_first(bucket, upload):
    url = presign(bucket, upload, 1, 5)
    assert put(url, b"first")[0] == 200
    assert put(url, b"again")[0] == 200
    bucket.complete_multipart("up/k", upload)
    assert b"".join(bucket.read("up/k")) == b"again"


def test_an_upload_that_has_ended_is_none(bucket, upload):
    url = presign(bucket, upload, 1, 5)
    put(url, b"hello")
    bucket.complete_multipart("up/k", upload)
    aborted = bucket.begin_multipart("up/k")
    for _ in range(2):
        bucket.abort_multipart("up/k", aborted)
    for ended in (upload, aborted, "never-was"):
        with pytest.raises(ObjectNotFound):
            bucket.list_parts("up/k", ended)
        with pytest.raises(ObjectNotFound):
            bucket.complete_multipart("up/k", ended)
    assert put(url, b"other")[0] in (404, 500), "S3 answers 404, moto 500"
    assert b"".join(bucket.read("up/k")) == b"hello", "the completed object is unchanged"


def test_a_completion_whose_answer_is_lost_leaves_the_object(bucket, s3, upload):
    put(presign(bucket, upload, 1, 5), b"hello")
    s3.fail("unavailable", key="up/k", method="POST", times=1)  # completes, but answers an error
    with pytest.raises(StorageError, match="SlowDown"):
        bucket.complete_multipart("up/k", upload)
    with pytest.raises(ObjectNotFound):
        bucket.complete_multipart("up/k", upload)
    assert b"".join(bucket.read("up/k")) == b"hello"


def test_uploads_that_were_begun_long_ago_are_dropped_below_a_prefix(bucket, upload):
    other = bucket.begin_multipart("elsewhere/k")
    assert bucket.abort_multiparts("up/", begun_before=time.time() - 60) == 0
    assert bucket.abort_multiparts("up/", begun_before=time.time()) == 1
    with pytest.raises(ObjectNotFound):
        bucket.list_parts("up/k", upload)
    assert bucket.list_parts("elsewhere/k", other) == {}
    bucket.abort_multipart("elsewhere/k", other)


@pytest.mark.parametrize("num_bytes", [0, 4, 6, 500])
def test_a_part_of_another_size_than_was_presigned_is_refused(bucket, upload, num_bytes):
    url = presign(bucket, upload, 1, 5)
    assert put(url, bytes(num_bytes)) == (403, "SignatureDoesNotMatch")
    assert bucket.list_parts("up/k", upload) == {}


def test_a_part_whose_size_is_not_said_is_refused(bucket, upload):
    answer = httpx.put(
        presign(bucket, upload, 1, 5), content=iter([b"hello"]), trust_env=False
    )  # chunked
    assert answer.status_code == 403
    assert bucket.list_parts("up/k", upload) == {}


def test_a_url_of_another_key_upload_or_part_is_refused(bucket, upload):
    url = presign(bucket, upload, 1, 5)
    other_upload = bucket.begin_multipart("up/k")
    for forged in (
        url.replace("up/k", "up/other"),
        url.replace("up/k", "up/../k"),
        url.replace("/bucket/", "/tekcub/"),
        altered(url, partNumber="2"),
        altered(url, uploadId=other_upload),
        f"{url}&x-id=PutObject",
    ):
        assert put(forged, b"hello") == (403, "SignatureDoesNotMatch"), forged
    assert bucket.list_parts("up/k", upload) == {}
    assert bucket.list_parts("up/k", other_upload) == {}
    bucket.abort_multipart("up/k", other_upload)


def test_a_url_is_over_when_its_time_is(bucket, upload, signatures):
    url = presign(bucket, upload, 1, 5)
    signatures.ahead_s = EXPIRES_S - 5
    assert put(url, b"hello")[0] == 200
    signatures.ahead_s = EXPIRES_S + 1
    assert put(url, b"hello") == (403, "AccessDenied")
    longer = altered(url, **{"X-Amz-Expires": "86400"})
    assert put(longer, b"hello") == (403, "SignatureDoesNotMatch")
