"""Linear layers by the libraries that torch ships with, each checked before it is used.

Weights of 8 bits with a scale for each output stay what they are. No library multiplies with others
of few bits at the speed of float32, so those become float32 when the layer is made.

The packed forms are undocumented interfaces, and no library promises that a row has the same bits
for any number of rows. So every library is tested. The first one of a list whose products are
right, and invariant where that is asked for, makes all layers of a weight's shape.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, pad

from kernels.cpu.errors import Unavailable
from kernels.cpu.interface import Linear
from kernels.quantized import QuantizedWeight, Rounding, Weight, as_numbers, quantize

MakeLinear = Callable[[Weight, torch.Tensor | None], Linear]
"""weight: [out, in], bias: [out] -> their linear layer, which keeps the parts that it needs."""

_BY_OUTPUT = Rounding(8)
"""Weights of 8 bits that the libraries multiply with."""

_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 128)
"""Numbers of rows of invariant products: other numbers are split, and padded with zeros.

All sizes are tried at start, so that no product has an untried size. They are few because that
takes time: 0.5 s for a head of 49152 x 576 on one thread; every size up to 128 would take ten times
as long.
"""
_LARGE_SIZES = (128, 64)
"""Sizes that are split off first, so that 70 rows are 64 and 8, not 128."""
_MOST_FILLED = 32
"""Number of rows from which on a library must be invariant at the latest: smaller products are
padded up to where the library is.
"""
_TRIED_ROWS = (1, 33)
_LEAST_OUTPUTS = 128


@dataclass(frozen=True, slots=True)
class Library:
    """A way to make linear layers.

    tolerance: how far the products may be from torch's, as a share of the norm of torch's.
    """

    name: str
    make: Callable[[Any, torch.Tensor | None], Linear]
    tolerance: float = 1e-4


def plain(weight: Weight, bias: torch.Tensor | None) -> Linear:
    numbers = as_numbers(weight)
    return lambda x: linear(x, numbers.to(x.dtype), bias)


def _packed_by_onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


def _packed_by_mkl(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _SIZES[-1])
    # MKL reads the unpacked weight only if the number of rows is not the one that is passed.
    stand_in = weight.new_zeros(1).expand(weight.shape)
    multiply = torch.ops.mkl._mkl_linear
    return lambda x: multiply(x, packed, stand_in, bias, len(x))


def _int8(weight: QuantizedWeight, bias: torch.Tensor | None) -> Linear:
    """Linear layer with weights of 8 bits, one scale per output, and rows of 8 bits, one per row.

    The library has one scale for all rows of a product, so an outlier of one tenant would coarsen
    the numbers of all tenants. Therefore every row is divided by its own largest value, and one
    more row pins the range to [-1, 1], so that the scale does not depend on the other rows.
    """
    packed, is_short = _packed_int8(weight), not holds_eight_bits()
    pin = torch.zeros(weight.shape[1])
    pin[0], pin[1] = -1.0, 1.0
    multiply = torch.ops.quantized.linear_dynamic

    def run(x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(dim=1, keepdim=True)
        rows = x.new_empty(len(x) + 1, x.shape[1])
        torch.div(x, largest.clamp(min=torch.finfo(x.dtype).tiny), out=rows[:-1])
        # Values that are not finite must not set the range; `largest` spoils their row again below.
        rows[:-1].nan_to_num_(0.0, 0.0, 0.0)
        rows[-1] = pin
        y = multiply(rows, packed, is_short)[:-1].mul_(largest)
        return y if bias is None else y.add_(bias)

    return run


FLOAT32 = (
    # The fastest is first: 72, 106 and 105 ms for the products of a 135M model at 32 rows, 31, 57
    # and 57 at 8 (one thread, an EPYC with AVX-512).
    Library("oneDNN", _packed_by_onednn),
    Library("MKL", _packed_by_mkl),
    Library("torch", plain),
)
INT8 = (Library("torch int8", _int8, tolerance=0.1),)


class LinearMaker:
    """A `MakeLinear` by the first library that passes the checks, chosen once for every shape.

    is_invariant: a row's bits depend neither on the number of rows nor on its place among them.
    libraries: those for floating-point weights, int8: those for weights of 8 bits by output.
    names: the libraries in use.
    """

    def __init__(
        self,
        *,
        is_invariant: bool,
        libraries: Sequence[Library] = FLOAT32,
        int8: Sequence[Library] = INT8,
    ) -> None:
        self.libraries = libraries
        self.int8 = int8
        self.is_invariant = is_invariant
        self.names: set[str] = set()
        self._trusted: dict[tuple[object, ...], tuple[Library, int]] = {}

    def __call__(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Make a linear layer. Raises Unavailable if no library passes the checks."""
        is_int8 = isinstance(weight, QuantizedWeight) and weight.rounding == _BY_OUTPUT
        if not is_int8:
            weight = as_numbers(weight)
        key = (is_int8, *weight.shape, bias is not None)
        if key in self._trusted:
            library, least_rows = self._trusted[key]
            made = library.make(weight, bias)
        else:
            library, made, least_rows = self._find(
                self.int8 if is_int8 else self.libraries, weight, bias
            )
            self._trusted[key] = library, least_rows
            self.names.add(library.name)
        return _even(made, least_rows) if self.is_invariant else made

    def _find(
        self, libraries: Sequence[Library], weight: Weight, bias: torch.Tensor | None
    ) -> tuple[Library, Linear, int]:
        reasons = []
        for library in libraries:
            try:
                made = library.make(weight, bias)
                _check_products(made, as_numbers(weight), bias, library.tolerance)
                least_rows = _least_rows(made, weight.shape) if self.is_invariant else 1
                return library, made, least_rows
            except (AttributeError, RuntimeError, Unavailable) as error:
                # torch raises one of the first two for an operation that it was built without.
                reasons.append(f"{library.name}: {str(error).partition(chr(10))[0]}")
        sizes = " x ".join(map(str, weight.shape))
        raise Unavailable(f"linear layers of {sizes}: " + "; ".join(reasons))


def _check_products(
    made: Linear, weight: torch.Tensor, bias: torch.Tensor | None, tolerance: float
) -> None:
    """Raise Unavailable if the layer's products differ from torch's by more than the tolerance."""
    for num_rows in _TRIED_ROWS:
        x = _random(num_rows, weight.shape[1])
        expected, found = linear(x, weight, bias), made(x)
        # `not <=` rather than `>`, because NaN must fail, too.
        if not (found - expected).norm() <= tolerance * expected.norm():
            raise Unavailable(f"wrong products of {num_rows} rows")


def _least_rows(made: Linear, shape: torch.Size) -> int:
    """Least number of rows from which on every row has the same bits. Raises Unavailable.

    A product of one repeated row must have the same result at every place, for every size. With few
    outputs another order of sums might not show, so several rows are tried then.
    """
    least = _SIZES[0]
    for row in _random(-(-_LEAST_OUTPUTS // shape[0]), shape[1]):
        expected = made(row.repeat(_SIZES[-1], 1))[0]
        for size, larger in zip(_SIZES, (*_SIZES[1:], _SIZES[-1] + 1), strict=True):
            if not (made(row.repeat(size, 1)) == expected).all():
                least = max(least, larger)
    if least > _MOST_FILLED:
        raise Unavailable(f"a row's bits depend on the number of rows, up to {least} and more")
    return least


def _even(made: Linear, least_rows: int) -> Linear:
    """The same layer in products of _SIZES only, of at least `least_rows` rows."""
    sizes = [size for size in _SIZES if size >= least_rows]

    def run(x: torch.Tensor) -> torch.Tensor:
        pieces = [made(_filled(piece, sizes))[: len(piece)] for piece in x.split(_cut(len(x)))]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    return run


def _cut(num_rows: int) -> list[int]:
    pieces = []
    for size in _LARGE_SIZES:
        pieces += [size] * (num_rows // size)
        num_rows %= size
    return [*pieces, num_rows] if num_rows or not pieces else pieces


def _filled(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Rows padded with zeros up to the next size."""
    size = next(size for size in sizes if size >= len(x))
    return x if len(x) == size else pad(x, (0, 0, 0, size - len(x)))


def _packed_int8(weight: QuantizedWeight) -> torch.ScriptObject:
    zeros = torch.zeros(len(weight.codes), dtype=torch.int64)
    with warnings.catch_warnings():
        # torch plans to remove this form, and has no replacement that is as fast.
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(
            weight.codes, weight.scales[:, 0].contiguous(), zeros, 0
        )
    return torch.ops.quantized.linear_prepack(quantized, None)


def holds_eight_bits() -> bool:
    """Whether two products of 8 bits can be added here: without VNNI their 16-bit sum saturates.

    If they cannot, rows have 7 bits, because 2 * 127 * 127 fits into 16 bits.
    """
    packed = _packed_int8(quantize(torch.ones(16, 64), _BY_OUTPUT))
    found = torch.ops.quantized.linear_dynamic(torch.ones(2, 64), packed, False)
    return bool(((found - 64).abs() < 1).all())


def _random(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows))
