"""Packed products in C match their formula at odd sizes, and a row's bits depend on it only."""

import ctypes
import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch

import kernels.cpu
from kernels.cpu.bindings import Library
from kernels.cpu.errors import Unavailable
from kernels.cpu.native import NativeKernels
from kernels.cpu.native_linear import NativeInt4Linear, NativeInt8Linear
from kernels.cpu.plain import AttentionShape
from kernels.quantized import Rounding, as_numbers, quantize

SIZES = pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (3, 47), (64, 48), (67, 49), (576, 100), (1000, 257)]
)
INT8, INT4, INT4_ZEROS = Rounding(8), Rounding(4, 32), Rounding(4, 64, has_zeros=True)
ROUNDED = pytest.mark.parametrize(
    "rounding", [INT8, INT4, INT4_ZEROS], ids=["int8", "int4", "int4-zeros"]
)
KINDS = pytest.mark.parametrize(
    "rounding", [None, INT8, INT4, INT4_ZEROS], ids=["float32", "int8", "int4", "int4-zeros"]
)
MOST_ROWS = 37


def make(in_features, out_features, rounding, threads=1):
    """(layer, weight, bias)"""
    positions = torch.zeros(1, 1, 16)
    torch.manual_seed(in_features)
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
    if rounding is not None:
        weight = quantize(weight, rounding)
    try:
        kernels = NativeKernels(AttentionShape(1, 1, 32, 16, positions, positions), threads)
        return kernels.linear(weight, bias), weight, bias
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def with_vnni(tmp_path_factory):
    """The C kernels as for a processor with VNNI, whose instruction is plain C here."""
    target = tmp_path_factory.mktemp("vnni") / "kernels.so"
    sources = (Path(kernels.cpu.__file__).parent / "csrc").glob("*.c")
    command = ["cc", "-std=gnu11", "-O1", "-march=native", "-DGENERIC_DOT", "-fPIC", "-shared"]
    subprocess.run([*command, *sources, "-pthread", "-lm", "-o", target], check=True)
    return Library(target)


def rounded(x):
    """(x rounded to the steps of int8, [rows, dim]; the size of a step of each row)"""
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    return (x / scale).round(), scale


@SIZES
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, MOST_ROWS])
def test_float32_loses_no_more_than_a_sum_in_one_order_does(in_features, out_features, rows):
    layer, weight, bias = make(in_features, out_features, None)
    x = torch.randn(rows, in_features)
    expected = x.double() @ weight.double().T + bias
    in_order = bias.expand(rows, out_features).clone()
    for k in range(in_features):
        in_order += x[:, k, None] * weight[:, k]
    lost = (in_order - expected).abs().amax() if rows else 0
    assert layer(x).shape == expected.shape
    assert ((layer(x) - expected).abs() <= 2 * lost + 1e-6).all()


def check_rounded_products(layer, weight, bias, rows):
    """Check that products are those of the weight's numbers and of rows rounded to int8."""
    x = torch.randn(rows, weight.shape[1])
    whole, step = rounded(x)
    numbers = as_numbers(weight).double()
    expected = (whole.double() @ numbers.T) * step + bias
    found = layer(x)
    # A value half-way between two integers may be rounded to either of them.
    edge = 1.001 * step * numbers.abs().amax(dim=1)
    wrong = (found - expected).abs() > 1e-5 * (1 + expected.abs())
    assert wrong.float().mean() <= 0.01
    assert ((found - expected).abs() <= edge + 1e-4).all()
    if x.shape[1] >= 64:
        exact = x.double() @ numbers.T + bias
        assert (found - exact).norm() <= 0.02 * exact.norm()


@SIZES
@pytest.mark.parametrize("rows", [1, 9, MOST_ROWS])
def test_int8_is_the_product_of_what_was_rounded(in_features, out_features, rows):
    check_rounded_products(*make(in_features, out_features, INT8), rows)


GROUPS = pytest.mark.parametrize("group_size", [8, 16, 32, 64, 96, 128])


@GROUPS
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("out_features", [1, 47, 100])
def test_int4_is_the_product_of_what_was_rounded(group_size, has_zeros, out_features):
    for rows in (1, 2, 7, MOST_ROWS):
        rounding = Rounding(4, group_size, has_zeros)
        check_rounded_products(*make(3 * group_size, out_features, rounding), rows)


@ROUNDED
def test_with_vnni_products_are_the_same(with_vnni, rounding):
    layer, weight, bias = make(192, 50, rounding)
    kind = NativeInt8Linear if rounding.bits == 8 else NativeInt4Linear
    found = kind(with_vnni, weight, bias, 1)
    x = torch.randn(MOST_ROWS, 192)
    torch.testing.assert_close(found(x), layer(x), rtol=1e-5, atol=1e-4)


@pytest.fixture
def poison():
    """Memory that is freed holds other bytes at once."""
    set_option, perturb = ctypes.CDLL(None).mallopt, -6
    set_option(perturb, 0x55)
    yield
    set_option(perturb, 0)


@KINDS
def test_a_weight_whose_numbers_lie_in_another_order_is_packed_from_memory_that_is_kept(
    rounding, poison
):
    """Codes of GPTQ and AWQ are transposed views, so that what C reads is a copy of them."""
    layer, weight, _ = make(256, 512, rounding)
    numbers = weight if rounding is None else weight.codes
    view = numbers.T.contiguous().T
    other = view if rounding is None else dataclasses.replace(weight, codes=view)
    if rounding is not None and weight.zeros is not None:
        other = dataclasses.replace(other, zeros=weight.zeros.T.contiguous().T)
    kernels = NativeKernels(AttentionShape(1, 1, 32, 16, *[torch.zeros(1, 1, 16)] * 2), 1)
    x = torch.randn(3, 256)
    assert torch.equal(kernels.linear(other, None)(x), kernels.linear(weight, None)(x))


def test_addresses_are_taken_in_one_place():
    folder = Path(kernels.cpu.__file__).parent
    takes = {p.name for p in folder.rglob("*.py") if "data_ptr" in p.read_text()}
    assert takes == {"addresses.py"}


@pytest.mark.parametrize("group_size", [4, 24, 48])
def test_other_groups_have_no_kernel(with_vnni, group_size):
    weight = quantize(torch.randn(3, 96), Rounding(4, group_size))
    with pytest.raises(Unavailable, match=f"groups of {group_size}"):
        NativeInt4Linear(with_vnni, weight, None, 1)


@KINDS
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rows_bits_are_its_own(rounding, threads):
    layer, *_ = make(192, 150, rounding, threads)
    x = torch.randn(MOST_ROWS, 192)
    alone = torch.cat([layer(row[None]) for row in x])
    x[::2] *= 1000.0
    for rows in range(1, MOST_ROWS + 1):
        mine = torch.arange(1, rows, 2)
        assert torch.equal(layer(x[:rows])[mine], alone[mine])


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 63])
def test_what_is_not_finite_stays_so_in_its_row_and_only_there(rounding, bad, place):
    layer, *_ = make(64, 50, rounding)
    x = torch.randn(9, 64)
    expected = layer(x)
    x[4, place] = bad
    found = layer(x)
    assert not found[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], expected[others])


@KINDS
def test_a_row_of_zeros_is_the_bias(rounding):
    layer, _, bias = make(64, 50, rounding)
    assert torch.equal(layer(torch.zeros(3, 64)), bias.expand(3, 50))
