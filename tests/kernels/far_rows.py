"""Rows so far apart that their offsets do not fit into 32 bits, in memory that is never touched."""

import mmap

import torch

_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE; mmap names it from Python 3.13 on


def far_rows(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] of zeros; the last row starts more than 2**31 elements after the first."""
    stride = 16 * ((1 << 31) // (16 * (rows - 1)) + 1)
    size_bytes = ((rows - 1) * stride + columns) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=dtype)
    return memory.as_strided((rows, columns), (stride, 1))
