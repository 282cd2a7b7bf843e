"""The gated activation in Triton's interpreter, against `kernels.reference` and float64."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import gelu, silu

from kernels import reference
from kernels.gpu import activation, lora
from kernels.work import Site
from tests.kernels.lora_cases import (
    MIXES,
    LoRACase,
    assert_loses_no_more,
    make_case,
    randn,
    rank_patterns,
)
from tests.kernels.lora_mixes import MIXES_AND_DTYPES

# 136 columns need a second tile, which is mostly empty.
SITE = Site(layer=1, projections=(4, 5), in_features=72, out_features=(136, 136))


@pytest.fixture(autouse=True)
def empty_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case_for(slots: list[int], dtype: torch.dtype, block_rows: int = 16) -> LoRACase:
    features = {4: (72, 136), 5: (72, 136)}
    return make_case(rank_patterns(), slots, features, dtype, block_rows=block_rows)


def inputs(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate and up, the input that they are projections of)"""
    return randn(num_tokens, 272, dtype=dtype, seed=2), randn(num_tokens, 72, dtype=dtype)


def exact(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 8), (7, 1032), (33, 40)])
def test_it_loses_no_more_than_torch(num_tokens, width, dtype):
    gate_up = randn(num_tokens, 2 * width, dtype=dtype) * 3
    ours, torchs = activation.silu_mul(gate_up), reference.silu_mul(gate_up)
    # The interpreter truncates to bfloat16.
    factor = 4 if dtype == torch.bfloat16 else 2
    assert_loses_no_more(ours, torchs, exact(gate_up), factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_other_activation_is_its_formula_with_adapters_and_without(dtype):
    gate_up = randn(7, 80, dtype=dtype) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gelu(gate, approximate="tanh") * up
    assert_loses_no_more(activation.gelu_mul(gate_up), reference.gelu_mul(gate_up), expected)
    case = case_for([0, 0, 1, -1, 2, 3, 3], torch.float32)
    gate_up, x = inputs(7, torch.float32)
    ours = activation.gelu_mul(gate_up, lora.shrink(x, case.work, SITE))
    wanted = reference.gelu_mul(gate_up, reference.shrink(x, case.work, SITE))
    assert torch.allclose(ours, wanted, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_gates_do_not_overflow(dtype):
    gate_up = torch.tensor([[-3e4, -100.0, 100.0, 3e4, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    assert torch.equal(activation.silu_mul(gate_up), reference.silu_mul(gate_up))


@MIXES_AND_DTYPES
def test_what_adapters_add_is_added_before(mix, dtype):
    slots = MIXES[mix]
    case = case_for(slots, dtype)
    gate_up, x = inputs(len(slots), dtype)
    ours = activation.silu_mul(gate_up, lora.shrink(x, case.work, SITE))
    torchs = reference.silu_mul(gate_up, reference.shrink(x, case.work, SITE))
    assert_loses_no_more(ours, torchs, exact(case.exact(gate_up, x, SITE)))


def test_blocks_of_64_rows_mean_the_same():
    slots = [1] * 70 + [-1] * 2 + [2] * 5
    case = case_for(slots, torch.float16, block_rows=64)
    gate_up, x = inputs(len(slots), torch.float16)
    ours = activation.silu_mul(gate_up, lora.shrink(x, case.work, SITE))
    torchs = reference.silu_mul(gate_up, reference.shrink(x, case.work, SITE))
    assert_loses_no_more(ours, torchs, exact(case.exact(gate_up, x, SITE)))


def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    slots = [0] * 3 + [1] * 18 + [-1]
    gate_up, x = inputs(len(slots), torch.float16)
    case = case_for(slots, torch.float16)
    together = activation.silu_mul(gate_up, lora.shrink(x, case.work, SITE))
    for token in (1, 4, 20, 21):
        rows = slice(token, token + 1)
        alone = case_for(slots[rows], torch.float16)
        delta = lora.shrink(x[rows], alone.work, SITE)
        assert torch.equal(activation.silu_mul(gate_up[rows], delta), together[rows])


def test_tokens_of_the_base_model_get_what_they_get_without_adapters():
    slots = MIXES["with base rows"]
    gate_up, x = inputs(len(slots), torch.float16)
    case = case_for(slots, torch.float16)
    ours = activation.silu_mul(gate_up, lora.shrink(x, case.work, SITE))
    base = torch.tensor(slots) < 0
    assert torch.equal(ours[base], activation.silu_mul(gate_up)[base])


def test_rows_may_lie_apart():
    slots = [1] * 3
    case = case_for(slots, torch.float16)
    gate_up, x = inputs(3, torch.float16)
    wide = gate_up.new_full((3, 280), torch.nan)
    wide[:, :272] = gate_up
    delta = lora.shrink(x, case.work, SITE)
    assert torch.equal(activation.silu_mul(wide[:, :272]), activation.silu_mul(gate_up))
    expected = activation.silu_mul(gate_up, delta)
    assert torch.equal(activation.silu_mul(wide[:, :272], delta), expected)
