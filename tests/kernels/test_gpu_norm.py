"""RMSNorm of `kernels.gpu` against float64, allowing for torch's own rounding."""

import math

import pytest
import torch

from kernels import reference
from kernels.gpu.norm import add_rms_norm, rms_norm
from tests.kernels.far_rows import far_rows

EPS = 1e-5
# The interpreter computes with numpy, which warns about the NaN and overflows of these tests.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def inside(x, by=3):
    """The same numbers as a part of wider rows that are NaN elsewhere."""
    wide = torch.full((len(x) + 2, x.shape[1] + 2 * by), torch.nan, dtype=x.dtype)
    wide[1:-1, by:-by] = x
    return wide[1:-1, by:-by]


def exact_norm(x, weight):
    wide = x.double()
    return weight.double() * wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()


def assert_near(ours, same_dtype, exact):
    lost = (same_dtype.double() - exact).abs().max()
    # The interpreter's stores truncate to bfloat16.
    slack = 2 if ours.dtype != torch.bfloat16 else 4
    eps = torch.finfo(ours.dtype).eps * exact.abs().max()
    assert (ours.double() - exact).abs().max() <= slack * lost + eps


def test_weights_may_have_more_bits_than_what_they_multiply():
    x, weight = random(3, 77, dtype=torch.float16), random(77, dtype=torch.float32, seed=1)
    ours, wanted = rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)
    assert ours.dtype == wanted.dtype == x.dtype
    assert_near(ours, exact_norm(x, weight).to(x.dtype), exact_norm(x, weight))
    assert_near(wanted, exact_norm(x, weight).to(x.dtype), exact_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (3, 7), (7, 576), (2, 4096), (2, 9001)])
def test_rms_norm_is_its_formula(dtype, tokens, dim):
    x, weight = random(tokens, dim, dtype=dtype), random(dim, dtype=dtype, seed=1)
    ours = rms_norm(inside(x), weight, EPS)
    assert_near(ours, reference.rms_norm(x, weight, EPS), exact_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 7), (33, 33), (2, 2048)])
def test_the_sum_is_kept_and_its_norm_given_back(dtype, tokens, dim):
    residual, x = random(tokens, dim, dtype=dtype), random(tokens, dim, dtype=dtype, seed=1)
    weight = random(dim, dtype=dtype, seed=2)
    same_dtype = residual.clone()
    wanted = reference.add_rms_norm(same_dtype, x, weight, EPS)
    ours, exact = inside(residual), residual.double() + x.double()
    norm = add_rms_norm(ours, inside(x), weight, EPS)
    assert_near(ours, same_dtype, exact)
    assert_near(norm, wanted, exact_norm(exact, weight))


def test_the_quotient_is_rounded_before_the_weight_is_applied():
    x, weight = random(9, 65, dtype=torch.float16), random(65, dtype=torch.float16, seed=1)
    ours, wanted = rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)
    # With only one rounding, 14 % would differ.
    assert (ours != wanted).float().mean() < 0.02


def test_a_norm_of_zeros_is_zero():
    x = torch.zeros(2, 33)
    assert torch.equal(rms_norm(x, torch.ones(33), EPS), x)


@NUMPY_WARNS
def test_tokens_whose_sum_is_not_finite_are_marked_and_no_others():
    residual, x = torch.zeros(6, 33), random(6, 33, dtype=torch.float32)
    x[1, 0], x[2, 32], x[4, 7] = math.nan, math.inf, -math.inf
    finite = torch.tensor([1, 1, 1, 0, 1, 7], dtype=torch.int32)
    add_rms_norm(residual, x, torch.ones(33), EPS, finite)
    assert finite.tolist() == [1, 0, 0, 0, 0, 7]


@NUMPY_WARNS
def test_a_sum_that_overflows_in_half_precision_is_marked():
    big = torch.full((2, 7), 60000.0, dtype=torch.float16)
    big[1] = 1.0
    finite = torch.ones(2, dtype=torch.int32)
    add_rms_norm(big, big.clone(), torch.ones(7, dtype=torch.float16), EPS, finite)
    assert finite.tolist() == [0, 1]


def test_a_row_is_the_same_whoever_its_neighbours_are():
    x, weight = random(5, 577, dtype=torch.float32), random(577, dtype=torch.float32, seed=1)
    together = rms_norm(x, weight, EPS)
    alone = torch.cat([rms_norm(row[None], weight, EPS) for row in x])
    assert torch.equal(together, alone)


def test_rows_past_32_bits_are_their_own():
    x = random(5, 9, dtype=torch.float16)
    residual, added = far_rows(5, 9, torch.float16), far_rows(5, 9, torch.float16)
    residual[:], added[:] = x, x
    weight = torch.ones(9, dtype=torch.float16)
    wanted = reference.add_rms_norm(x.clone(), x, weight, EPS)
    assert torch.allclose(add_rms_norm(residual, added, weight, EPS), wanted, atol=1e-3)
    assert torch.equal(residual, x + x)
    assert torch.allclose(rms_norm(added, weight, EPS), wanted, atol=1e-3)
