"""Attention on paged KV in Triton's interpreter, against `kernels.reference` and float64."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.gpu.decodes import Decodes
from kernels import reference
from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.launch import assume_capability
from kernels.gpu.prefill_attention import prefill_attention, prefill_queries
from kernels.reference import FP8
from kernels.work import Decode, decode_queries
from tests.kernels.attention_cases import make_case
from tests.kernels.far_rows import far_rows
from tests.soak import soak

WINDOWS = pytest.mark.parametrize(
    ("window", "dtype"),
    [
        (None, torch.float16),
        (5, torch.float32),
        (700, torch.float16),
        *soak((None, torch.float32), (5, torch.float16), (700, torch.float32)),
        *soak((1, torch.float32), (1, torch.float16)),
    ],
)
GROUPS = pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [
        (2, 2, 64),
        (3, 1, 80),
        (17, 1, 16),
        *soak((8, 2, 32), (7, 1, 96), (8, 1, 16), (4, 1, 128)),
    ],
)

LENGTHS = [1, 16, 17, 255, 256, 257, 1100]
CHUNKS = [(2, 2), (33, 33), (17, 2), (23, 7), (86, 70), (301, 1), (333, 33), (1100, 5), (131, 5)]
"""(positions, tokens) of chunks that begin at 0, 0, 15, 16, 16, ..; one is a decode. The last one's
first token does not see the last key of a tile, whatever a tile's keys are."""


@pytest.fixture(autouse=True)
def empty_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("scores", [(0.6,), (None, 1.5), (0.6, 0.9)])
def test_scores_have_the_factor_and_the_bound_that_are_given(scores):
    case = make_case([(1, 1), (300, 1), (40, 17)], dtype=torch.float16)
    case.check("decode_attention", decode_attention, None, *scores)
    case.check("prefill_attention", prefill_attention, 20, *scores)


# ---- decode ----


@WINDOWS
def test_a_decode_sees_its_own_positions_and_no_others(window, dtype):
    rows = [(length, 1) for length in LENGTHS]
    make_case(rows, dtype=dtype).check("decode_attention", decode_attention, window)


@GROUPS
def test_a_decode_has_any_group_of_heads_and_head_dim(heads, kv_heads, dim):
    case = make_case([(40, 1), (7, 1)], heads=heads, kv_heads=kv_heads, dim=dim, block_size=32)
    case.check("decode_attention", decode_attention)


@pytest.mark.parametrize("window", [None, 20])
def test_decodes_leave_prefills_and_padding_alone(window):
    case = make_case([(50, 1), (0, 1), (40, 9), (600, 1), (0, 1)], dtype=torch.float16)
    case.check("decode_attention", decode_attention, window)
    out = case.run(decode_attention)
    assert out[1:11].isnan().all()
    assert out[12].isnan().all()


def test_a_decode_alone_has_the_bits_it_has_among_others():
    rows = [(1100, 1), (3, 3), (513, 1), (60, 1)]
    together = make_case(rows, dtype=torch.float16).run(decode_attention)
    for token, length in ((0, 1100), (4, 513), (5, 60)):
        alone = make_case([(length, 1)], dtype=torch.float16, num_spare=0).run(decode_attention)
        assert torch.equal(alone[0], together[token])


def test_items_that_do_not_count_change_nothing():
    case = make_case([(700, 1), (30, 1)])
    count = int(case.work.num_decode_items)
    cut = replace(case.work, decode_items=case.work.decode_items[:count])
    expected = replace(case, work=cut).run(decode_attention)
    assert torch.equal(case.run(decode_attention), expected)
    no_rows = replace(
        case.work,
        num_decode_items=torch.zeros(1, dtype=torch.int32),
        decodes=torch.zeros_like(case.work.decodes),
    )
    assert replace(case, work=no_rows).run(decode_attention).isnan().all()


MANY_PARTS = [(270, 1), (30, 1), (40, 9), (259, 6), (17, 1), (260, 2)]
NUM_PLACES = 12


@pytest.mark.parametrize("num_parts", [3, *soak(2, 4)])
def test_items_in_parts_give_the_bits_that_they_give_together(num_parts):
    case = make_case(MANY_PARTS, most_decoded=8)
    decodes = Decodes(NUM_PLACES, num_parts, decode_queries(heads=4, kv_heads=2), window=None)
    starts = case.work.block_starts.tolist()
    for row, (length, count) in enumerate(MANY_PARTS):
        if count <= 8:
            decodes.add(int(case.work.query_starts[row]), length - count, count, starts[row])
    spare = [(10**9, 10**9)]
    parts = [items.tolist() for items in decodes.items()]
    items = [item for own in parts for item in (*own, *spare * (24 - len(own)))]
    records = [*decodes.records, *[(0,) * 7] * (NUM_PLACES - len(decodes.records))]
    in_parts = {
        "decodes": torch.tensor(records, dtype=torch.int32),
        "decode_items": torch.tensor(items, dtype=torch.int32),
        "num_decode_items": torch.tensor([*map(len, parts)], dtype=torch.int32),
    }
    assert all(parts[:-1])
    found = replace(case, work=replace(case.work, **in_parts)).run(decode_attention)
    assert torch.equal(found.nan_to_num(), case.run(decode_attention).nan_to_num())


def test_more_splits_than_are_reduced_at_a_time_are_all_weighed():
    make_case([(4400, 1)], heads=1, kv_heads=1).check("decode_attention", decode_attention)


# ---- drafts ----


DRAFTS = [(1, 1), (8, 8), (15, 2), (16, 3), (17, 4), (133, 5), (257, 6), (258, 7), (134, 8)]
"""(positions, tokens) of rows of up to 8 tokens; some begin in another split than they end."""


@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        (5, torch.float32),
        (700, torch.float16),
        *soak((None, torch.float16), (None, torch.float32), (1, torch.float16)),
    ],
)
def test_a_row_with_drafts_sees_positions_up_to_each_token_s_own(window, dtype):
    case = make_case(DRAFTS, dtype=dtype, most_decoded=8)
    case.check("decode_attention", decode_attention, window)


@pytest.mark.parametrize("window", [None, 5])
def test_the_reference_has_drafts_attend_as_prefills_do(window):
    rows = DRAFTS[1:]
    found = make_case(rows, most_decoded=8).run(reference.decode_attention, window)
    expected = make_case(rows).run(reference.prefill_attention, window)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@GROUPS
def test_a_row_with_drafts_has_any_group_of_heads_and_head_dim(heads, kv_heads, dim):
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": 32}
    case = make_case([(40, 8), (7, 3)], most_decoded=8, dtype=torch.float16, **shape)
    case.check("decode_attention", decode_attention)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(5, 1, 200), *soak((4, 1, None), (16, 2, 5), (17, 1, None))]
)
def test_drafts_have_the_bits_that_they_would_have_as_decodes(heads, kv_heads, window):
    shape = {"heads": heads, "kv_heads": kv_heads, "dtype": torch.float16}
    case = make_case([(33, 2), (259, 7), (3, 1)], most_decoded=8, **shape)
    alone = Decodes(len(case.q), 1, decode_queries(heads, kv_heads), window)
    for decode in (Decode(*ints) for ints in case.work.decodes.tolist()):
        alone.add(decode.token, decode.length - 1, 1, decode.block_start)
    (items,) = alone.items()
    as_decodes = replace(
        case.work,
        decodes=torch.tensor(alone.records, dtype=torch.int32),
        decode_items=torch.from_numpy(items),
        num_decode_items=torch.tensor([len(items)], dtype=torch.int32),
    )
    expected = replace(case, work=as_decodes).run(decode_attention, window)
    assert torch.equal(case.run(decode_attention, window), expected)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_drafts_are_right_with_factors_bounds_and_e4m3(kv_dtype):
    case = make_case([(300, 5), (40, 8)], most_decoded=8, dtype=torch.float16, kv_dtype=kv_dtype)
    case.check("decode_attention", decode_attention, 20, 0.6, 0.9)


# ---- prefill ----


@WINDOWS
def test_a_prefill_sees_positions_up_to_its_own_and_no_others(window, dtype):
    make_case(CHUNKS, dtype=dtype).check("prefill_attention", prefill_attention, window)


@GROUPS
def test_a_prefill_has_any_group_of_heads_and_head_dim(heads, kv_heads, dim):
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": 32}
    case = make_case([(40, 40), (170, 30)], dtype=torch.float16, **shape)
    case.check("prefill_attention", prefill_attention, 100)


def test_prefills_leave_decodes_and_padding_alone():
    case = make_case([(50, 1), (40, 9), (0, 1)], dtype=torch.float16)
    case.check("prefill_attention", prefill_attention)
    out = case.run(prefill_attention)
    assert out[0].isnan().all()
    assert out[10].isnan().all()


def test_a_prefill_alone_has_the_bits_it_has_among_others():
    case = make_case(CHUNKS, dtype=torch.float16)
    together = case.run(prefill_attention)
    for index in (1, 4, 6):
        alone = make_case([CHUNKS[index]], dtype=torch.float16, num_spare=0).run(prefill_attention)
        assert torch.equal(alone, together[case.row(index)])


@pytest.mark.parametrize("window", [None, 50])
def test_chunks_of_a_prompt_give_what_the_whole_gives(window):
    rows = [(150, 150)]
    whole = make_case(rows, dtype=torch.float16)
    whole.check("prefill_attention", prefill_attention, window)
    expected = whole.run(prefill_attention, window)
    last = make_case([(150, 37)], dtype=torch.float16).run(prefill_attention, window)
    assert (last - expected[-37:]).abs().max() <= 2e-3 * expected.abs().max()


def test_a_tile_has_no_more_rows_than_there_are_for_its_heads():
    for heads, kv_heads in ((32, 8), (28, 4), (9, 3), (71, 1)):
        rows = prefill_queries(heads, kv_heads, 64, torch.float16, torch.device("cpu"))
        assert 1 <= rows * (heads // kv_heads) <= 128


# ---- both ----


@pytest.mark.parametrize(
    ("capability", "dim"),
    [
        (80, 64),
        (86, 256),
        (90, 128),
        (100, 256),
        *soak((80, 128), (80, 256), (86, 64), (86, 128)),
        *soak((90, 64), (90, 256), (100, 64), (100, 128)),
    ],
)
def test_every_architecture_s_tiles_compute_the_same(capability, dim):
    with assume_capability(capability):
        case = make_case([(200, 1), (230, 70)], heads=2, kv_heads=1, dim=dim, dtype=torch.float16)
        case.check("decode_attention", decode_attention, 100)
        case.check("prefill_attention", prefill_attention, 100)


@pytest.mark.parametrize(
    ("capability", "window"),
    [(89, None), (100, 30), *soak((89, 30), (90, None), (90, 30), (100, None))],
)
def test_kv_may_be_e4m3(capability, window):
    with assume_capability(capability):
        rows = [(600, 1), (150, 40), (17, 1)]
        case = make_case(rows, dim=80, dtype=torch.float16, kv_dtype=FP8)
        case.check("decode_attention", decode_attention, window)
        case.check("prefill_attention", prefill_attention, window)


@pytest.mark.parametrize(
    ("attend", "items"), [(decode_attention, "decode_items"), (prefill_attention, "prefill_items")]
)
def test_where_there_is_no_room_for_items_nothing_is_launched(attend, items):
    case = make_case([(50, 1), (40, 9)])
    none = {items: torch.zeros(0, 2, dtype=torch.int32), f"num_{items}": torch.tensor([10**9])}
    assert replace(case, work=replace(case.work, **none)).run(attend).isnan().all()


def test_kv_beyond_2_to_the_31_elements_is_found():
    heads, block_size, dim = 2, 16, 16
    near = make_case([(40, 1), (50, 20)], num_spare=0)
    far = far_rows(len(near.kv), near.kv[0].numel(), torch.float32)
    kv = far.view(len(near.kv), 2, heads, block_size, dim)
    case = make_case([(40, 1), (50, 20)], num_spare=0, kv=kv)
    for attend in (decode_attention, prefill_attention):
        written = near.run(attend)
        assert torch.equal(case.run(attend).nan_to_num(), written.nan_to_num())


@pytest.mark.parametrize(
    ("attend", "rows"),
    [(decode_attention, [(50, 20), (40, 1)]), (prefill_attention, [(40, 1), (50, 20)])],
)
def test_tokens_beyond_2_to_the_31_elements_are_found(attend, rows):
    near = make_case(rows)  # only the last token lies beyond 2**31 elements
    tokens, heads, dim = near.q.shape
    q, out = (far_rows(tokens, heads * dim, torch.float32).view(near.q.shape) for _ in range(2))
    q[:] = near.q
    attend(out, q, near.kv, near.work)
    assert torch.equal(out, near.run(attend).nan_to_num())
