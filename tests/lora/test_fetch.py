"""The fetcher as the engine sees it: a real process, a socket, an S3 store that fails on demand."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from lora.disk_cache import DiskCache, packed_path
from lora.download import Downloader
from lora.fetch import Fetcher, Order
from lora.host import read_packed
from lora.layout import Layout
from lora.packed import PackedForm
from registry.storage.storage import LocalStorage
from tests.faulty_s3 import CREDENTIALS, faulty_s3
from tests.lora.factories import (
    DEADLINE_S,
    FORM,
    FetcherProcess,
    connected,
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


@pytest.fixture
def wire(fetcher):
    with connected(fetcher.path) as wire:
        yield wire


def start_fetcher(s3, folder):
    return FetcherProcess(folder, f"s3://bucket?endpoint_url={s3.url}", environment=CREDENTIALS)


_seeds = iter(range(1, 1_000_000))


def put_new(s3, key=None):
    """Put an adapter that was never fetched into the store."""
    seed = next(_seeds)
    return put_object(s3, key or f"k{seed}", make_object(seed))


def fetch(wire, ref, timeout_s=DEADLINE_S):
    number = wire.fetch(ref, timeout_s)
    answer = wire.answer()
    assert (answer["order"], answer["key"]) == (number, ref.object_key)
    return answer


def read(fetcher, ref, form=FORM):
    path = packed_path(fetcher.cache, ref.digest, form.form_id)
    return read_packed(path, ref.digest, form)


# ---- results of a fetch ----


def test_an_object_is_brought_to_disk_packed(s3, fetcher, wire):
    ref = put_new(s3)
    answer = fetch(wire, ref)
    assert (answer["kind"], answer["error"], answer["was_there"]) == (None, None, False)
    assert answer["size_bytes"] == ref.size_bytes
    assert answer["seconds"] > 0
    assert read(fetcher, ref).digest == ref.digest
    used = sum((fetcher.cache / name).stat().st_size for name in fetcher.files())
    assert answer["used_bytes"] == used
    assert all(name.endswith(".packed") for name in fetcher.files()), "no draft is left"


def test_what_is_there_is_not_asked_for_again(s3, fetcher, wire):
    ref = put_new(s3)
    first = fetch(wire, ref)
    before = s3.count()
    answer = fetch(wire, ref)
    assert (answer["kind"], answer["was_there"], answer["size_bytes"]) == (None, True, 0)
    slabs_bytes = read(fetcher, ref).size_bytes  # which wait before a device
    assert first["host_bytes"] == answer["host_bytes"] == slabs_bytes
    assert s3.count() == before


def test_each_arena_gets_a_form_of_its_own(s3, fetcher):
    ref = put_new(s3)
    halves = PackedForm(Layout.of(FORM.layout.shape, 2), "float16", "base-1")
    for form in (FORM, halves):
        with connected(fetcher.path, form) as wire:
            assert fetch(wire, ref)["was_there"] is False
        assert read(fetcher, ref, form).digest == ref.digest


def test_equal_files_of_two_tenants_are_fetched_each_for_itself(s3, wire):
    """One tenant's object is missing in the store, which does not affect the other's."""
    ref = put_new(s3, "tenants/one/same")
    gone = replace(ref, object_key="tenants/two/same")
    s3.fail("hang", key=ref.object_key)
    first = wire.fetch(ref)
    assert fetch(wire, gone)["kind"] == "missing"
    s3.clear()
    answer = wire.answer()
    assert (answer["order"], answer["kind"]) == (first, None)


# ---- a store that fails ----


def test_a_store_that_never_answers_is_given_up_in_time(s3, wire):
    ref = put_new(s3)
    s3.fail("hang", key=ref.object_key)
    answer = fetch(wire, ref, timeout_s=0.3)
    assert (answer["kind"], answer["error"]) == ("unavailable", "the store was too slow")
    s3.clear()
    assert fetch(wire, ref)["kind"] is None


def test_an_object_larger_than_the_cache_is_too_large_without_a_byte(s3, wire):
    ref = make_ref(make_object(next(_seeds)), "huge")
    assert fetch(wire, replace(ref, size_bytes=1 << 40))["kind"] == "too_large"
    assert s3.count("huge") == 0


# ---- dropped fetches and waiting fetches ----


def test_a_dropped_fetch_is_answered_though_the_store_hangs(s3, fetcher, wire):
    ref = put_new(s3)
    s3.fail("stall", key=ref.object_key)
    number = wire.fetch(ref)
    wait_for(lambda: s3.count(ref.object_key))
    wire.drop(number)
    answer = wire.answer()
    assert (answer["order"], answer["kind"]) == (number, "dropped")
    wait_for(lambda: not [name for name in fetcher.files() if "draft" in name])


def test_further_fetches_wait_in_line_and_the_line_has_an_end(s3, wire):
    s3.fail("hang")
    first = put_new(s3)
    for number in range(8):
        wire.fetch(replace(first, object_key=f"hang{number}"))
    wait_for(lambda: s3.count("hang") == 8)
    in_line = wire.fetch(first)
    wire.drop(in_line)
    answer = wire.answer()
    assert (answer["order"], answer["kind"]) == (in_line, "dropped"), "it need not come to its turn"
    for _ in range(1024 - 8 + 1):
        last = wire.fetch(first)
    answer = wire.answer()
    assert (answer["order"], answer["kind"]) == (last, "unavailable")
    assert s3.count(first.object_key) == 0


def test_when_an_engine_hangs_up_nothing_is_fetched_for_it_any_more(s3, fetcher):
    ref = put_new(s3)
    s3.fail("stall", key=ref.object_key)
    with connected(fetcher.path) as wire:
        wire.fetch(ref)
        wait_for(lambda: s3.count(ref.object_key))
    wait_for(lambda: not [name for name in fetcher.files() if "draft" in name])


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b"[]\n",
        b'{"op": "unheard of"}\n',
        b'{"op": "fetch", "order": 1, "object_key": "k", "digest": "../x", "size_bytes": 1,'
        b' "timeout_s": 1}\n',
        b'{"op": "hello", "form": {}}\n',
        b'"' + b"x" * (65 << 10) + b'"\n',
    ],
)
def test_a_line_that_cannot_be_understood_ends_its_connection_only(s3, fetcher, line):
    with connected(fetcher.path) as bad, connected(fetcher.path) as good:
        bad._socket.sendall(line)
        with pytest.raises((EOFError, ConnectionResetError)):
            bad.answer()
        assert fetch(good, put_new(s3))["kind"] is None


def test_a_fetch_before_the_form_is_known_ends_the_connection(fetcher):
    with socket.socket(socket.AF_UNIX) as engine:
        engine.connect(str(fetcher.path))
        engine.sendall(b'{"op": "fetch"}\n')
        engine.settimeout(DEADLINE_S)
        assert engine.recv(1) == b""


# ---- the process and its disk ----


def test_a_fetcher_killed_while_it_writes_leaves_a_cache_that_works(s3, mortal):
    whole, half = put_new(s3), put_new(s3)
    with connected(mortal.path) as wire:
        fetch(wire, whole)
        s3.fail("stall", key=half.object_key)
        wire.fetch(half)
        wait_for(lambda: [name for name in mortal.files() if "draft" in name])
        mortal.kill()
    s3.clear()
    mortal.start()
    assert [name for name in mortal.files() if "draft" in name] == []
    with connected(mortal.path) as wire:
        assert fetch(wire, whole)["was_there"] is True
        answer = fetch(wire, half)
    assert answer["kind"] is None
    assert answer["used_bytes"] == sum(
        (mortal.cache / name).stat().st_size for name in mortal.files()
    )
    assert read(mortal, half).digest == half.digest


def test_a_fetcher_of_a_folder_loads_neither_boto3_nor_torch():
    check = "import sys, lora.fetch; sys.exit(bool({'boto3', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], timeout=DEADLINE_S).returncode == 0


@pytest.fixture
def local(tmp_path):
    """(cache of a fetcher in this process, function that fetches a new adapter from a folder)"""
    storage = LocalStorage(tmp_path / "objects")
    cache = DiskCache(tmp_path / "cache", 10_000_000)
    fetcher = Fetcher(Downloader(storage), cache, 8)

    def fetch_new(timeout_s=DEADLINE_S):
        data = make_object(next(_seeds))
        (tmp_path / "upload").write_bytes(data)
        ref = make_ref(data)
        storage.put(ref.digest, tmp_path / "upload")
        until = time.monotonic() + timeout_s
        order = Order(1, ref.digest, ref.digest, ref.size_bytes, until, threading.Event())
        return fetcher.fetch(order, FORM)

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
