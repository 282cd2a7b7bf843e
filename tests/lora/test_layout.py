"""Places of tiles: none overlap, and no memory is spent on ranks that an adapter does not have."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis.strategies import dictionaries, integers, tuples

from lora.layout import ADDRESS_UNIT_BYTES, PROJECTIONS, RANK_ROWS, Layout, ModelShape
from lora.sites import head_sites
from tests.engine.fakes import LAYOUT, SHAPE

LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128)
SMOLLM_135M = ModelShape(30, 576, 1536, 9, 3, 64)
ranks = dictionaries(tuples(integers(0, 1), integers(0, 6)), integers(1, 64), min_size=1)


def test_a_slab_is_one_kv_block_of_16_tokens():
    layout = Layout.of(LLAMA_8B, itemsize=2)
    assert layout.block_size == 16
    assert layout.slab_bytes == 32 * 2 * 8 * 128 * 16 * 2
    assert Layout.of(SMOLLM_135M, itemsize=4).slab_bytes == 737_280


def test_blocks_grow_until_the_largest_tile_fits():
    tiny_kv = ModelShape(2, 64, 256, 4, 1, 16)
    layout = Layout.of(tiny_kv, itemsize=4)
    assert layout.block_size > 16
    assert all(layout.tile_bytes((0, p)) <= layout.slab_bytes for p in range(len(PROJECTIONS)))


def test_experts_cost_adapters_and_slabs_nothing():
    mixture = ModelShape(48, 2048, 0, 32, 4, 128)  # Qwen3-30B-A3B
    layout = Layout.of(mixture, itemsize=2)
    assert layout.block_size == 16
    assert list(mixture.adapted) == [0, 1, 2, 3]
    attention = 2 * (2048 + 4096) + 2 * (2048 + 512)
    assert layout.bytes_per_rank == 48 * attention * 2
    everywhere = {(layer, p): 256 for layer in range(48) for p in mixture.adapted}
    _, num_slabs = layout.pack(everywhere)
    assert num_slabs * layout.slab_bytes <= layout.most_adapter_bytes


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
        size = layout.tile_bytes((0, projection))
        assert offsets == [offsets[0] + i * size for i in range(len(offsets))]


@given(ranks)
@settings(max_examples=100, deadline=None)
def test_tiles_cover_every_rank_row_once_and_never_overlap(wanted):
    tiles, num_slabs = LAYOUT.pack(wanted)
    assert {(t.layer, t.projection, t.index) for t in tiles} == {
        (*place, index) for place, rank in wanted.items() for index in range(-(-rank // RANK_ROWS))
    }
    assert len({t.slab for t in tiles}) == num_slabs
    by_slab = sorted((t.slab, t.offset_bytes, LAYOUT.tile_bytes((0, t.projection))) for t in tiles)
    for (slab, start, size), (next_slab, next_start, _) in zip(by_slab, by_slab[1:], strict=False):
        assert slab != next_slab or start + size <= next_start
    for _, start, size in by_slab:
        assert start % ADDRESS_UNIT_BYTES == 0
        assert start + size <= LAYOUT.slab_bytes


# ---- the embedding and the head ----

SHAPES = {"8B": (LLAMA_8B, 2, 128_256), "135M": (SMOLLM_135M, 4, 49_152), "fake": (SHAPE, 4, 292)}


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_the_vocabulary_is_cut_into_chunks_that_leave_slabs_as_they_are(name, num_shards):
    shape, itemsize, vocab_size = SHAPES[name]
    if shape.num_kv_heads % num_shards:
        num_shards = 1
    layout = Layout.of(shape, itemsize, num_shards=num_shards, vocab_size=vocab_size)
    without = Layout.of(shape, itemsize, num_shards=num_shards)
    assert (layout.slab_bytes, layout.block_size) == (without.slab_bytes, without.block_size)
    assert [token for chunk in layout.chunks for token in chunk] == list(range(vocab_size))
    assert len({len(chunk) for chunk in layout.chunks[:-1]}) <= 1
    everywhere = dict.fromkeys([*layout.head_places, *layout.embedding_places], 9)
    tiles, num_slabs = layout.pack(everywhere)
    assert len(tiles) == 2 * len(everywhere)
    assert len(everywhere) == 2 * len(layout.chunks)
    ends: dict[int, int] = {}
    for tile in sorted(tiles, key=lambda t: (t.slab, t.offset_bytes)):
        num_inputs, num_outputs = layout.features((tile.layer, tile.projection))
        assert shape.hidden_size in (num_inputs, num_outputs)
        assert tile.offset_bytes >= ends.get(tile.slab, 0)
        ends[tile.slab] = tile.offset_bytes + RANK_ROWS * (num_inputs + num_outputs) * itemsize
    assert set(ends) == set(range(num_slabs))
    assert max(ends.values()) <= layout.slab_bytes


def test_an_8b_model_has_three_chunks_whose_copies_are_small():
    layout = Layout.of(LLAMA_8B, 2, vocab_size=128_256)
    assert len(layout.chunks) == 3
    assert layout.table_shape == (34, 7)
    values = sum(sum(layout.features(place)) for place in layout.head_places)
    assert values == 3 * 4096 + 128_256
    assert values / (4096 + 128_256) == pytest.approx(1.06, abs=0.005)


def test_places_of_the_ends_are_behind_all_projections_and_each_once():
    layout = Layout.of(SMOLLM_135M, 4, vocab_size=49_152)
    places = [*layout.head_places, *layout.embedding_places]
    assert len(set(places)) == len(places)
    layers, width = layout.table_shape
    assert all(30 <= layer < layers and place < width for layer, place in places)
    sites = [site for _, site in head_sites(layout)]
    assert [(s.layer, p) for s in sites for p in s.projections] == layout.head_places
    assert [n for s in sites for n in s.out_features] == [len(c) for c in layout.chunks]
    assert max(len(site.projections) for site in sites) <= 3


def test_the_bound_on_an_adapters_slabs_holds_with_both_ends():
    layout = Layout.of(SMOLLM_135M, 4, vocab_size=49_152)
    everywhere = {(layer, p): 256 for layer in range(30) for p in range(len(PROJECTIONS))}
    everywhere |= dict.fromkeys([*layout.head_places, *layout.embedding_places], 256)
    assert layout.pack(everywhere)[1] * layout.slab_bytes <= layout.most_adapter_bytes


def test_a_layout_without_a_vocabulary_has_no_place_for_the_ends():
    assert LAYOUT.table_shape == (2, 7)
    assert LAYOUT.head_places == LAYOUT.embedding_places == []
