"""Downloads over a real S3 protocol that fails, and over stores that a test controls."""

import hashlib
import os
import threading
from contextlib import suppress

import pytest

from lora import download as module
from lora.download import MAX_ATTEMPTS, PARTS_AT_ONCE, Downloader
from lora.errors import AdapterError
from registry.errors import ObjectNotFound, StorageError
from registry.storage.url import open_storage
from tests.faulty_s3 import CREDENTIALS, faulty_s3
from tests.lora.factories import DEADLINE_S, wait_for

PART_BYTES = 2 << 20
"""Size of a part in these tests: two of the chunks in which a store is read."""
LARGE = os.urandom(2 * PART_BYTES + 70_007)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", PART_BYTES)


@pytest.fixture(scope="module")
def s3():
    with faulty_s3() as s3, pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        environment.setenv("AWS_ENDPOINT_URL", s3.url)
        yield s3


@pytest.fixture(scope="module")
def bucket(s3):
    return open_storage("s3://bucket", attempts=1)


@pytest.fixture(autouse=True)
def well_again(s3):
    yield
    s3.clear()


@pytest.fixture
def put(bucket, tmp_path, request):
    """Stores bytes under a key of the test's own, and returns the key."""

    def put(data):
        (tmp_path / "upload").write_bytes(data)
        key = f"objects/{request.node.name.partition('[')[0]}"
        bucket.put(key, tmp_path / "upload")
        return key

    return put


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "target"
    path.touch()
    return path


class MemoryStorage:
    """A store of one object.

    before_chunk: called before each chunk of `chunk_bytes` bytes; it may raise or wait.
    """

    def __init__(self, data, before_chunk=lambda: None, chunk_bytes=1000):
        self.data = data
        self.before_chunk = before_chunk
        self.chunk_bytes = chunk_bytes

    def read(self, key, start=0, end=None):
        end = len(self.data) if end is None else min(end, len(self.data))
        for at in range(start, end, self.chunk_bytes):
            self.before_chunk()
            yield self.data[at : min(end, at + self.chunk_bytes)]


class Clock:
    """A clock on which time passes by sleeping only."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def download(downloader, data, target, key="k", timeout_s=DEADLINE_S, is_dropped=lambda: False):
    digest = hashlib.sha256(data).hexdigest()
    downloader.download(key, digest, len(data), target, timeout_s=timeout_s, is_dropped=is_dropped)


def failure_of(*arguments, **options):
    with pytest.raises(AdapterError) as failed:
        download(*arguments, **options)
    return failed.value.failure


def starts(s3, key):
    """Offsets at which the GETs of an object began, ascending."""
    intervals = [
        r.interval or "bytes=0-" for r in s3.requests if r.key == key and r.method == "GET"
    ]
    return sorted(int(interval.removeprefix("bytes=").partition("-")[0]) for interval in intervals)


# ---- parts ----


def test_a_small_object_is_one_request_without_a_range(s3, bucket, put, target):
    data = os.urandom(70_007)
    key = put(data)
    download(Downloader(bucket), data, target, key)
    assert target.read_bytes() == data
    (request,) = [r for r in s3.requests if r.key == key and r.method == "GET"]
    assert request.interval is None


def test_a_large_object_comes_in_parts(s3, bucket, put, target):
    key = put(LARGE)
    download(Downloader(bucket), LARGE, target, key)
    assert target.read_bytes() == LARGE
    assert starts(s3, key) == [0, PART_BYTES, 2 * PART_BYTES]
    assert s3.bytes_asked(key) == len(LARGE)


def test_parts_are_read_at_once_but_not_more_than_four(target):
    data = os.urandom(6 * PART_BYTES)
    counting, reading, most = threading.Lock(), set(), 0
    all_there = threading.Event()

    def before_chunk():
        nonlocal most
        with counting:
            reading.add(threading.get_ident())
            most = max(most, len(reading))
            if most == PARTS_AT_ONCE:
                all_there.set()
        assert all_there.wait(DEADLINE_S), "four parts are never read at once"

    download(Downloader(MemoryStorage(data, before_chunk, 1 << 20)), data, target)
    assert target.read_bytes() == data
    assert most == PARTS_AT_ONCE


# ---- tried again ----


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        *((fault, 2) for fault in ("hang", "stall", "unavailable", "reset", "truncate")),
        *((fault, 1) for fault in ("short", "empty", "ignore_range")),
    ],
)
def test_a_part_that_does_not_come_whole_is_asked_for_again(s3, put, target, fault, times):
    impatient = open_storage("s3://bucket", attempts=1, read_timeout_s=1.0)
    key = put(LARGE)
    s3.fail(fault, times=times, key=key)
    download(Downloader(impatient), LARGE, target, key)
    assert target.read_bytes() == LARGE


def test_a_part_goes_on_from_where_it_broke(s3, bucket, put, target):
    key = put(LARGE)
    before = s3.bytes_asked(key)
    s3.fail("truncate", times=1, key=key)
    download(Downloader(bucket), LARGE, target, key)
    assert target.read_bytes() == LARGE
    resumed = [start for start in starts(s3, key) if start % PART_BYTES]
    assert resumed, "from the middle of a part"
    assert s3.bytes_asked(key) - before < len(LARGE) + PART_BYTES


def test_waiting_grows_is_random_and_has_a_limit(target):
    def down():
        raise StorageError(key="k", reason="SlowDown")

    clock = Clock()
    downloader = Downloader(MemoryStorage(b"x", down), clock=clock, sleep=clock.sleep)
    failure = failure_of(downloader, b"x", target)
    assert failure.kind == "unavailable"
    assert "SlowDown" in failure.error
    assert len(clock.slept) == MAX_ATTEMPTS - 1
    longest = [0.1, 0.2, 0.4, 0.8, 1.6]
    assert all(0 <= s <= most for s, most in zip(clock.slept, longest, strict=True))
    assert len(set(clock.slept)) == len(clock.slept)


def test_what_a_proxy_damaged_is_fetched_again_once(s3, bucket, put, target):
    key = put(LARGE)
    s3.fail("wrong_bytes", times=1, key=key)
    download(Downloader(bucket), LARGE, target, key)
    assert target.read_bytes() == LARGE
    s3.fail("wrong_bytes", key=key)
    before = s3.count(key)
    assert failure_of(Downloader(bucket), LARGE, target, key).kind == "corrupt"
    assert s3.count(key) - before == 2 * 3


@pytest.mark.parametrize("stored", [LARGE[:-1], LARGE + b"x", LARGE[: PART_BYTES - 1], b""])
def test_an_object_of_another_length_is_corrupt(stored, target):
    downloader = Downloader(MemoryStorage(stored, chunk_bytes=1 << 20))
    assert failure_of(downloader, LARGE, target).kind == "corrupt"


# ---- not tried again ----


def test_a_missing_object_is_asked_for_once(target):
    asked = []

    def missing():
        asked.append(1)
        raise ObjectNotFound(key="k")

    assert failure_of(Downloader(MemoryStorage(b"x", missing)), b"x", target).kind == "missing"
    assert asked == [1]


def test_a_store_that_drips_does_not_hold_a_download_beyond_its_deadline(target):
    going_on = threading.Event()
    storage = MemoryStorage(b"x", lambda: going_on.wait(DEADLINE_S))
    failure = failure_of(Downloader(storage), b"x", target, timeout_s=0.1)
    assert (failure.kind, failure.error) == ("unavailable", "the store was too slow")
    going_on.set()


def test_a_dropped_download_ends_and_its_reads_write_nothing_any_more(target):
    reading, going_on, dropped = threading.Event(), threading.Event(), threading.Event()
    ended = threading.Event()

    def before_chunk():
        reading.set()
        going_on.wait(DEADLINE_S)

    class Storage(MemoryStorage):
        def read(self, *arguments):
            try:
                yield from super().read(*arguments)
            finally:
                ended.set()

    data = bytes(range(1, 256)) * 100
    downloader, failures = Downloader(Storage(data, before_chunk)), []

    def work():
        failures.append(failure_of(downloader, data, target, is_dropped=dropped.is_set))

    thread = threading.Thread(target=work)
    thread.start()
    assert reading.wait(DEADLINE_S)
    dropped.set()
    thread.join(DEADLINE_S)
    assert [failure.kind for failure in failures] == ["dropped"]
    going_on.set()
    wait_for(ended.is_set)
    assert target.read_bytes() == b""


def test_an_error_of_the_local_disk_is_not_the_stores(tmp_path):
    with pytest.raises(FileNotFoundError):
        download(Downloader(MemoryStorage(b"x")), b"x", tmp_path / "nowhere" / "target")


def test_two_downloads_do_not_wait_for_each_other(target, tmp_path):
    going_on = threading.Event()
    downloader = Downloader(MemoryStorage(b"x", lambda: going_on.wait(DEADLINE_S)))

    def hang():
        with suppress(AdapterError):
            download(downloader, b"x", target)

    threads = [threading.Thread(target=hang) for _ in range(8)]
    for thread in threads:
        thread.start()
    other = tmp_path / "other"
    other.touch()
    downloader.storage = MemoryStorage(b"y")
    download(downloader, b"y", other)
    assert other.read_bytes() == b"y"
    going_on.set()
    for thread in threads:
        thread.join(DEADLINE_S)
