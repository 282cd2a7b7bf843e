"""The fetcher as the engine sees it: a real process, a socket, an S3 store that fails on demand."""

import contextlib
import errno
import json
import os
import queue
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from lora.disk_cache import DiskCache, packed_path
from lora.download import Downloader
from lora.errors import DROPPED, Failure
from lora.fetch import Fetcher, Order
from lora.fetch_client import FetchClient
from lora.host import read_packed
from lora.layout import Layout
from lora.packed import PackedForm
from registry.storage.storage import LocalStorage
from tests.faulty_s3 import CREDENTIALS, faulty_s3
from tests.lora.factories import (
    DEADLINE_S,
    FORM,
    FetcherProcess,
    make_object,
    make_ref,
    put_object,
    wait_for,
)


@pytest.fixture(scope="module")
def s3():
    with faulty_s3() as s3:
        yield s3


@pytest.fixture(autouse=True)
def well_again(s3):
    yield
    s3.clear()


@pytest.fixture(scope="module")
def fetcher(s3, tmp_path_factory):
    """One process for all tests that do not kill it, because boto3 takes half a second to start."""
    process = start_fetcher(s3, tmp_path_factory.mktemp("fetcher"))
    yield process
    process.kill()


@pytest.fixture
def mortal(s3, tmp_path):
    """A fetcher of the test's own, which may be killed."""
    process = start_fetcher(s3, tmp_path)
    yield process
    process.kill()


class Engine:
    """An engine's client of a fetcher, and the answers that it gets."""

    def __init__(self, fetcher, form=FORM, timeout_s=10 * DEADLINE_S):
        self._answers = queue.SimpleQueue()
        self.client = FetchClient(fetcher.path, form, self._answers.put, timeout_s, 9)

    def answer(self):
        return self._answers.get(timeout=DEADLINE_S)

    def fetch(self, ref):
        self.client.fetch(ref)
        answer = self.answer()
        assert answer.key == ref.object_key
        return answer


@pytest.fixture
def engine(fetcher):
    return Engine(fetcher)


def start_fetcher(s3, folder):
    return FetcherProcess(folder, f"s3://bucket?endpoint_url={s3.url}", environment=CREDENTIALS)


_seeds = iter(range(1, 1_000_000))


def put_new(s3, key=None):
    """Put an adapter that was never fetched into the store."""
    seed = next(_seeds)
    return put_object(s3, key or f"k{seed}", make_object(seed))


def bytes_in(fetcher):
    return sum((fetcher.cache / name).stat().st_size for name in fetcher.files())


def order_line(**changes):
    form = json.dumps(asdict(FORM))
    order = {"form": form, "object_key": "k", "digest": "0" * 64, "size_bytes": 1, "until": 0.0}
    return json.dumps(order | changes).encode() + b"\n"


def read(fetcher, ref, form=FORM):
    path = packed_path(fetcher.cache, ref.digest, form.form_id)
    return read_packed(path, ref.digest, form)


# ---- results of a fetch ----


def test_an_object_is_brought_to_disk_packed(s3, fetcher, engine):
    ref = put_new(s3)
    answer = engine.fetch(ref)
    assert (answer.failure, answer.was_there) == (None, False)
    assert answer.size_bytes == ref.size_bytes
    assert answer.seconds > 0
    assert read(fetcher, ref).digest == ref.digest
    assert answer.used_bytes == bytes_in(fetcher)
    assert all(name.endswith(".packed") for name in fetcher.files()), "no draft is left"


def test_what_is_there_is_not_asked_for_again(s3, fetcher, engine):
    ref = put_new(s3)
    first = engine.fetch(ref)
    before = s3.count()
    answer = engine.fetch(ref)
    assert (answer.failure, answer.was_there, answer.size_bytes) == (None, True, 0)
    slabs_bytes = read(fetcher, ref).size_bytes  # which wait before a device
    assert first.host_bytes == answer.host_bytes == slabs_bytes
    assert s3.count() == before


def test_each_arena_gets_a_form_of_its_own(s3, fetcher):
    ref = put_new(s3)
    halves = PackedForm(Layout.of(FORM.layout.shape, 2), "float16", "base-1")
    for form in (FORM, halves):
        assert Engine(fetcher, form).fetch(ref).was_there is False
        assert read(fetcher, ref, form).digest == ref.digest


def test_equal_files_of_two_tenants_are_fetched_each_for_itself(s3, engine):
    """One tenant's object is missing in the store, which does not affect the other's."""
    ref = put_new(s3, "tenants/one/same")
    gone = replace(ref, object_key="tenants/two/same")
    s3.fail("hang", key=ref.object_key)
    engine.client.fetch(ref)
    assert engine.fetch(gone).failure.kind == "missing"
    s3.clear()
    answer = engine.answer()
    assert (answer.key, answer.failure) == (ref.object_key, None)


# ---- a store that fails ----


def test_a_store_that_never_answers_is_given_up_in_time(s3, fetcher, engine):
    ref = put_new(s3)
    s3.fail("hang", key=ref.object_key)
    answer = Engine(fetcher, timeout_s=0.3).fetch(ref)
    assert answer.failure == Failure("unavailable", "the store was too slow")
    s3.clear()
    assert engine.fetch(ref).failure is None


def test_an_object_larger_than_the_cache_is_too_large_without_a_byte(s3, engine):
    ref = make_ref(make_object(next(_seeds)), "huge")
    assert engine.fetch(replace(ref, size_bytes=1 << 40)).failure.kind == "too_large"
    assert s3.count("huge") == 0


# ---- dropped fetches and waiting fetches ----


def test_a_dropped_fetch_ends_though_the_store_hangs(s3, fetcher, engine):
    ref = put_new(s3)
    s3.fail("stall", key=ref.object_key)
    engine.client.fetch(ref)
    wait_for(lambda: s3.count(ref.object_key))
    engine.client.drop(ref.object_key)
    answer = engine.answer()
    assert (answer.key, answer.failure) == (ref.object_key, DROPPED)
    wait_for(lambda: not [name for name in fetcher.files() if "draft" in name])


def test_what_is_dropped_in_line_is_not_fetched_when_its_turn_comes(s3, engine):
    s3.fail("hang")
    dropped, last = put_new(s3), put_new(s3)
    hanging = [replace(dropped, object_key=f"hang{number}") for number in range(8)]
    for ref in hanging:
        engine.client.fetch(ref)
    wait_for(lambda: s3.count("hang") == 8)
    engine.client.fetch(dropped)
    engine.client.drop(dropped.object_key)
    assert engine.answer().failure == DROPPED, "it need not come to its turn"
    engine.client.fetch(last)
    s3.clear()
    for ref in hanging:
        engine.client.drop(ref.object_key)
    answers = [engine.answer() for _ in range(9)]
    assert last.object_key in {answer.key for answer in answers if answer.failure is None}
    assert s3.count(dropped.object_key) == 0


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b"[]\n",
        order_line(form="{}"),
        order_line(form={}),
        order_line(digest="../x"),
        order_line(size_bytes=0),
        b'"' + b"x" * (65 << 10) + b'"\n',
    ],
)
def test_a_line_that_cannot_be_understood_ends_its_connection_only(s3, fetcher, engine, line):
    with socket.socket(socket.AF_UNIX) as bad:
        bad.settimeout(DEADLINE_S)
        bad.connect(str(fetcher.path))
        bad.sendall(line)
        with contextlib.suppress(ConnectionResetError):
            assert bad.recv(1) == b""
    assert engine.fetch(put_new(s3)).failure is None


# ---- the process and its disk ----


def test_a_fetcher_killed_while_it_writes_leaves_a_cache_that_works_and_is_asked_again(s3, mortal):
    whole, half, engine = put_new(s3), put_new(s3), Engine(mortal)
    engine.fetch(whole)
    s3.fail("stall", key=half.object_key)
    engine.client.fetch(half)
    wait_for(lambda: [name for name in mortal.files() if "draft" in name])
    mortal.kill()
    s3.clear()
    mortal.start()
    answer = engine.answer()
    assert (answer.key, answer.failure) == (half.object_key, None)
    assert engine.fetch(whole).was_there is True
    assert [name for name in mortal.files() if "draft" in name] == []
    assert answer.used_bytes == bytes_in(mortal)
    assert read(mortal, half).digest == half.digest


def test_a_fetcher_of_a_folder_loads_neither_boto3_nor_torch():
    check = "import sys, lora.fetch; sys.exit(bool({'boto3', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], timeout=DEADLINE_S).returncode == 0


@pytest.fixture
def local(tmp_path):
    """(cache of a fetcher in this process, function that fetches a new adapter from a folder)"""
    storage = LocalStorage(tmp_path / "objects")
    cache = DiskCache(tmp_path / "cache", 10_000_000)
    fetcher = Fetcher(Downloader(storage), cache)

    def fetch_new(timeout_s=DEADLINE_S):
        data = make_object(next(_seeds))
        (tmp_path / "upload").write_bytes(data)
        ref = make_ref(data)
        storage.put(ref.digest, tmp_path / "upload")
        until = time.monotonic() + timeout_s
        order = Order(FORM, ref.digest, ref.digest, ref.size_bytes, until, lambda: False)
        return fetcher.fetch(order)

    yield cache, fetch_new
    cache.close()


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_costs_the_least_recently_used_half_and_one_more_try(
    local, monkeypatch, reason
):
    cache, fetch_new = local
    for _ in range(4):
        assert fetch_new().failure is None
    packed_bytes, num_failures = cache.used_bytes // 4, 1
    allocate = os.posix_fallocate

    def full(*args):
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise OSError(reason, os.strerror(reason))
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert fetch_new().failure is None
    assert cache.used_bytes == 3 * packed_bytes, "two of four, and the new one"
    num_failures = 2
    failure = fetch_new().failure
    assert (failure.kind, failure.error) == ("unavailable", "the disk is full")
    assert not list(cache.root.glob("*.draft"))


def test_an_adapter_that_is_evicted_while_it_is_looked_for_is_fetched(local, monkeypatch):
    cache, fetch_new = local
    monkeypatch.setattr(cache, "touch", lambda path: True)  # its file is gone by then
    fetched = fetch_new()
    assert (fetched.failure, fetched.was_there) == (None, False)
    assert fetched.host_bytes > 0


def test_a_fetch_that_waited_too_long_in_line_is_not_begun(local):
    _, fetch_new = local
    assert fetch_new(timeout_s=-1).failure.kind == "unavailable"


def test_a_fetcher_without_boto3_says_what_brings_it_and_is_not_started_again():
    code = "import sys; sys.modules['boto3'] = None; from lora.fetch import main; main()"
    given = {"socket": "s", "storage": "s3://bucket", "cache": "c", "quota-bytes": 1,
             "max-fetches": 1}  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in given.items()]
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert ran.returncode == os.EX_CONFIG
    assert "pip install -e '.[s3]'" in ran.stderr
