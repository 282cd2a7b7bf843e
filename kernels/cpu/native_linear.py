"""Linear layers in C with packed weights: gemm.c, int8.c and int4.c."""

import ctypes

import torch

from kernels.cpu.addresses import Struct
from kernels.cpu.bindings import Library
from kernels.cpu.errors import Unavailable
from kernels.quantized import QuantizedWeight

_COLUMNS = 48
"""Outputs per panel of packed float32 weights."""


class NativeLinear:
    """A `Linear` that keeps the weight only in panels of 48 outputs."""

    def __init__(
        self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None, threads: int
    ) -> None:
        self._library = library
        self._threads = threads
        self.out_features, self.in_features = weight.shape
        num_panels = -(-self.out_features // _COLUMNS)
        self._panels = torch.empty(num_panels, self.in_features, _COLUMNS)
        library.pack_panels(weight.contiguous(), self._panels, self.in_features, self.out_features)
        self._bias = _padded(bias, num_panels * _COLUMNS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.out_features)
        self._library.gemm(
            x, self._panels, self._bias, y, x.shape[0], self.in_features, self.out_features,
            self._threads,
        )  # fmt: skip
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """weight[ids], to the bit.   ids: [T] int64.   Result: [T, in]."""
        y = torch.empty(len(ids), self.in_features)
        self._library.take_rows(self._panels, ids, y, len(ids), self.in_features)
        return y


class _Int8Weights(Struct):
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
        library: Library,
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
        columns = library.int8_columns
        num_panels = -(-self.out_features // columns)
        panels = torch.zeros(num_panels, self._padded, columns, dtype=torch.int8)
        totals = torch.zeros(num_panels * columns, dtype=torch.int32)
        scales = _padded(weight.scales[:, 0], num_panels * columns)
        bias = _padded(bias, num_panels * columns)
        codes = weight.codes.contiguous()
        library.pack_int8(codes, panels, totals, in_features, self._padded, self.out_features)
        self._weights = _Int8Weights(panels, totals, scales, bias, self._padded, self.out_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.out_features)
        rounded = torch.empty(x.shape[0], self._padded, dtype=torch.uint8)
        scales = torch.empty(x.shape[0])
        self._library.gemm_int8(
            ctypes.byref(self._weights), x, rounded, scales, y, *x.shape, self._threads
        )
        return y


class _Int4Weights(Struct):
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
        library: Library,
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
        columns = library.int8_columns
        num_panels = -(-self.out_features // columns)
        panels = torch.zeros(num_panels, self.in_features // 2, columns, dtype=torch.uint8)
        codes = weight.codes.contiguous()
        library.pack_int4(codes, panels, self.in_features, self.out_features)
        scales = _in_panels(weight.scales, num_panels, columns)
        zeros = None
        if weight.zeros is not None:
            zeros = _in_panels(weight.zeros.int() + 8, num_panels, columns)
        bias = _padded(bias, num_panels * columns)
        self._weights = _Int4Weights(
            panels, scales, zeros, bias, self.in_features, self.out_features, group_size
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        y = torch.empty(num_rows, self.out_features)
        rounded = torch.empty(num_rows, self.in_features, dtype=torch.int8)
        scales = torch.empty(num_rows)
        sums = torch.empty(num_rows, self.in_features // 8, dtype=torch.int32)
        self._library.gemm_int4(
            ctypes.byref(self._weights), x, rounded, scales, sums, y, num_rows, self._threads
        )
        return y


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
