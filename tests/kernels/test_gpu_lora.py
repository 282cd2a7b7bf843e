"""Shrink and expand in Triton's interpreter, against `kernels.reference` and float64."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.gpu import lora
from kernels.work import Delta, Site
from tests.kernels.lora_cases import (
    MIXES,
    LoRACase,
    assert_loses_no_more,
    make_case,
    randn,
    rank_patterns,
    reference_expanded,
)
from tests.kernels.lora_mixes import MIXES_AND_DTYPES

# 584 features have a second chunk, much shorter than the first, and no whole number of steps.
QKV = Site(layer=1, projections=(0, 1, 2), in_features=584, out_features=(136, 40, 40))
DOWN = Site(layer=0, projections=(6,), in_features=72, out_features=(48,))


@pytest.fixture(autouse=True)
def empty_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case_for(site: Site, slots: list[int], dtype: torch.dtype, block_rows: int = 16) -> LoRACase:
    features = {
        projection: (site.in_features, width)
        for projection, width in zip(site.projections, site.out_features, strict=True)
    }
    return make_case(rank_patterns(), slots, features, dtype, block_rows=block_rows)


def inputs(site: Site, slots: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, x)"""
    y = randn(len(slots), sum(site.out_features), dtype=dtype, seed=2)
    return y, randn(len(slots), site.in_features, dtype=dtype)


def expanded(y: torch.Tensor, x: torch.Tensor, case: LoRACase, site: Site) -> torch.Tensor:
    y = y.clone()
    lora.expand(y, lora.shrink(x, case.work, site))
    return y


@MIXES_AND_DTYPES
def test_planes_are_those_of_the_reference_and_nothing_else_is_written(mix, dtype):
    case = case_for(QKV, MIXES[mix], dtype)
    _, x = inputs(QKV, MIXES[mix], dtype)
    ours = lora.shrink(x, case.work, QKV).planes
    torchs = reference.shrink(x, case.work, QKV).planes
    assert torch.equal(ours.isnan(), torchs.isnan())
    assert torch.allclose(ours, torchs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("site", [QKV, DOWN], ids=["three projections", "one projection"])
@MIXES_AND_DTYPES
def test_shrink_and_expand_lose_no_more_than_torch(mix, dtype, site):
    case = case_for(site, MIXES[mix], dtype)
    y, x = inputs(site, MIXES[mix], dtype)
    torchs = reference_expanded(y, x, case, site)
    ours = expanded(y, x, case, site)
    assert_loses_no_more(ours, torchs, case.exact(y, x, site))


def test_blocks_of_64_rows_mean_the_same():
    slots = [2] * 3 + [1] * 71 + [-1] + [0] * 34
    case = case_for(QKV, slots, torch.float16, block_rows=64)
    y, x = inputs(QKV, slots, torch.float16)
    torchs = reference_expanded(y, x, case, QKV)
    ours = expanded(y, x, case, QKV)
    assert_loses_no_more(ours, torchs, case.exact(y, x, QKV))


def test_summing_planes_beforehand_changes_no_bit():
    slots = [1] * 21
    case = case_for(QKV, slots, torch.float16, block_rows=64)
    # Only one feature of each chunk is set: numpy's order of sums depends on the processor.
    x = torch.zeros(len(slots), QKV.in_features, dtype=torch.float16)
    for token in range(len(slots)):
        x[token, 23 * token], x[token, 512 + 3 * token] = 0.3 + token, 1.7 - token
    large = lora.shrink(x, case.work, QKV).planes
    in_small_blocks = case_for(QKV, slots, torch.float16)
    small = lora.shrink(x, in_small_blocks.work, QKV).planes
    assert large.shape[0] == 1
    assert small.shape[0] == 2
    assert torch.equal(large[0].nan_to_num(), (small[0] + small[1]).nan_to_num())


def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    slots = [0] * 3 + [1] * 18 + [2]
    y, x = inputs(QKV, slots, torch.float16)
    together = expanded(y, x, case_for(QKV, slots, torch.float16), QKV)
    for token in (1, 4, 20, 21):
        rows = slice(token, token + 1)
        alone = case_for(QKV, slots[rows], torch.float16)
        assert torch.equal(expanded(y[rows], x[rows], alone, QKV), together[rows])


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone():
    slots = [1] * 5
    case = case_for(DOWN, slots, torch.float16)
    y, x = inputs(DOWN, slots, torch.float16)
    clean = expanded(y, x, case, DOWN)
    x[2, 7], y[3, 1] = torch.nan, torch.inf
    spoilt = expanded(y, x, case, DOWN)
    assert torch.equal(spoilt[[0, 1, 4]], clean[[0, 1, 4]])
    assert spoilt[2].isnan().all()


def test_tokens_of_the_base_model_keep_their_bits():
    slots = MIXES["with base rows"]
    case = case_for(QKV, slots, torch.float16)
    y, x = inputs(QKV, slots, torch.float16)
    y[0, 0] = torch.nan
    ours = expanded(y, x, case, QKV)
    base = torch.tensor(slots) < 0
    assert torch.equal(ours[base].nan_to_num(7.0), y[base].nan_to_num(7.0))


def test_expanding_reads_only_what_the_shrink_before_it_wrote():
    slots = [3, 0, 4, 2, 1]
    for order in (slots, slots[::-1]):
        case = case_for(QKV, order, torch.float16)
        y, x = inputs(QKV, order, torch.float16)
        planes = lora.shrink(x, case.work, QKV).planes
        assert planes.isnan().any()
        lora.expand(y, Delta(planes, case.work, QKV))
        assert y.isfinite().all()


def test_rows_of_x_and_y_may_lie_apart():
    case = case_for(DOWN, [1] * 3, torch.float16)
    y, x = inputs(DOWN, [1] * 3, torch.float16)
    wide_x, wide_y = x.new_full((3, 80), torch.nan), y.new_full((3, 64), torch.nan)
    wide_x[:, :72], wide_y[:, :48] = x, y
    lora.expand(wide_y[:, :48], lora.shrink(wide_x[:, :72], case.work, DOWN))
    assert torch.equal(wide_y[:, :48], expanded(y, x, case, DOWN))
    assert wide_y[:, 48:].isnan().all()


def test_a_tile_far_beyond_2_to_the_31_elements_is_found():
    torch.use_deterministic_algorithms(False)  # else all of the huge arena would be filled
    case = case_for(DOWN, [1] * 3, torch.float16)
    y, x = inputs(DOWN, [1] * 3, torch.float16)
    near = case.work.arena
    far = torch.empty(2**32 // near.shape[1] + 2, near.shape[1], dtype=near.dtype)
    far[-2:] = near
    moved = (len(far) - 2) * near.shape[1] * near.itemsize // 256
    expected = expanded(y, x, case, DOWN)
    for table in case.tile_tables:
        table[table >= 0] += moved
    moved_case = replace(case, work=replace(case.work, arena=far))
    assert torch.equal(expanded(y, x, moved_case, DOWN), expected)
