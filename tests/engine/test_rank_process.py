"""A rank's view of adapters: each one placed stays known until its slabs are taken."""

import pytest
import torch

from engine.rank_process import PlacedAdapters
from lora.disk_cache import packed_path
from lora.filling import SlabFiller
from lora.layout import Layout
from lora.packed import PackedForm
from lora.shard import Shard
from tests.engine.gpu.fake_device import FakeDevice
from tests.lora.factories import SHAPE, make_object, make_ref
from tests.tiny_models import packed_adapter

FORM = PackedForm(Layout.of(SHAPE, 4, num_shards=2), "float32", "base-1")
SHARD = Shard(1, 2)


class World:
    """A rank, and adapters on disk. slabs: number of slabs of an adapter.

    is_on_device: whether the arena is on a device, with host memory for one adapter.
    """

    def __init__(self, folder, is_on_device):
        self.folder = folder
        self.arena = torch.zeros(32, FORM.layout.slab_bytes, dtype=torch.uint8)
        self.slabs = packed_adapter(make_object(0), FORM, folder, SHARD).num_slabs
        device = FakeDevice() if is_on_device else None
        host_bytes = self.slabs * FORM.layout.slab_bytes
        filler = SlabFiller(FORM, self.arena, device, SHARD, host_bytes)
        self.placed = PlacedAdapters(filler, folder)

    def on_disk(self, seed):
        data = make_object(seed)
        return packed_adapter(data, FORM, self.folder, SHARD), make_ref(data).digest

    def path(self, digest):
        return packed_path(self.folder, digest, FORM.form_id)


@pytest.fixture(params=[False, True])
def world(tmp_path, request):
    return World(tmp_path, request.param)


def test_an_adapter_lies_in_the_slabs_that_the_first_rank_named(world):
    packed, digest = world.on_disk(1)
    slabs = [2 * k + 1 for k in range(world.slabs)]
    assert world.placed.place(7, digest, slabs) is None
    assert torch.equal(world.arena[torch.tensor(slabs)], packed.slabs)
    generation, tables = world.placed.tables("7")
    assert (generation, tables.digest) == (7, digest)


def test_what_lay_in_a_slab_that_is_taken_is_forgotten_and_nothing_else(world):
    n = world.slabs
    for number, slabs in ((1, [*range(n)]), (2, [*range(n, 2 * n)])):
        assert world.placed.place(number, world.on_disk(number)[1], slabs) is None
    assert world.placed.place(3, world.on_disk(3)[1], [*range(n - 1, 0, -1), 2 * n]) is None
    with pytest.raises(KeyError):
        world.placed.tables("1")
    assert world.placed.tables("2")[0] == 2
    assert world.placed.tables("3")[0] == 3


def test_a_file_that_is_gone_or_damaged_is_a_failure_of_its_own_kind(world):
    _, gone = world.on_disk(1)
    world.path(gone).unlink()
    _, damaged = world.on_disk(2)
    data = bytearray(world.path(damaged).read_bytes())
    data[-3] ^= 1
    world.path(damaged).write_bytes(data)
    slabs = list(range(world.slabs))
    kinds = [world.placed.place(1, digest, slabs).kind for digest in (gone, damaged)]
    assert kinds == ["evicted", "lost"]
    assert not world.arena.any(), "a damaged adapter is not left in the arena"
    world.path(gone).mkdir()
    assert world.placed.place(2, gone, slabs).kind == "unavailable"
    with pytest.raises(KeyError):
        world.placed.tables("1")
