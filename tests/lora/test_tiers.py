"""Store to disk to arena with the real parts: a fetcher process, files, threads, tensors."""

import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lora.disk_cache import DiskCache
from lora.errors import AdapterError
from lora.layout import Layout
from lora.loader import ThreadLoader
from registry.base_model import BaseModel
from registry.ref import AdapterRef
from registry.storage import LocalStorage
from tests.engine.fakes import SHAPE
from tests.tiny_models import canonical_bytes, save_adapter, save_model

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny model, a PEFT adapter of mixed ranks, and its canonical object."""
    folder = tmp_path_factory.mktemp("world")
    model_dir = save_model(folder / "model")
    adapter_dir = save_adapter(
        model_dir, folder / "a", seed=3, r=12, rank_pattern={"v_proj": 3}, use_rslora=True
    )
    base = BaseModel.load(model_dir, "tiny", folder / "cache")
    return base, adapter_dir, canonical_bytes(adapter_dir, base)


def layout_of(base):
    shape = SHAPE.__class__(2, 64, 160, 4, 2, 16)
    assert base.modules["model.layers.0.mlp.up_proj"] == (64, 160)
    return Layout.of(shape, itemsize=4)


def make_ref(data, key="k"):
    return AdapterRef("a", 1, hashlib.sha256(data).hexdigest(), key, 12, len(data))


# ---- disk ----


def store(cache, data):
    digest = hashlib.sha256(data).hexdigest()
    cache.store(digest, [data[:3], data[3:]], len(data))
    return digest


def test_the_disk_cache_keeps_to_its_quota_and_drops_the_least_recently_used(tmp_path):
    cache = DiskCache(tmp_path, quota_bytes=250)
    first, second = store(cache, b"1" * 100), store(cache, b"2" * 100)
    os.utime(cache.path(first), (1, 1))
    os.utime(cache.path(second), (2, 2))
    cache.open_verified(first)  # used: now the newer one
    third = store(cache, b"3" * 100)
    assert [cache.has(d) for d in (first, second, third)] == [True, False, True]
    assert cache.size_bytes() <= 250


def test_an_object_that_is_not_its_digest_is_never_stored(tmp_path):
    cache = DiskCache(tmp_path, quota_bytes=1000)
    for chunks in ([b"other bytes"], [b"x" * 200]):
        with pytest.raises(AdapterError):
            cache.store("0" * 64, chunks, 100)
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_changed_on_disk_are_noticed_and_dropped(tmp_path):
    cache = DiskCache(tmp_path, quota_bytes=1000)
    digest = store(cache, b"good bytes")
    cache.path(digest).write_bytes(b"bad  bytes")
    with pytest.raises(AdapterError):
        cache.open_verified(digest)
    assert not cache.has(digest)


# ---- fetcher and loader ----


@pytest.fixture
def fetcher(tmp_path):
    """Starts a fetcher over `tmp_path/objects`; what runs at the end is killed."""
    path, started = tmp_path / "fetch.sock", []

    def start():
        command = [sys.executable, "-m", "lora.fetch", "--socket", str(path)]
        command += ["--storage", (tmp_path / "objects").as_uri()]
        command += ["--cache", str(tmp_path / "cache"), "--quota-bytes", "1000000"]
        started.append(subprocess.Popen(command))
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    return started[-1]
            time.sleep(0.02)
        raise AssertionError("the fetcher does not listen")

    yield path, start
    for process in started:
        process.kill()
        process.wait()


def next_loaded(loader):
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if done := loader.poll():
            (loaded,) = done
            return loaded
        time.sleep(0.005)
    raise AssertionError("nothing was loaded")


def make_loader(tmp_path, base, socket_path):
    layout = layout_of(base)
    arena = torch.zeros(64, layout.slab_bytes, dtype=torch.uint8)
    disk = DiskCache(tmp_path / "cache", 1_000_000)
    return ThreadLoader(disk, socket_path, layout, torch.float32, arena)


def put(tmp_path, key, data):
    (tmp_path / "upload").write_bytes(data)
    LocalStorage(tmp_path / "objects").put(key, tmp_path / "upload")


def test_an_adapter_comes_from_the_store_into_slabs(world, tmp_path, fetcher):
    base, _, data = world
    path, start = fetcher
    start()
    put(tmp_path, "tenants/t/one", data)
    ref = make_ref(data, "tenants/t/one")
    loader = make_loader(tmp_path, base, path)
    loader.fetch(ref)
    assert next_loaded(loader).failure is None
    loader.load(ref)
    packed = next_loaded(loader).value
    slabs = list(range(7, 7 + packed.num_slabs))
    loader.place(ref, packed, slabs)
    tables = next_loaded(loader).value
    assert tables.digest == ref.digest
    assert torch.equal(loader.arena[7 : 7 + packed.num_slabs], packed.slabs)
    assert not loader.arena[:7].any(), "nobody else's slab was touched"


def test_an_order_survives_a_fetcher_that_was_killed(world, tmp_path, fetcher):
    base, _, data = world
    path, start = fetcher
    process = start()
    process.kill()
    process.wait()
    put(tmp_path, "k", data)
    loader = make_loader(tmp_path, base, path)
    loader.fetch(make_ref(data))  # nobody is there to hear it
    start()
    assert next_loaded(loader).failure is None


def test_a_missing_object_is_an_answer_not_a_wait(world, tmp_path, fetcher):
    base, _, data = world
    path, start = fetcher
    start()
    loader = make_loader(tmp_path, base, path)
    loader.fetch(make_ref(data, "not/there"))
    loaded = next_loaded(loader)
    assert loaded.failure.kind == "missing"


def test_another_object_under_the_key_is_refused(world, tmp_path, fetcher):
    base, _, data = world
    path, start = fetcher
    start()
    put(tmp_path, "k", data[:-1] + b"x")
    loader = make_loader(tmp_path, base, path)
    loader.fetch(make_ref(data))
    assert next_loaded(loader).failure.kind == "corrupt"
    assert list(Path(tmp_path / "cache").iterdir()) == []
