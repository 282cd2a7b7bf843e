import math
import os
import resource
import subprocess
import sys
import time

import pytest

from registry.errors import ObjectNotFound, StorageError
from registry.storage.faults import REMEDIES
from registry.storage.s3 import S3Storage
from registry.storage.storage import CHUNK_BYTES, LocalStorage
from registry.storage.url import S3Location, open_storage
from tests.registry.factories import keys

PART_BYTES = 16 << 20


@pytest.fixture(params=["local", "s3"])
def storage(request, tmp_path):
    if request.param == "local":
        return open_storage(f"file://{tmp_path / 'store'}")
    bucket = request.getfixturevalue("bucket")
    return S3Storage(S3Location("bucket", f"tests{tmp_path}"), bucket._client)


@pytest.fixture
def make_file(tmp_path):
    def make(data):
        path = tmp_path / "source"
        path.write_bytes(data)
        return path

    return make


def read(storage, key, *interval):
    return b"".join(storage.read(key, *interval))


def unfinished(bucket, prefix):
    """Keys of the multipart uploads that are neither completed nor aborted."""
    found = bucket._client.list_multipart_uploads(Bucket="bucket", Prefix=prefix)
    return [upload["Key"] for upload in found.get("Uploads", [])]


@pytest.mark.parametrize("data", [b"hello", b""])
def test_what_was_put_is_read_and_listed_once_however_often_it_was_put(storage, make_file, data):
    for _ in range(2):
        storage.put("tenants/t/abc", make_file(data))
    assert read(storage, "tenants/t/abc") == data
    assert storage.size("tenants/t/abc") == len(data)
    assert keys(storage) == ["tenants/t/abc"]


def test_the_file_that_was_put_stays_the_callers(storage, make_file):
    source = make_file(b"hello")
    storage.put("k", source)
    source.write_bytes(b"other")
    assert read(storage, "k") == b"hello"


@pytest.mark.parametrize(
    ("interval", "expected"),
    [((0,), b"0123456789"), ((3,), b"3456789"), ((3, 7), b"3456"), ((0, 1), b"0")]
    + [((8, 99), b"89"), ((10,), b""), ((10, 12), b""), ((99, 100), b""), ((4, 4), b"")],
)
def test_a_range_is_read_and_cut_at_the_end(storage, make_file, interval, expected):
    storage.put("k", make_file(b"0123456789"))
    assert read(storage, "k", *interval) == expected


def test_chunks_are_bounded(storage, make_file):
    data = os.urandom(2 * CHUNK_BYTES + 7)
    storage.put("k", make_file(data))
    chunks = list(storage.read("k"))
    assert max(len(chunk) for chunk in chunks) <= CHUNK_BYTES
    assert b"".join(chunks) == data


def test_an_absent_object_is_not_found(storage):
    for ask in (
        lambda: storage.size("a/b"),
        lambda: list(storage.read("a/b")),
        lambda: list(storage.read("a/b", 3)),
        lambda: list(storage.read("a/b", 3, 5)),
    ):
        with pytest.raises(ObjectNotFound):
            ask()


def test_delete_is_idempotent(storage, make_file):
    storage.put("a/b/c", make_file(b"x"))
    for _ in range(2):
        storage.delete("a/b/c")
    assert keys(storage) == []


def test_list_finds_keys_by_prefix_in_order(storage, make_file):
    for key in ("u/2/b", "u/2/a", "u/1/a", "u/10/a", "v"):
        storage.put(key, make_file(b"x"))
    assert keys(storage, "u/2/") == ["u/2/a", "u/2/b"]
    assert keys(storage, "u/1") == ["u/1/a", "u/10/a"]
    assert keys(storage, "w/") == []
    assert keys(storage) == ["u/1/a", "u/10/a", "u/2/a", "u/2/b", "v"]


def test_a_listing_tells_sizes_and_when_each_was_put(storage, make_file):
    before = time.time()
    for num_bytes in (0, 7, 133):
        storage.put(f"k{num_bytes}", make_file(bytes(num_bytes)))
    found = list(storage.list(""))
    assert {o.key: o.size_bytes for o in found} == {"k0": 0, "k7": 7, "k133": 133}
    # S3 reports whole seconds.
    assert all(int(before) <= o.modified_at <= time.time() for o in found)


def test_a_file_of_several_parts_is_one_object(storage, make_file):
    data = os.urandom(PART_BYTES + 7)
    storage.put("k", make_file(data))
    assert storage.size("k") == PART_BYTES + 7
    assert read(storage, "k") == data
    around_a_border = (PART_BYTES - 3, PART_BYTES + 4)
    assert read(storage, "k", *around_a_border) == data[slice(*around_a_border)]
    storage.delete("k")
    assert keys(storage) == []


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "a/../../b", "..", ".", "a//b", "a/", "a\0b", "a b", ".incoming/x"]
)
def test_a_key_that_leaves_its_place_is_refused(storage, make_file, key):
    for ask in (
        lambda: storage.put(key, make_file(b"x")),
        lambda: storage.size(key),
        lambda: list(storage.read(key)),
        lambda: storage.delete(key),
    ):
        with pytest.raises(StorageError):
            ask()


def test_a_source_that_is_gone_stores_nothing(storage, tmp_path):
    with pytest.raises(StorageError):
        storage.put("a/b", tmp_path / "gone")
    assert keys(storage) == []


def test_a_put_that_fails_midway_on_disk_leaves_nothing(tmp_path, make_file):
    source, root = make_file(bytes(3 * CHUNK_BYTES)), tmp_path / "store"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK_BYTES + 7, limits[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            LocalStorage(root).put("k", source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_a_part_that_fails_takes_the_object_and_the_other_parts_with_it(bucket, s3, make_file):
    source = make_file(bytes(PART_BYTES + 7))
    s3.fail("unavailable", key="failing", method="PUT", times=1)
    with pytest.raises(StorageError, match="SlowDown"):
        bucket.put("failing", source)
    assert keys(bucket, "failing") == []
    assert unfinished(bucket, "failing") == []
    bucket.put("failing", source)
    assert bucket.size("failing") == PART_BYTES + 7


def test_a_part_that_fails_is_tried_again(bucket, s3, make_file):
    storage = open_storage(f"s3://bucket?endpoint_url={s3.url}", attempts=2)
    s3.fail("unavailable", key="tried-again", method="PUT", times=1)
    data = os.urandom(PART_BYTES + 7)
    storage.put("tried-again", make_file(data))
    assert read(storage, "tried-again") == data
    assert s3.count("tried-again", method="PUT") == 2 + 1


@pytest.fixture
def put_elsewhere():
    """A function that starts a process which puts a file into a store, and can be killed midway."""
    processes = []

    def start(url, key, path):
        put = "import sys; from registry.storage.url import open_storage as o; from pathlib import "
        put += "Path; o(sys.argv[1]).put(sys.argv[2], Path(sys.argv[3]))"
        processes.append(subprocess.Popen([sys.executable, "-c", put, url, key, str(path)]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_put_that_is_killed_midway_leaves_no_object_on_disk(tmp_path, put_elsewhere):
    source, root = tmp_path / "pipe", tmp_path / "store"
    os.mkfifo(source)
    process = put_elsewhere(f"file://{root}", "k", source)
    with source.open("wb", buffering=0) as pipe:  # blocks until the copy has begun
        pipe.write(b"half")
        process.kill()
        process.wait()
    assert keys(LocalStorage(root)) == []


def test_a_put_that_is_killed_midway_leaves_no_object_in_a_bucket(
    bucket, s3, make_file, put_elsewhere
):
    a_part_came = s3.fail("hang", key="killed", method="PUT")
    source = make_file(bytes(PART_BYTES + 7))
    process = put_elsewhere(f"s3://bucket?endpoint_url={s3.url}", "killed", source)
    assert a_part_came.wait(30)
    process.kill()
    process.wait()
    s3.clear()
    assert keys(bucket, "killed") == []
    assert unfinished(bucket, "killed") == ["killed"]
    bucket.abort_multiparts("killed", begun_before=time.time())
    assert unfinished(bucket, "killed") == []


def test_what_a_killed_process_left_behind_is_swept_a_day_later(tmp_path, make_file):
    incoming = tmp_path / "store" / ".incoming"
    incoming.mkdir(parents=True)
    old, young = incoming / "old", incoming / "young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    LocalStorage(tmp_path / "store")
    assert list(incoming.iterdir()) == [young], "another process may be writing it"


def test_a_listing_does_not_leave_the_root(tmp_path):
    (tmp_path / "secret").write_text("x")
    with pytest.raises(StorageError):
        list(LocalStorage(tmp_path / "store").list("../"))


def test_delete_takes_empty_folders_with_it_but_not_the_root(tmp_path, make_file):
    storage = LocalStorage(tmp_path / "store")
    storage.put("a/b/c", make_file(b"x"))
    storage.delete("a/b/c")
    assert [path.name for path in (tmp_path / "store").iterdir()] == [".incoming"]


def test_a_bucket_that_is_not_there_is_a_storage_error(bucket, make_file):
    storage = S3Storage(S3Location("no-such-bucket-here"), bucket._client)
    for ask in (
        lambda: storage.put("k", make_file(b"x")),
        lambda: keys(storage),
    ):
        with pytest.raises(StorageError):
            ask()


def test_a_store_that_says_nothing_is_given_up_after_the_read_timeout(bucket, s3, make_file):
    url = f"s3://bucket?endpoint_url={s3.url}"
    storage = open_storage(url, attempts=1, read_timeout_s=0.2)
    storage.put("k", make_file(b"hello"))
    s3.fail("hang")
    with pytest.raises(StorageError):
        read(storage, "k")
    s3.clear()
    assert read(storage, "k") == b"hello"


@pytest.mark.parametrize(
    ("endpoint", "environment", "reason"),
    [
        ("http://127.0.0.1:1", {}, "EndpointConnectionError"),
        ("https://127.0.0.1:{port}", {}, "SSLError"),
        ("http://127.0.0.1:{port}", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
        ("http://127.0.0.1:{port}", {"AWS_ACCESS_KEY_ID": "wrong"}, "InvalidAccessKeyId"),
    ],
)
def test_a_store_that_cannot_be_used_says_why_and_what_to_do(
    s3, make_file, monkeypatch, caplog, endpoint, environment, reason
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    endpoint = endpoint.format(port=s3.url.rpartition(":")[2])
    storage = open_storage(f"s3://bucket?endpoint_url={endpoint}", attempts=1)
    for _ in range(2):
        with pytest.raises(StorageError, match=reason):
            storage.put("k", make_file(b"hello"))
    assert storage.faults.reason == reason
    assert [line.message for line in caplog.records if line.name == "registry.storage.faults"] == [
        f"The object store failed: {reason}. {REMEDIES[reason]}"
    ]


def test_a_folder_that_cannot_be_used_says_why(tmp_path, make_file):
    storage = LocalStorage(tmp_path / "store")
    (tmp_path / "store").write_bytes(b"a file")
    with pytest.raises(StorageError):
        storage.put("k", make_file(b"hello"))
    assert "Not a directory" in storage.faults.reason


def test_an_object_that_is_not_there_is_no_fault_of_the_store(storage):
    with pytest.raises(ObjectNotFound):
        storage.size("k")
    assert storage.faults.age_s() == math.inf


@pytest.mark.parametrize(("attempts", "expected"), [(1, 1), (3, 3)])
def test_one_call_makes_as_many_attempts_as_it_was_given(bucket, s3, make_file, attempts, expected):
    storage = open_storage(f"s3://bucket/attempts?endpoint_url={s3.url}", attempts=attempts)
    storage.put("k", make_file(b"hello"))
    before = s3.count("attempts/k")
    s3.fail("unavailable", key="attempts/k")
    with pytest.raises(StorageError, match="SlowDown"):
        read(storage, "k")
    s3.clear()
    assert s3.count("attempts/k") - before == expected


@pytest.mark.parametrize("fault", ["truncate", "short", "ignore_range", "empty", "reset"])
def test_a_range_that_is_not_what_was_asked_for_is_noticed(bucket, s3, make_file, fault):
    bucket.put("k", make_file(bytes(1000)))
    s3.fail(fault, times=1)
    with pytest.raises(StorageError):
        read(bucket, "k", 100, 900)
    assert len(read(bucket, "k", 100, 900)) == 800


def test_a_listing_goes_over_pages(bucket, monkeypatch, make_file):
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "2")
    names = [f"pages/{number}" for number in range(5)]
    for name in names:
        bucket.put(name, make_file(b"x"))
    assert keys(bucket, "pages/") == names


@pytest.mark.parametrize(
    ("num_bytes", "query", "expected"),
    [
        (7, "", (None, None)),
        (7, "&sse=AES256", ("AES256", None)),
        (PART_BYTES + 7, "&sse=aws:kms&kms_key_id=a-key", ("aws:kms", "a-key")),
    ],
)
def test_the_store_encrypts_as_the_url_says(signed, make_file, num_bytes, query, expected):
    s3, _ = signed
    storage = open_storage(f"s3://bucket/encrypted?endpoint_url={s3.url}{query}", attempts=1)
    storage.put("k", make_file(bytes(num_bytes)))
    head = storage._client.head_object(Bucket="bucket", Key="encrypted/k")
    assert (head.get("ServerSideEncryption"), head.get("SSEKMSKeyId")) == expected
