"""FP8 weights: the precision that they lose, and tokens that do not depend on their neighbours."""

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.gpu.linear import DenseLinear, fuse
from kernels import reference

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def numbers():
    torch.manual_seed(4)
    torch.set_num_threads(1)


def make(outs, biases, quantization):
    weights = [torch.randn(out, 64) / 8 for out in outs]
    given = [torch.randn(out) if has else None for out, has in zip(outs, biases, strict=True)]
    return weights, given, fuse(weights, given, CPU, quantization, reference)


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
    linear, x = fuse([weight], [None], CPU, "fp8", reference), torch.randn(4, 64)
    lost = (linear(x) - x @ weight.T).abs().amax(0) / (x @ weight.T).abs().amax(0)
    assert lost.max() < 0.2


@pytest.mark.parametrize(("out_dim", "in_dim"), [(40, 64), (64, 40)])
def test_widths_that_no_fp8_product_takes_are_named(out_dim, in_dim):
    weight = torch.randn(out_dim, in_dim)
    with pytest.raises(UnsupportedModel, match=f"{in_dim} to {out_dim}.*tensor_parallel_size"):
        fuse([weight], [None], CPU, "fp8", reference)
