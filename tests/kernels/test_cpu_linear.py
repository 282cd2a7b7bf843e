import pytest
import torch
from torch.nn.functional import linear

from kernels.cpu.errors import Unavailable
from kernels.cpu.linear import FLOAT32, INT8, Library, LinearMaker, holds_eight_bits
from kernels.quantized import Rounding, quantize

SHAPES = [(17, 35), (131, 67), (192, 64), (96, 1536)]
SIZES = (0, 1, 2, 7, 33, 64, 65, 128, 200)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(libraries, shape, is_invariant=True, bias=True):
    weight = randn(*shape) / shape[1] ** 0.5
    given = randn(shape[0], seed=1) if bias else None
    maker = LinearMaker(is_invariant=is_invariant, libraries=libraries, int8=libraries)
    is_int8 = libraries == INT8
    return maker(quantize(weight, Rounding(8)) if is_int8 else weight, given), weight, given


# ---- the libraries of this machine ----


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("library", FLOAT32, ids=lambda library: library.name)
def test_every_library_means_the_same(library, is_invariant, bias):
    for shape in SHAPES:
        layer, weight, given = make((library,), shape, is_invariant, bias)
        for num_rows in SIZES:
            x = randn(num_rows, shape[1], seed=2)
            exact = linear(x.double(), weight.double(), None if given is None else given.double())
            lost = (linear(x, weight, given) - exact).norm()
            assert (layer(x) - exact).norm() <= 4 * lost + 1e-6 * exact.norm()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("library", [*FLOAT32, *INT8], ids=lambda library: library.name)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows_and_its_place(library):
    for shape in SHAPES:
        layer, _, _ = make((library,), shape)
        rows = randn(200, shape[1], seed=3)
        expected = layer(rows)
        for num_rows in SIZES:
            for first in (0, 1, 71):
                part = slice(first, first + num_rows)
                assert torch.equal(layer(rows[part].clone()), expected[part])


# ---- 8 bits ----


@pytest.mark.parametrize("shape", SHAPES)
def test_no_neighbour_changes_a_row_of_int8(shape):
    layer, _, _ = make(INT8, shape, is_invariant=False)
    rows = randn(64, shape[1], seed=4)
    alone = torch.cat([layer(row[None]) for row in rows])
    outliers = rows.clone()
    outliers[1::2] *= 1000
    outliers[1, 0], outliers[3, 0], outliers[5] = torch.nan, torch.inf, 0.0
    for found in (layer(rows)[::2], layer(outliers)[::2]):
        assert torch.equal(found, alone[::2])
    assert not layer(outliers)[[1, 3]].isfinite().any()


def loss_of_rounding(x, weight, bias, row_steps):
    """Loss of the products, in float64, by rounding weights to 127 steps, rows to `row_steps`."""
    steps = weight.abs().amax(1, keepdim=True) / 127, x.abs().amax(1, keepdim=True) / row_steps
    rounded = [
        (t / s.clamp(min=1e-30)).round() * s for t, s in zip((weight, x), steps, strict=True)
    ]
    ideal = linear(rounded[1].double(), rounded[0].double(), bias.double())
    return (ideal - linear(x.double(), weight.double(), bias.double())).norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [8, 7])
def test_int8_loses_what_its_bits_lose(shape, bits, monkeypatch):
    """Rows have 7 bits where the processor cannot add products of 8."""
    if bits == 7:
        monkeypatch.setattr("kernels.cpu.linear.holds_eight_bits", lambda: False)
    elif not holds_eight_bits():
        pytest.skip("this processor cannot add products of 8 bits")
    layer, weight, bias = make(INT8, shape)
    x = randn(40, shape[1], seed=5)
    x[3] = 0.0
    found = (layer(x) - linear(x.double(), weight.double(), bias.double())).norm()
    ideal = loss_of_rounding(x, weight, bias, row_steps=127 if bits == 8 else 63)
    assert 0.5 * ideal <= found <= 1.2 * ideal


@pytest.mark.parametrize("rounding", [Rounding(4, 32), Rounding(8, 32), Rounding(8, None, True)])
def test_other_roundings_become_float32(rounding):
    weight, x = quantize(randn(30, 64), rounding), randn(3, 64, seed=2)
    maker = LinearMaker(is_invariant=False, libraries=FLOAT32[-1:], int8=())
    assert torch.equal(maker(weight, None)(x), linear(x, weight.dequantize()))


# ---- libraries that fail the checks ----


def wrong(weight, bias):
    return lambda x: linear(x, weight.flip(0), bias)


def nan(weight, bias):
    return lambda x: linear(x, weight, bias) * torch.nan


def wrong_when_many(weight, bias):
    return lambda x: linear(x, weight, bias) + (len(x) > 8)


def missing(weight, bias):
    return torch.ops.mkldnn._no_such_operation(weight)


def uneven(least_rows):
    """Make layers that have other bits below `least_rows` rows."""

    def make(weight, bias):
        return lambda x: (
            linear(x.double(), weight.double()).float()
            * (1.0 if len(x) >= least_rows else 1.0 + 2**-20)
        )

    return make


def uneven_at_the_end(weight, bias):
    def multiply(x):
        y = linear(x.double(), weight.double()).float()
        y[-1] *= 1.0 + 2**-20
        return y

    return multiply


@pytest.mark.parametrize("broken", [wrong, nan, wrong_when_many, missing])
def test_what_is_wrong_or_missing_is_passed_over(broken):
    maker = LinearMaker(libraries=(Library("broken", broken), FLOAT32[-1]), is_invariant=False)
    weight, x = randn(30, 17), randn(3, 17)
    assert torch.equal(maker(weight, None)(x), linear(x, weight))
    assert maker.names == {"torch"}


@pytest.mark.parametrize("broken", [uneven_at_the_end, uneven(40), uneven(128)])
def test_what_is_not_invariant_is_refused_by_name_where_that_is_asked_for(broken):
    libraries = (Library("odd", broken),)
    LinearMaker(libraries=libraries, is_invariant=False)(randn(30, 17), None)
    with pytest.raises(Unavailable, match=r"linear layers of 30 x 17: odd: a row's bits depend"):
        LinearMaker(libraries=libraries, is_invariant=True)(randn(30, 17), None)


@pytest.mark.parametrize("least_rows", [2, 4, 32])
def test_few_rows_are_filled_up_to_as_many_as_a_library_wants(least_rows):
    maker = LinearMaker(libraries=(Library("odd", uneven(least_rows)),), is_invariant=True)
    layer, row = maker(randn(30, 17), None), randn(1, 17, seed=6)
    found = [layer(row.expand(n, -1))[n - 1] for n in (1, 2, 31, 32, 70, 300)]
    assert all(torch.equal(f, found[0]) for f in found)


def test_a_shape_is_checked_once():
    seen = []

    def counting(weight, bias):
        def multiply(x):
            seen.append(len(x))
            return linear(x, weight, bias)

        return multiply

    maker = LinearMaker(libraries=(Library("counting", counting),), is_invariant=False)
    maker(randn(30, 17), None)
    num_tried = len(seen)
    maker(randn(30, 17, seed=1), None)
    assert len(seen) == num_tried > 0
    maker(randn(17, 30), None)
    assert len(seen) == 2 * num_tried
