"""Places of tiles: none overlap, and no memory is spent on ranks that an adapter does not have."""

from itertools import groupby

from hypothesis import given, settings
from hypothesis.strategies import dictionaries, integers, tuples

from lora.layout import ADDRESS_UNIT_BYTES, PROJECTIONS, RANK_ROWS, Layout, ModelShape
from tests.engine.fakes import LAYOUT

LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128)
SMOLLM_135M = ModelShape(30, 576, 1536, 9, 3, 64)
ranks = dictionaries(tuples(integers(0, 1), integers(0, 6)), integers(1, 64), min_size=1)


def test_a_slab_is_one_kv_block_of_16_tokens():
    layout = Layout.of(LLAMA_8B, itemsize=2)
    assert layout.block_size == 16
    assert layout.slab_bytes == 32 * 2 * 8 * 128 * 16 * 2
    assert Layout.of(SMOLLM_135M, itemsize=4).slab_bytes == 737_280


def test_an_adapter_costs_what_it_has():
    layout = Layout.of(LLAMA_8B, itemsize=2)
    q_and_v = {(layer, p): 16 for layer in range(32) for p in (0, 2)}
    _, num_slabs = layout.pack(q_and_v)
    weights = 32 * 16 * (4096 + 4096 + 4096 + 1024) * 2
    assert weights <= num_slabs * layout.slab_bytes < 1.1 * weights


def test_blocks_grow_until_the_largest_tile_fits():
    tiny_kv = ModelShape(2, 64, 256, 4, 1, 16)
    layout = Layout.of(tiny_kv, itemsize=4)
    assert layout.block_size > 16
    assert all(layout.tile_bytes(p) <= layout.slab_bytes for p in range(len(PROJECTIONS)))


def test_a_large_adapter_leaves_almost_nothing_of_its_slabs_empty():
    layout = Layout.of(LLAMA_8B, itemsize=2)
    everywhere = {(layer, p): 256 for layer in range(32) for p in range(len(PROJECTIONS))}
    _, num_slabs = layout.pack(everywhere)
    assert num_slabs * layout.slab_bytes < 1.02 * 256 * layout.bytes_per_rank
    assert num_slabs * layout.slab_bytes <= layout.most_adapter_bytes


def test_tiles_of_a_projection_in_one_slab_are_neighbours():
    layout = Layout.of(SMOLLM_135M, itemsize=4)
    mixed = {(layer, p): 9 + 8 * (p % 3) for layer in range(30) for p in range(len(PROJECTIONS))}
    tiles, _ = layout.pack(mixed)
    for (_, projection), run in groupby(tiles, lambda t: (t.slab, t.projection)):
        offsets = [tile.offset_bytes for tile in run]
        size = layout.tile_bytes(projection)
        assert offsets == [offsets[0] + i * size for i in range(len(offsets))]


@given(ranks)
@settings(max_examples=100, deadline=None)
def test_tiles_cover_every_rank_row_once_and_never_overlap(wanted):
    tiles, num_slabs = LAYOUT.pack(wanted)
    assert {(t.layer, t.projection, t.index) for t in tiles} == {
        (*place, index) for place, rank in wanted.items() for index in range(-(-rank // RANK_ROWS))
    }
    assert len({t.slab for t in tiles}) == num_slabs
    by_slab = sorted((t.slab, t.offset_bytes, LAYOUT.tile_bytes(t.projection)) for t in tiles)
    for (slab, start, size), (next_slab, next_start, _) in zip(by_slab, by_slab[1:], strict=False):
        assert slab != next_slab or start + size <= next_start
    for _, start, size in by_slab:
        assert start % ADDRESS_UNIT_BYTES == 0
        assert start + size <= LAYOUT.slab_bytes
