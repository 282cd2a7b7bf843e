"""Where tiles lie: nothing overlaps, nothing is wasted on ranks an adapter does not have."""

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


def test_the_layout_id_names_the_byte_layout():
    ids = {Layout.of(LLAMA_8B, 2).layout_id, Layout.of(LLAMA_8B, 4).layout_id}
    ids |= {Layout.of(LLAMA_8B, 2, 32).layout_id, Layout.of(SMOLLM_135M, 2).layout_id}
    assert len(ids) == 4


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
