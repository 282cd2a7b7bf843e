"""Loads from disk to host to arena, off the engine thread, after a real fetcher process."""

import contextlib
import hashlib
import json
import os
import socket
from dataclasses import replace

import pytest
import torch

from lora.disk_cache import packed_path
from lora.errors import DROPPED
from lora.fetch_client import ANSWER_MARGIN_S, FetchClient
from lora.host import open_packed, read_packed
from lora.loader import ThreadLoader
from lora.loads import Fetched, Placed, Read
from registry.storage.storage import LocalStorage
from tests.engine.gpu.fake_device import FakeDevice
from tests.lora.factories import FORM, FetcherProcess, make_object, make_ref, wait_for
from tests.watched import forbidden_calls

NUM_SLABS, HOST_SLABS = 64, 8


class Tiers:
    """All tiers of adapters: a folder as store, a fetcher, a loader and an arena."""

    def __init__(self, folder, device=None):
        self.folder = folder
        self.store = LocalStorage(folder / "objects")
        self.fetcher = FetcherProcess(folder, (folder / "objects").as_uri())
        self.arena = torch.zeros(NUM_SLABS, FORM.layout.slab_bytes, dtype=torch.uint8)
        self.loader = ThreadLoader(
            self.fetcher.cache,
            self.fetcher.path,
            FORM,
            self.arena,
            device=device,
            host_cache_bytes=HOST_SLABS * FORM.layout.slab_bytes + 1,
        )

    def put(self, seed, key=None):
        data = make_object(seed)
        (self.folder / "upload").write_bytes(data)
        ref = make_ref(data, key or f"k{seed}")
        self.store.put(ref.object_key, self.folder / "upload")
        return ref

    def path(self, ref):
        return packed_path(self.fetcher.cache, ref.digest, FORM.form_id)

    def on_disk(self, seed):
        ref = self.put(seed)
        self.loader.fetch(ref)
        assert next_loaded(self.loader).failure is None
        return ref


@pytest.fixture(scope="module")
def tiers(tmp_path_factory):
    tiers = Tiers(tmp_path_factory.mktemp("tiers"))
    yield tiers
    tiers.fetcher.kill()


@pytest.fixture
def silent_fetcher(tmp_path):
    """A socket that takes connections and lines, and never answers."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "silent.sock"))
        server.listen(8)
        yield tmp_path / "silent.sock"


def next_loaded(loader):
    (loaded,) = wait_for(loader.poll)
    return loaded


# ---- from the store to the arena ----


def test_an_adapter_comes_from_the_store_into_slabs(tiers):
    ref, loader = tiers.put(1), tiers.loader
    tiers.arena.zero_()
    loader.fetch(ref)
    assert isinstance(next_loaded(loader), Fetched)
    loader.load(ref)
    loaded = next_loaded(loader)
    packed = loaded.outcome
    assert isinstance(loaded, Read)
    assert loaded.size_bytes == 0, "straight from the file, later"
    slabs = list(range(7, 7 + packed.num_slabs))
    loader.place(ref, packed, slabs)
    placed = next_loaded(loader)
    assert isinstance(placed, Placed)
    assert placed.size_bytes == packed.size_bytes
    assert placed.outcome.digest == ref.digest
    assert placed.outcome.base_revision == FORM.base_revision
    end = 7 + packed.num_slabs
    whole = read_packed(tiers.path(ref), ref.digest, FORM)
    assert torch.equal(tiers.arena[7:end], whole.slabs)
    assert not tiers.arena[:7].any(), "nobody else's slab was touched"
    assert not tiers.arena[end:].any()


@pytest.mark.parametrize("is_in_memory", [True, False])
@pytest.mark.parametrize("slabs", [[5, 6, 7, 20, 21, 3], [9, 8, 7, 6, 5, 4], [0, 2, 4, 62, 63, 1]])
def test_scattered_slabs_get_each_its_own_bytes(tiers, tmp_path, slabs, is_in_memory):
    """Slabs come from host memory, as towards a device, or straight from the file."""
    ref = tiers.on_disk(2)
    packed = wide(open_packed(tiers.path(ref), ref.digest, FORM), len(slabs), tmp_path)
    source = torch.frombuffer(bytearray(packed.path.read_bytes()), dtype=torch.uint8)
    source = source.view(len(slabs), -1)
    if is_in_memory:
        places = (1, 2, 3, 0, 7, 8)
        region = torch.zeros(9, FORM.layout.slab_bytes, dtype=torch.uint8)
        region[torch.tensor(places)] = source
        packed = replace(packed, slabs=region, region_slabs=places)
    tiers.arena.zero_()
    tiers.loader.place(ref, packed, slabs)
    assert next_loaded(tiers.loader).failure is None
    assert torch.equal(tiers.arena[torch.tensor(slabs)], source)
    others = [slab for slab in range(NUM_SLABS) if slab not in slabs]
    assert not tiers.arena[others].any()


def wide(packed, num_slabs, folder):
    """The same adapter over more slabs, every one different, in a file of their own."""
    size = num_slabs * packed.header.slab_bytes
    data = (torch.arange(size) % 251).to(torch.uint8).numpy().tobytes()
    path = folder / "slabs"
    path.write_bytes(data)
    checksum = hashlib.sha256(data).hexdigest()
    header = replace(packed.header, num_slabs=num_slabs, checksums=(checksum,))
    return replace(packed, header=header, path=path, slabs_start=0, checksum=checksum)


def test_towards_a_device_an_adapter_waits_in_pinned_memory_and_comes_by_copies(tmp_path):
    device = FakeDevice(eagerness=0.0)  # copies are made only when the test waits for them
    tiers = Tiers(tmp_path, device)
    device.arena = tiers.arena
    try:
        ref = tiers.on_disk(1)
        tiers.loader.load(ref)
        packed = next_loaded(tiers.loader).outcome
        assert packed.host_bytes == packed.size_bytes
        slabs = list(range(40, 40 + packed.num_slabs))
        tiers.loader.place(ref, packed, slabs)
        tables = next_loaded(tiers.loader).outcome
    finally:
        tiers.fetcher.kill()
    assert torch.equal(tiers.arena[slabs], packed.slabs[list(packed.region_slabs)])
    assert torch.equal(tables.tile_table, packed.tile_table(FORM.layout, slabs))
    assert torch.equal(tables.scales, packed.scales)
    assert tables.digest == ref.digest


def test_reading_a_file_makes_it_the_most_recently_used(tiers):
    ref = tiers.on_disk(3)
    os.utime(tiers.path(ref), (1, 1))
    tiers.loader.load(ref)
    next_loaded(tiers.loader)
    assert tiers.path(ref).stat().st_mtime > 1_000_000


@contextlib.contextmanager
def hanging_read(loader, folder):
    """Let the loader's thread hang, inside the context, in the read of an adapter called "held"."""
    held = make_ref(make_object(999), "held")
    path = packed_path(folder, held.digest, FORM.form_id)
    os.mkfifo(path)
    loader.load(held)
    with path.open("wb"):  # returns when the loader has opened the pipe
        yield


def test_placings_go_before_loads_and_loads_in_their_order(tiers):
    refs, loader = [tiers.on_disk(seed) for seed in (11, 12, 13)], tiers.loader
    packed = read_packed(tiers.path(refs[0]), refs[0].digest, FORM)
    with hanging_read(loader, tiers.fetcher.cache):
        for ref in refs:
            loader.load(ref)
        loader.place(refs[0], packed, list(range(packed.num_slabs)))
    done = []
    wait_for(lambda: done.extend(loader.poll()) or len(done) == 5)
    assert [(d.key, type(d)) for d in done] == [
        ("held", Read),
        (refs[0].object_key, Placed),
        *((ref.object_key, Read) for ref in refs),
    ]


# ---- missing and damaged files ----


def test_a_file_that_was_evicted_comes_again(tiers):
    ref = tiers.on_disk(21)
    tiers.path(ref).unlink()
    tiers.loader.load(ref)
    assert next_loaded(tiers.loader).failure.kind == "evicted"
    tiers.loader.fetch(ref)
    assert next_loaded(tiers.loader).was_there is False
    assert tiers.path(ref).exists()


def test_a_damaged_file_is_lost_and_removed_and_comes_again(tiers):
    ref = tiers.on_disk(22)
    data = bytearray(tiers.path(ref).read_bytes())
    data[60] ^= 1
    tiers.path(ref).write_bytes(data)
    tiers.loader.load(ref)
    assert next_loaded(tiers.loader).failure.kind == "lost"
    assert not tiers.path(ref).exists()
    tiers.loader.fetch(ref)
    assert next_loaded(tiers.loader).was_there is False
    tiers.loader.load(ref)
    assert next_loaded(tiers.loader).outcome.digest == ref.digest


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_slabs_that_are_damaged_on_their_way_are_lost_and_leave_nothing_behind(tiers, damage):
    """The slabs may hold KV next, and values that are not finite would stay in them."""
    ref = tiers.on_disk(26)
    tiers.loader.load(ref)
    packed = next_loaded(tiers.loader).outcome
    data = bytearray(tiers.path(ref).read_bytes())
    data[-1] ^= 1
    tiers.path(ref).unlink()
    if damage != "gone":
        tiers.path(ref).write_bytes(data if damage == "flip" else data[: len(data) // 2])
    tiers.arena.fill_(7)
    tiers.loader.place(ref, packed, list(range(packed.num_slabs)))
    placed = next_loaded(tiers.loader)
    kind = "evicted" if damage == "gone" else "lost"
    assert isinstance(placed, Placed)
    assert placed.failure.kind == kind
    assert (tiers.arena[: packed.num_slabs] == (7 if damage == "gone" else 0)).all()
    assert (tiers.arena[packed.num_slabs :] == 7).all()
    assert not tiers.path(ref).exists()


@pytest.mark.parametrize("other", ["digest", "base_revision"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_placing_what_is_not_the_adapter_ends_the_engine_not_the_answer(tiers, other):
    ref = tiers.on_disk(25)
    packed = read_packed(tiers.path(ref), ref.digest, FORM)
    wrong = replace(packed, header=replace(packed.header, **{other: "another"}))
    loader = ThreadLoader(tiers.fetcher.cache, tiers.fetcher.path, FORM, tiers.arena)
    loader.place(ref, wrong, list(range(packed.num_slabs)))
    with pytest.raises(AssertionError, match="another"):
        wait_for(loader.poll)


# ---- the fetcher dies, hangs, comes back ----


def test_a_fetcher_that_never_answers_fails_the_order_in_time(silent_fetcher):
    done = []
    client = FetchClient(silent_fetcher, FORM, done.append, 0.1 - ANSWER_MARGIN_S, 1)
    client.fetch(make_ref(make_object()))
    wait_for(lambda: done)
    assert [(d.key, d.failure.kind) for d in done] == [("k", "unavailable")]


def test_an_order_that_is_dropped_is_reported_once_and_its_connection_ends(tmp_path):
    loader = ThreadLoader(tmp_path, tmp_path / "s", FORM, torch.zeros(0))
    loader.fetch(make_ref(make_object()))
    loader.drop("k")
    assert next_loaded(loader).failure == DROPPED, "though there is no fetcher yet"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        server.settimeout(20)
        for _ in range(2):  # the adapter is wanted again
            loader.fetch(make_ref(make_object()))
            connection, _ = server.accept()
            connection.settimeout(20)
            with connection, connection.makefile("rb") as lines:
                assert json.loads(lines.readline())["object_key"] == "k"
                loader.drop("k")
                assert lines.readline() == b""
            assert next_loaded(loader).failure == DROPPED
    loader.drop("k")  # a drop of an order that is not under way has no effect
    assert loader.poll() == []


# ---- the engine thread never waits ----


def test_the_engine_thread_opens_sends_and_waits_for_nothing(tiers, silent_fetcher, tmp_path):
    """The fetcher hangs, and the loader's thread hangs in the read of a file."""
    refs = [make_ref(make_object(seed), f"k{seed}") for seed in range(20)]
    on_disk = tiers.on_disk(31)
    packed = read_packed(tiers.path(on_disk), on_disk.digest, FORM)
    done = []

    def engine():
        for ref in refs:
            loader.fetch(ref)
            loader.load(ref)
            loader.place(on_disk, packed, list(range(packed.num_slabs)))
            loader.drop(ref.object_key)
            done.extend(loader.poll())

    loader = ThreadLoader(tmp_path, silent_fetcher, FORM, tiers.arena)
    with hanging_read(loader, tmp_path):
        assert forbidden_calls(engine) == []
        assert {type(d) for d in done} <= {Fetched}, "all else waits behind the read that hangs"
    wait_for(lambda: done.extend(loader.poll()) or len(done) == 3 * len(refs) + 1)
