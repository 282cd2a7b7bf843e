"""Linear layers in C with packed weights: gemm.c, int8.c and int4.c."""

import ctypes

import torch

from kernels.cpu.errors import Unavailable
from kernels.quantized import QuantizedWeight

_COLUMNS = 48
"""Outputs per panel of packed float32 weights."""


class NativeLinear:
    """A `Linear` that keeps the weight only in panels of 48 outputs."""

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None, threads: int
    ) -> None:
        self._library = library
        self._threads = threads
        self.out_features, self.in_features = weight.shape
        num_panels = -(-self.out_features // _COLUMNS)
        self._panels = torch.empty(num_panels, self.in_features, _COLUMNS)
        library.pack_panels(
            weight.contiguous().data_ptr(), self._panels.data_ptr(),
            self.in_features, self.out_features,
        )  # fmt: skip
        self._bias = _padded(bias, num_panels * _COLUMNS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.out_features)
        self._library.gemm(
            x.data_ptr(), self._panels.data_ptr(), self._bias.data_ptr(),
            y.data_ptr(), x.shape[0], self.in_features, self.out_features, self._threads,
        )  # fmt: skip
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """weight[ids], to the bit.   ids: [T] int64.   Result: [T, in]."""
        y = torch.empty(len(ids), self.in_features)
        self._library.take_rows(
            self._panels.data_ptr(), ids.data_ptr(), y.data_ptr(), len(ids), self.in_features
        )
        return y


class _Int8Weights(ctypes.Structure):
    """The struct `Weights` of int8.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "totals", "scales", "bias")),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
    )


class NativeInt8Linear:
    """A `Linear` with weights of 8 bits, one scale per output, and values rounded row by row.

    Raises Unavailable if the weight has groups or zeros.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        threads: int,
    ) -> None:
        if weight.scales.shape[1] != 1 or weight.zeros is not None:
            raise Unavailable("weights of 8 bits in groups or with zeros have no C kernel")
        self._library = library
        self._threads = threads
        self.out_features, in_features = weight.shape
        self._padded = -(-in_features // 4) * 4
        columns = _columns(library)
        num_panels = -(-self.out_features // columns)
        self._panels = torch.zeros(num_panels, self._padded, columns, dtype=torch.int8)
        self._totals = torch.zeros(num_panels * columns, dtype=torch.int32)
        self._scales = _padded(weight.scales[:, 0], num_panels * columns)
        self._bias = _padded(bias, num_panels * columns)
        library.pack_int8(
            weight.codes.contiguous().data_ptr(), self._panels.data_ptr(),
            self._totals.data_ptr(), in_features, self._padded, self.out_features,
        )  # fmt: skip
        self._weights = _Int8Weights(
            self._panels.data_ptr(), self._totals.data_ptr(), self._scales.data_ptr(),
            self._bias.data_ptr(), self._padded, self.out_features,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.out_features)
        rounded = torch.empty(x.shape[0], self._padded, dtype=torch.uint8)
        scales = torch.empty(x.shape[0])
        self._library.gemm_int8(
            ctypes.byref(self._weights), x.data_ptr(), rounded.data_ptr(), scales.data_ptr(),
            y.data_ptr(), *x.shape, self._threads,
        )  # fmt: skip
        return y


class _Int4Weights(ctypes.Structure):
    """The struct `Int4Weights` of int4.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "zeros", "bias")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "group_size")),
    )


class NativeInt4Linear:
    """A `Linear` with weights of 4 bits in groups, and values rounded to int8 row by row.

    Raises Unavailable for a group size that is neither 8 nor 16 nor a multiple of 32.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        threads: int,
    ) -> None:
        group_size = weight.group_size
        if group_size % 32 and group_size not in (8, 16):
            raise Unavailable(f"weights of 4 bits in groups of {group_size} have no C kernel")
        self._library = library
        self._threads = threads
        self.out_features, self.in_features = weight.shape
        columns = _columns(library)
        num_panels = -(-self.out_features // columns)
        self._panels = torch.zeros(num_panels, self.in_features // 2, columns, dtype=torch.uint8)
        library.pack_int4(
            weight.codes.contiguous().data_ptr(), self._panels.data_ptr(),
            self.in_features, self.out_features,
        )  # fmt: skip
        self._scales = _in_panels(weight.scales, num_panels, columns)
        self._zeros = None
        if weight.zeros is not None:
            self._zeros = _in_panels(weight.zeros.int() + 8, num_panels, columns)
        self._bias = _padded(bias, num_panels * columns)
        self._weights = _Int4Weights(
            self._panels.data_ptr(), self._scales.data_ptr(),
            None if self._zeros is None else self._zeros.data_ptr(), self._bias.data_ptr(),
            self.in_features, self.out_features, group_size,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        y = torch.empty(num_rows, self.out_features)
        rounded = torch.empty(num_rows, self.in_features, dtype=torch.int8)
        scales = torch.empty(num_rows)
        sums = torch.empty(num_rows, self.in_features // 8, dtype=torch.int32)
        self._library.gemm_int4(
            ctypes.byref(self._weights), x.data_ptr(), rounded.data_ptr(), scales.data_ptr(),
            sums.data_ptr(), y.data_ptr(), num_rows, self._threads,
        )  # fmt: skip
        return y


def _columns(library: ctypes.CDLL) -> int:
    """Outputs per panel of weights of 4 and 8 bits, which depends on the processor."""
    columns: int = library.int8_columns()
    return columns


def _in_panels(values: torch.Tensor, num_panels: int, columns: int) -> torch.Tensor:
    """Values of groups in the order of panels.   values: [out, groups].

    Result: [panels, groups, columns], zeros after the last output.
    """
    padded = values.new_zeros(num_panels * columns, values.shape[1])
    padded[: len(values)] = values
    return padded.view(num_panels, columns, -1).transpose(1, 2).contiguous()


def _padded(values: torch.Tensor | None, size: int) -> torch.Tensor:
    padded = torch.zeros(size)
    if values is not None:
        padded[: len(values)] = values
    return padded
