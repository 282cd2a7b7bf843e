"""The ints of a step, which describe it to the kernels, read back from memory."""

import pytest
import torch

from engine.gpu import inputs
from engine.gpu.graphs import StepGraphs
from engine.gpu.inputs import StepBuilder, StepLimits, StepShape
from engine.steps.batch import Batch, ScheduledRow
from engine.wire.messages import SamplingParams
from kernels.block import BLOCK
from kernels.work import SPLIT_KEYS, Decode
from lora.batch import DeviceTables
from lora.layout import Layout
from lora.packed import PackedForm
from tests.engine.fakes import SHAPE

LAYOUT = Layout.of(SHAPE, itemsize=4)
FORM = PackedForm(LAYOUT, "float32", "base-1")
GARBAGE = 10**6


def make_tables(digest, depth):
    table = torch.zeros(2, 7, depth, dtype=torch.int32)
    return DeviceTables(digest, "base-1", table, torch.ones(2, 7))


TABLES = {"narrow": make_tables("narrow", 1), "wide": make_tables("wide", 5)}


def make_builder(window=None, max_num_drafts=0):
    limits = StepLimits(8, 300, 4096, 16, window, max_num_drafts)
    arena = torch.zeros(4, LAYOUT.slab_bytes, dtype=torch.uint8)
    return StepBuilder(limits, FORM, arena, lambda key: (0, TABLES[key]), StepGraphs(limits).fit)


def build(*rows, window=None, max_num_drafts=0):
    """(views, plan) of a step in memory that held other numbers before."""
    builder = make_builder(window, max_num_drafts)
    ints = torch.full((builder.most_ints,), GARBAGE, dtype=torch.int32)
    plan = builder.build(Batch(1, rows), ints.numpy(), {})
    return builder.views(plan.shape, ints), plan


def make_row(start, count, adapter=None, name="r", drafts=0):
    blocks = tuple(range(LAYOUT.num_blocks(start + count + drafts)))
    sampling, tokens = SamplingParams(max_tokens=1), (7,) * (count + drafts)
    row = ScheduledRow(name, tokens, start, blocks, adapter, adapter, 0, sampling, 0, 0)
    return row._replace(num_drafts=drafts)


@pytest.mark.parametrize("window", [None, 1, 100, 255, 256, 257, 512, 1000])
@pytest.mark.parametrize("length", [1, 256, 257, 512, 1100, 1611, 2048])
def test_a_decode_reads_the_splits_that_its_window_reaches_and_no_others(length, window):
    inputs, _ = build(make_row(length - 1, 1), window=window)
    seen = range(max(0, length - (window or length)), length)
    expected = sorted({position // SPLIT_KEYS for position in seen})
    work = inputs.attention
    count = int(work.num_decode_items)
    assert work.decode_items[:count].tolist() == [[0, split] for split in expected]
    (decode, *_) = read_decodes(work)
    assert (decode.split, decode.num_sums) == (expected[0], len(expected))


@pytest.mark.parametrize("most_items", [1, 16, 33, 50, 80, 10**6])
@pytest.mark.parametrize("num_rows", range(1, 9))
def test_splits_are_cut_into_parts_that_have_room_for_whole_rows(monkeypatch, num_rows, most_items):
    monkeypatch.setattr(inputs, "MOST_DECODE_ITEMS", most_items)
    lengths = [1 + 700 * n % 4096 for n in range(num_rows)]
    work = build(*(make_row(n - 1, 1, name=f"r{n}") for n in lengths))[0].attention
    counts = work.num_decode_items.tolist()
    rooms = work.decode_items.chunk(len(counts))
    assert len({len(room) for room in rooms}) == 1
    assert len(rooms[0]) <= max(most_items, 4096 // SPLIT_KEYS)
    assert_sums_have_places(work)
    found = [item for room, n in zip(rooms, counts, strict=True) for item in room[:n].tolist()]
    assert found == [[r, s] for r, n in enumerate(lengths) for s in range(-(-n // SPLIT_KEYS))]


def read_decodes(work):
    decodes = [Decode(*ints) for ints in work.decodes.tolist()]
    return [decode for decode in decodes if decode.num_sums]


def assert_sums_have_places(work):
    """Each query of each item has a partial sum of its own in its part, and knows where it is."""
    num_parts = len(work.num_decode_items)
    room = len(work.decode_items) // num_parts
    part_places = -(-len(work.decodes) // num_parts)
    written = []
    for part, count in enumerate(work.num_decode_items.tolist()):
        for first, split in work.decode_items[part * room :][:count].tolist():
            assert first // part_places == part
            tile = [Decode(*ints) for ints in work.decodes[first:].tolist()]
            tile = tile[: tile[0].num_queries]
            for query, decode in enumerate(tile):
                assert (decode.num_queries, decode.split) == (len(tile), tile[0].split)
                assert decode.token == tile[0].token + query
                at = tile[0].first_sum + (split - tile[0].split) * len(tile) + query
                assert at < room
                written.append((part, at))
    assert len(written) == len(set(written))
    for number, decode in enumerate(Decode(*ints) for ints in work.decodes.tolist()):
        sums = range(decode.first_sum, room, decode.num_queries or 1)[: decode.num_sums]
        assert {(number // part_places, at) for at in sums} <= set(written)
        assert len(sums) == decode.num_sums


@pytest.mark.parametrize("window", [None, 3, 300])
@pytest.mark.parametrize("most_items", [16, 50, 80, 10**6])
def test_drafts_are_cut_into_tiles_that_lie_in_one_part(monkeypatch, most_items, window):
    monkeypatch.setattr(inputs, "MOST_DECODE_ITEMS", most_items)
    counts = [(0, 0), (5, 3), (250, 7), (510, 7), (700, 2), (1000, 6)]
    rows = [make_row(start, 1, drafts=count, name=f"r{start}") for start, count in counts]
    views, plan = build(*rows, window=window, max_num_drafts=32)
    decodes = read_decodes(views.attention)
    assert plan.shape == StepShape(32, 32)
    assert [decode.length for decode in decodes] == [
        s + i + 1 for s, n in counts for i in range(n + 1)
    ]
    assert [decode.token for decode in decodes] == list(range(31))
    for decode in decodes:
        seen = range(max(0, decode.length - (window or decode.length)), decode.length)
        assert decode.num_sums == len({position // SPLIT_KEYS for position in seen})
    whole = [decode for decode in decodes if decode.num_queries == 8]
    assert len(whole) == (16 if most_items == 10**6 else 0)
    assert_sums_have_places(views.attention)
    assert views.logits_indices.tolist() == [*range(31), 0]
    assert int(views.attention.num_prefill_items) == 0


def test_a_step_of_prefills_and_drafts_has_a_place_for_each_token_that_is_chosen():
    rows = make_row(0, 40), make_row(9, 1, drafts=3, name="b")
    views, plan = build(*rows, max_num_drafts=32)
    assert plan.shape == StepShape(128, 40, num_prefill_items=128 // 16 + 16)
    assert views.logits_indices[:5].tolist() == [39, 40, 41, 42, 43]
    assert [row.num_output_tokens for row in plan.choosing] == [0, 0, 1, 2, 3]
    assert views.attention.prefill_items[:3].tolist() == [[0, 0], [0, 1], [0, 2]]
    assert int(views.attention.num_prefill_items) == 3


def test_padding_rows_have_no_positions_no_items_and_no_slots():
    inputs, plan = build(*(make_row(20 + n, 1, name=f"r{n}") for n in range(5)))
    assert plan.shape == StepShape(8, 8)
    work = inputs.attention
    assert work.seq_lens.tolist() == [21, 22, 23, 24, 25, 0, 0, 0]
    assert work.query_starts.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert int(work.num_decode_items) == 5
    assert work.decodes[5:].eq(0).all()
    assert inputs.slots[5:].eq(-1).all()
    assert inputs.sources.eq(-1).all()
    assert inputs.input_ids[5:].eq(0).all()
    assert inputs.positions[5:].eq(0).all()


def test_a_prefill_is_cut_into_tiles_and_its_blocks_lie_behind_each_other():
    inputs, plan = build(make_row(0, 1, name="a"), make_row(10, 40, name="b"))
    work = inputs.attention
    assert plan.shape == StepShape(128, 8, num_prefill_items=128 // 16 + 8)
    assert work.prefill_items[:3].tolist() == [[1, 0], [1, 1], [1, 2]]
    assert len(work.prefill_items) == 16
    assert int(work.num_prefill_items) == 3
    assert read_decodes(work) == [Decode(0, 1, 0, 1, 0, 0, 1)]
    starts, needed = work.block_starts.tolist(), LAYOUT.num_blocks(50)
    assert work.blocks[starts[1] : starts[1] + needed].tolist() == [*range(needed)]
    assert inputs.positions.tolist() == [0, *range(10, 50)] + [0] * 87
    assert inputs.slots[41:].eq(-1).all(), "padding has no slots"
    assert inputs.logits_indices.tolist() == [0, 40] + [0] * 6


@pytest.mark.parametrize(
    ("counts", "num_decodes", "num_prefills"),
    [([1, 1], 2, 0), ([40], 0, 3), ([1, 40, 2], 1, 4), ([1, 2], 1, 1)],
)
def test_a_step_has_in_its_own_shape_no_room_for_the_kind_of_row_that_it_lacks(
    counts, num_decodes, num_prefills
):
    builder = make_builder()
    builder.fit = lambda shape: shape
    rows = tuple(make_row(0, count, name=f"r{n}") for n, count in enumerate(counts))
    ints = torch.full((builder.most_ints,), GARBAGE, dtype=torch.int32)
    work = builder.views(builder.build(Batch(1, rows), ints.numpy(), {}).shape, ints).attention
    assert int(work.num_decode_items) == num_decodes
    assert int(work.num_prefill_items) == len(work.prefill_items) == num_prefills
    assert (len(work.decode_items) > 0) == (num_decodes > 0)


@pytest.mark.parametrize(("longest", "block_rows"), [(1, 16), (63, 16), (64, 64), (130, 64)])
def test_long_segments_are_cut_into_large_blocks(longest, block_rows):
    """A segment is adjacent tokens of one adapter; tokens of the base model are a segment too."""
    rows = (
        make_row(0, 9, name="a"),
        make_row(0, longest, "wide", "b"),
        make_row(5, 3, "narrow", "c"),
    )
    inputs, plan = build(*rows)
    work = inputs.lora
    assert work.block_rows == plan.shape.block_rows == block_rows
    num_blocks, num_pairs = work.counts.tolist()
    covered = []
    blocks = work.blocks[:num_blocks].numpy().view(BLOCK)[:, 0].tolist()
    for first, count, *adapter in blocks:
        assert 0 < count <= block_rows
        covered += [(first + i, adapter) for i in range(count)]
    base, wide, narrow = [0, 0, 0], *(adapter_of(TABLES[name]) for name in ("wide", "narrow"))
    assert covered == [*enumerate([base] * 9 + [wide] * longest + [narrow] * 3)]
    pairs = work.pairs[:num_pairs].tolist()
    own = [number for number, block in enumerate(blocks) if [*block[2:]] == wide]
    assert [pair for block, pair in pairs if block in own] == [0, 1, 2] * len(own)
    assert [pair for block, pair in pairs if block not in own] == [0]


def adapter_of(tables):
    """Fields of a BLOCK that describe its adapter: depth, and addresses of tiles and scales."""
    depth = tables.tile_table.shape[2]
    return [depth, tables.tile_table.data_ptr(), tables.scales.data_ptr()]


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (3, 3), (7, 2), (133, 5), (300, 8)])
def test_lists_of_adapters_begin_where_they_can_be_read_wide(num_tokens, num_rows, block_rows):
    builder = make_builder()
    shape = StepShape(num_tokens, num_rows, block_rows)
    work = builder.views(shape, torch.zeros(builder.most_ints, dtype=torch.int32)).lora
    for records in (work.blocks, work.pairs):
        assert records.storage_offset() * records.itemsize % 16 == 0


def test_the_largest_step_fits_into_the_memory_that_is_made_for_it():
    _, plan = build(*(make_row(4000, 37, "wide", f"r{n}") for n in range(8)))
    assert plan.num_ints <= make_builder().most_ints
