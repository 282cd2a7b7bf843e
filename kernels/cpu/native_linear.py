"""Linear layers in C with packed weights: gemm.c and int8.c."""

import ctypes

import torch

_COLUMNS, _INT8_COLUMNS = 48, 32
"""Outputs per panel of packed weights, in float32 and in int8."""


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
    """A `Linear` with weights and values rounded to int8: one scale per output, one per row."""

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None, threads: int
    ) -> None:
        self._library = library
        self._threads = threads
        self.out_features, self.in_features = weight.shape
        self._padded = -(-self.in_features // 4) * 4
        num_panels = -(-self.out_features // _INT8_COLUMNS)
        self._panels = torch.zeros(num_panels, self._padded, _INT8_COLUMNS, dtype=torch.int8)
        self._totals = torch.zeros(num_panels * _INT8_COLUMNS, dtype=torch.int32)
        self._scales = torch.zeros(num_panels * _INT8_COLUMNS)
        self._bias = _padded(bias, num_panels * _INT8_COLUMNS)
        library.pack_int8(
            weight.contiguous().data_ptr(), self._panels.data_ptr(), self._totals.data_ptr(),
            self._scales.data_ptr(), self.in_features, self._padded, self.out_features,
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
            y.data_ptr(), x.shape[0], self.in_features, self._threads,
        )  # fmt: skip
        return y


def _padded(bias: torch.Tensor | None, size: int) -> torch.Tensor:
    padded = torch.zeros(size)
    if bias is not None:
        padded[: len(bias)] = bias
    return padded
