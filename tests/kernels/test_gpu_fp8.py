"""Activations rounded to e4m3 stay near their values.

The interpreter's cast loses NaN, and the carry of values that are rounded up to a power of two: 127
gives 64, not 128. Such values are left out here.
"""

import math

import pytest
import torch

from kernels import reference
from kernels.gpu.fp8 import quantize_fp8
from tests.kernels.far_rows import far_rows

STEP = 2**-3
"""Distance between adjacent e4m3 numbers, relative to the lower one."""
SMALLEST = 2**-9


def random(tokens, dim, dtype):
    x = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(dim))
    return (x * torch.logspace(-6, 3, tokens)[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (7, 33), (3, 576), (1, 14336)])
def test_values_times_scales_are_near(dtype, tokens, dim):
    x = random(tokens, dim, dtype)
    wide = torch.full((tokens, dim + 5), torch.nan, dtype=dtype)
    wide[:, :dim] = x
    values, scales = quantize_fp8(wide[:, :dim])
    wanted_values, wanted_scales = reference.quantize_fp8(x)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, x.shape)
    exact = x.double() / wanted_scales.double()
    wanted, _ = torch.frexp(wanted_values.float())
    is_carried = (wanted.abs() == 0.5) & (exact.abs() < wanted_values.double().abs())
    assert is_carried.float().mean() < 0.2
    error = torch.where(is_carried, 0.0, values.double() - exact).abs()
    half_a_step = (exact.abs() * STEP).clamp(min=SMALLEST) / 2
    assert (error <= half_a_step * 1.001).all()


@pytest.mark.parametrize("columns", [9557, 5462])
def test_a_row_too_wide_for_one_tile_is_quantized_as_its_parts(columns):
    parts = random(6, columns, torch.bfloat16).view(2, 3, columns)
    parts[:, :, 7] = 2 * parts.abs().amax(dim=(1, 2))[:, None]  # so that they have one scale
    values, scales = quantize_fp8(parts.view(2, 3 * columns))
    of_parts, scales_of_parts = quantize_fp8(parts.view(6, columns))
    assert torch.equal(values.view(torch.uint8).view(6, columns), of_parts.view(torch.uint8))
    assert torch.equal(scales.expand(2, 3), scales_of_parts.view(2, 3))


def test_the_largest_of_a_row_is_448_and_a_row_of_zeros_has_scale_1():
    x = random(3, 33, torch.float16)
    x[1] = 0
    check_ends(x)
    wide = torch.zeros(3, 20001, dtype=torch.float16)
    wide[:, -33:] = x
    check_ends(wide)


def check_ends(x):
    values, scales = quantize_fp8(x)
    assert values.float().abs().amax(dim=1).tolist() == [448, 0, 448]
    assert scales[1].item() == 1
    assert not values[1].float().any()


# The interpreter computes with numpy, which warns about NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.parametrize("dim", [9, 16390])
def test_a_bad_number_is_seen_in_no_other_row(dim):
    x = random(5, dim, torch.float32)
    x[1, 3], x[3, 8] = math.nan, math.inf
    values, scales = quantize_fp8(x)
    alone = [quantize_fp8(row[None]) for row in x[::2]]
    assert torch.equal(values[::2].float(), torch.cat([each.float() for each, _ in alone]))
    assert torch.equal(scales[::2], torch.cat([scale for _, scale in alone]))


def test_rows_past_32_bits_are_their_own():
    x = far_rows(5, 9, torch.float16)
    x[:] = random(5, 9, torch.float16)
    values, scales = quantize_fp8(x)
    near, near_scales = quantize_fp8(x.contiguous())
    assert torch.equal(values.view(torch.uint8), near.view(torch.uint8))
    assert torch.equal(scales, near_scales)
