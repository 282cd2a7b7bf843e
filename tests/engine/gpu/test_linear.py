"""Projections in every form of weights, fused; what FP8 loses, and that tokens in it are alone."""

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.gpu.linear import DenseLinear, Linears, QuantizedLinear, may_sum_fast
from kernels import reference
from kernels.quantized import Fp8Weight, Rounding, quantize
from tests.kernels.lora_cases import assert_loses_no_more

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def numbers():
    torch.manual_seed(4)


def linears(quantization=None, dtype=torch.float32):
    return Linears(CPU, dtype, reference, quantization)


def make(outs, biases, quantization):
    weights = [torch.randn(out, 64) / 8 for out in outs]
    given = [torch.randn(out) if has else None for out, has in zip(outs, biases, strict=True)]
    return weights, given, linears(quantization).fuse(weights, given)


@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_projections_lie_side_by_side(biases, quantization):
    weights, given, fused = make((48, 16), biases, quantization)
    x = torch.randn(7, 64)
    expected = torch.cat([DenseLinear(w, b)(x) for w, b in zip(weights, given, strict=True)], dim=1)
    # Each factor of a product is off by half a step of e4m3, 1/16; the errors add up as noise.
    lost = 0.0 if quantization is None else 2 / 16 * (64**0.5) * expected.std() / 8
    assert fused(x).shape == (7, 64)
    assert (fused(x) - expected).abs().max() <= 4 * lost + 1e-5


def test_a_token_in_fp8_is_the_same_whoever_else_is_there():
    _, _, linear = make((32,), (False,), "fp8")
    x = torch.randn(9, 64)
    x[3] *= 1000  # a neighbour with a larger scale
    together = linear(x)
    for row in range(len(x)):
        assert (linear(x[row : row + 1]) - together[row]).abs().max() <= 1e-6 * x[row].abs().max()


def test_an_outputs_scale_is_its_own():
    weight = torch.randn(32, 64)
    weight[5] *= 1000
    linear, x = linears("fp8").fuse([weight], [None]), torch.randn(4, 64)
    lost = (linear(x) - x @ weight.T).abs().amax(0) / (x @ weight.T).abs().amax(0)
    assert lost.max() < 0.2


def cut(x, largest):
    """x with 13 bits of fraction below the first bit of `largest`; the rest is cut off."""
    step = torch.ldexp(torch.ones_like(largest), largest.frexp().exponent - 14)
    return (x / step).trunc() * step


def summed_by_tensor_cores(a, b):
    """a @ b.T in float64 as a Hopper sums it, 32 inputs at a time, if nothing else adds them."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for start in range(0, a.shape[1], 32):
        part = slice(start, start + 32)
        terms = torch.cat([a[:, None, part] * b[None, :, part], total[:, :, None]], dim=2)
        total = cut(terms, terms.abs().amax(2, keepdim=True)).sum(2)
        total = cut(total, total)
    return total


@pytest.mark.parametrize(
    ("in_features", "dtype"),
    [(512, torch.bfloat16), (2048, torch.bfloat16), (14336, torch.bfloat16), (512, torch.float16)],
    ids=str,
)
def test_fp8_is_summed_in_tensor_cores_alone_where_that_loses_little(in_features, dtype):
    a, b = (reference.quantize_fp8(torch.randn(24, in_features))[0].double() for _ in range(2))
    exact = a @ b.T / (448 * in_features**0.5)  # so that float16 holds it
    fast = summed_by_tensor_cores(a, b) / (448 * in_features**0.5)

    def loses_little():
        assert_loses_no_more(fast.to(dtype), exact.to(dtype), exact)

    if may_sum_fast(in_features, dtype):
        loses_little()
    else:
        with pytest.raises(AssertionError, match="is lost"):
            loses_little()


@pytest.mark.parametrize(("out_dim", "in_dim"), [(40, 64), (64, 40)])
def test_widths_that_no_fp8_product_takes_are_named(out_dim, in_dim):
    weight = torch.randn(out_dim, in_dim)
    with pytest.raises(UnsupportedModel, match=f"{in_dim} to {out_dim}.*tensor_parallel_size"):
        linears("fp8").fuse([weight], [None])


# ---- weights that are given in few bits ----

INT4, INT8 = Rounding(4, 32), Rounding(8)


def in_fp8(weight):
    return Fp8Weight(*reference.quantize_fp8(weight))


def in_form(weight, form):
    return quantize(weight, form) if isinstance(form, Rounding) else form(weight)


@pytest.mark.parametrize(
    ("forms", "parts"),
    [
        ((INT4, INT4, INT4), 1),
        ((INT8, INT8, torch.Tensor), 2),
        ((INT4, INT8, INT4), 3),
        ((in_fp8, in_fp8, INT8), 2),
    ],
    ids=["one form", "one in float", "three forms", "FP8 and 8 bits"],
)
def test_adjacent_weights_of_one_form_share_a_product(forms, parts):
    weights = [
        in_form(torch.randn(out, 64) / 8, form)
        for form, out in zip(forms, (32, 16, 16), strict=True)
    ]
    biases = [torch.randn(32), None, torch.randn(16)]
    fused, x = linears().fuse(weights, biases), torch.randn(7, 64)
    assert len(getattr(fused, "parts", [fused])) == parts
    dense = [w if isinstance(w, torch.Tensor) else w.dequantize() for w in weights]
    expected = torch.cat([DenseLinear(w, b)(x) for w, b in zip(dense, biases, strict=True)], dim=1)
    # Only FP8 rounds inputs, too: see the tests above.
    lost = 0.25 if in_fp8 in forms else 1e-5
    assert fused(x).shape == (7, 64)
    assert (fused(x) - expected).abs().max() <= lost


def test_fp8_codes_are_taken_as_they_are_given():
    given = in_fp8(torch.randn(32, 64))
    fused = linears().fuse([given, given], [None, None])
    codes = torch.cat([given.codes, given.codes])
    assert torch.equal(fused.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(fused.scale, torch.cat([given.scales, given.scales]).T)


@pytest.mark.parametrize("form", [in_fp8, Rounding(4, 8)], ids=["FP8 of odd widths", "odd groups"])
def test_a_form_that_no_product_takes_is_dequantised(form):
    given = in_form(torch.randn(33, 40), form)
    (weight, bias), x = (given, torch.randn(33)), torch.randn(3, 40)
    found = linears(dtype=torch.float16).fuse([weight], [bias.half()])
    assert isinstance(found, DenseLinear)
    assert torch.equal(found.weight, given.dequantize().half())
    assert found(x.half()).shape == (3, 33)


def test_a_quantised_weight_is_packed_and_float_weights_beside_it_are_rounded_to_fp8():
    weights = [quantize(torch.randn(32, 128), INT4), torch.randn(16, 128)]
    quantised, rounded = linears("fp8").fuse(weights, [None, None]).parts
    assert isinstance(quantised, QuantizedLinear)
    assert rounded.weight.dtype == reference.FP8
