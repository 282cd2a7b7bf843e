"""The product with weights in few bits is as exact as torch's with these weights in its dtype."""

import pytest
import torch
from torch.nn.functional import linear

from kernels import reference
from kernels.gpu import quantized
from kernels.gpu.quantized import multiply_quantized
from kernels.packed import COLUMNS, pack
from kernels.quantized import Rounding
from tests.kernels.far_rows import far_rows
from tests.kernels.lora_cases import assert_loses_no_more, randn
from tests.kernels.quantized_cases import ROUNDINGS, random_weight
from tests.soak import soak


@pytest.fixture(autouse=True)
def empty_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(
    rounding, tokens, out_features, in_features, dtype, *, has_bias=False, scale_dtype=torch.float16
):
    """Compare with float64, in which `linear` with the weights rounded to `dtype` loses more."""
    weight = random_weight(rounding, out_features, in_features, scale_dtype=scale_dtype)
    wide = torch.full((tokens, in_features + 7), torch.nan, dtype=dtype)
    x = wide[:, :in_features]
    x.copy_(randn(tokens, in_features, dtype=dtype))
    bias = randn(out_features, dtype=dtype, seed=2) if has_bias else None
    found = multiply_quantized(x, pack(weight), bias)
    dense, wide_bias = weight.dequantize(), None if bias is None else bias.double()
    exact = linear(x.double(), dense.double(), wide_bias)
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    assert_loses_no_more(found, linear(x, dense.to(dtype), bias), exact)
    meant = reference.multiply_quantized(x, pack(weight), bias)
    assert_loses_no_more(meant, linear(x, dense.to(dtype), bias), exact)


@pytest.mark.parametrize("tokens", [3, 257])
@pytest.mark.parametrize(
    ("rounding", "dtype"),
    [
        *((rounding, torch.float16) for rounding in ROUNDINGS),
        (ROUNDINGS[1], torch.float32),
        *soak(*((rounding, torch.float32) for rounding in ROUNDINGS if rounding != ROUNDINGS[1])),
    ],
    ids=str,
)
def test_every_rounding_is_multiplied(rounding, dtype, tokens):
    check(rounding, tokens, 5, rounding.group_size or 77, dtype)


@pytest.mark.parametrize("tokens", [3, 257])
@pytest.mark.parametrize("rounding", [Rounding(4, 32), Rounding(4, 64, has_zeros=True)], ids=str)
def test_scales_that_float16_does_not_hold_are_exact(rounding, tokens):
    check(rounding, tokens, 5, 192, torch.float32, scale_dtype=torch.float32)


@pytest.mark.parametrize("rounding", [Rounding(4, 96, has_zeros=True), Rounding(8)], ids=str)
def test_many_tokens_are_multiplied_by_the_reference_weights_part_by_part(rounding, monkeypatch):
    # The padding of the outputs is more than the last part.
    monkeypatch.setattr(quantized, "_SCRATCH_BYTES", 2 * 300 * 4 * COLUMNS)
    weight = pack(random_weight(rounding, 450, 288))
    x, bias = randn(300, 288), randn(450, seed=2)
    found = multiply_quantized(x, weight, bias)
    assert torch.equal(found, reference.multiply_quantized(x, weight, bias))


@pytest.mark.parametrize("tokens", [1, 33, 256, 300, *soak(7, 133)])
@pytest.mark.parametrize(
    ("rounding", "out_features", "in_features"),
    [
        (Rounding(4, 32), 133, 160),
        (Rounding(4, 128, has_zeros=True), 1, 256),
        (Rounding(8), 129, 63),
        (Rounding(8, 32, has_zeros=True), 7, 96),
    ],
    ids=str,
)
def test_any_number_of_tokens_and_widths_are_multiplied(
    tokens, rounding, out_features, in_features
):
    check(rounding, tokens, out_features, in_features, torch.float16, has_bias=True)


@pytest.mark.parametrize(("in_features", "has_bias"), [(64, False), (192, True), (600, True)])
def test_inputs_are_split_and_summed(in_features, has_bias):
    check(Rounding(8), 2, 9, in_features, torch.float32, has_bias=has_bias)


def test_a_row_of_few_has_the_same_bits_whoever_is_beside_it():
    weight, x = pack(random_weight(Rounding(4, 32), 33, 512)), randn(16, 512, dtype=torch.float16)
    together = multiply_quantized(x, weight)
    for count in (1, 2, 7, 15):
        assert torch.equal(multiply_quantized(x[:count], weight), together[:count])


# The interpreter computes with numpy, which warns about NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
def test_a_bad_number_is_seen_in_no_other_row():
    weight, x = pack(random_weight(Rounding(8), 5, 70)), randn(5, 70)
    clean = multiply_quantized(x, weight)
    x[1, 3], x[3, 8] = torch.nan, torch.inf
    found = multiply_quantized(x, weight)
    assert torch.equal(found[::2], clean[::2])
    assert found[1].isnan().all()


def test_rows_past_32_bits_are_their_own():
    weight = pack(random_weight(Rounding(4, 32), 5, 64))
    x = far_rows(3, 64, torch.float16)
    x[:] = randn(3, 64, dtype=torch.float16)
    near = multiply_quantized(x.contiguous(), weight)
    assert torch.equal(multiply_quantized(x, weight), near)
