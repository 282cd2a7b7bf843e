"""Packed products in C match their formula at odd sizes, and a row's bits depend on it only."""

import pytest
import torch

from kernels.cpu.errors import Unavailable
from kernels.cpu.interface import AttentionShape
from kernels.cpu.native import NativeKernels

SIZES = pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (3, 47), (64, 48), (67, 49), (576, 100), (1000, 257)]
)
KINDS = pytest.mark.parametrize("is_int8", [False, True], ids=["float32", "int8"])
MOST_ROWS = 37


def make(in_features, out_features, is_int8, threads=1):
    """(layer, weight, bias)"""
    positions = torch.zeros(1, 1, 16)
    try:
        kernels = NativeKernels(
            AttentionShape(1, 1, 32, 16, positions, positions), threads, is_int8=is_int8
        )
    except Unavailable as reason:
        pytest.skip(str(reason))
    torch.manual_seed(in_features)
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
    return kernels.linear(weight, bias), weight, bias


def rounded(x):
    """(x rounded to the steps of int8, [rows, dim]; the size of a step of each row)"""
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    return (x / scale).round(), scale


@SIZES
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, MOST_ROWS])
def test_float32_loses_no_more_than_a_sum_in_one_order_does(in_features, out_features, rows):
    layer, weight, bias = make(in_features, out_features, is_int8=False)
    x = torch.randn(rows, in_features)
    expected = x.double() @ weight.double().T + bias
    in_order = bias.expand(rows, out_features).clone()
    for k in range(in_features):
        in_order += x[:, k, None] * weight[:, k]
    lost = (in_order - expected).abs().amax() if rows else 0
    assert layer(x).shape == expected.shape
    assert ((layer(x) - expected).abs() <= 2 * lost + 1e-6).all()


@SIZES
@pytest.mark.parametrize("rows", [1, 9, MOST_ROWS])
def test_int8_is_the_product_of_what_was_rounded(in_features, out_features, rows):
    layer, weight, bias = make(in_features, out_features, is_int8=True)
    x = torch.randn(rows, in_features)
    (whole_x, step_x), (whole_w, step_w) = rounded(x), rounded(weight)
    expected = (whole_x.double() @ whole_w.double().T) * step_x * step_w.T + bias
    # A value half-way between two integers may be rounded to either of them.
    edges = 127 * step_x * step_w.T
    assert (
        (layer(x) - expected).abs() <= 1e-5 * expected.abs() + edges * (in_features > 500)
    ).all()
    exact = x.double() @ weight.double().T + bias
    if in_features >= 64:
        assert (layer(x) - exact).norm() <= 0.02 * exact.norm()


@KINDS
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_are_its_own(is_int8, threads):
    layer, *_ = make(131, 150, is_int8, threads)
    x = torch.randn(MOST_ROWS, 131)
    alone = torch.cat([layer(row[None]) for row in x])
    x[::2] *= 1000.0
    for rows in range(1, MOST_ROWS + 1):
        mine = torch.arange(1, rows, 2)
        assert torch.equal(layer(x[:rows])[mine], alone[mine])


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 66])
def test_what_is_not_finite_stays_so_in_its_row_and_only_there(is_int8, bad, place):
    layer, *_ = make(67, 50, is_int8)
    x = torch.randn(9, 67)
    expected = layer(x)
    x[4, place] = bad
    found = layer(x)
    assert not found[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], expected[others])


@KINDS
def test_a_row_of_zeros_is_the_bias(is_int8):
    layer, _, bias = make(20, 50, is_int8)
    assert torch.equal(layer(torch.zeros(3, 20)), bias.expand(3, 50))


def test_rows_of_the_packed_weight_are_the_weights_own():
    layer, weight, _ = make(33, 131, is_int8=False)
    ids = torch.tensor([0, 47, 48, 130, 5, 5])
    assert torch.equal(layer.rows(ids), weight[ids])
