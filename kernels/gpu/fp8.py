"""Activations in e4m3, each token with its own scale. Reference: `kernels.reference`."""

import torch
import triton
import triton.language as tl

from kernels.gpu import launch
from kernels.gpu.rows import MAX_COLUMNS, row_tile
from kernels.reference import FP8, FP8_MAX

_FP8_MAX = tl.constexpr(FP8_MAX)
_WIDE_TILE, _WIDE_WARPS = 4096, 16


@triton.jit
def _load(x, columns, DIM: tl.constexpr):
    return tl.load(x + columns, mask=columns < DIM, other=0.0).to(tl.float32)


@triton.jit
def _store(out, columns, value, scale, DIM: tl.constexpr):
    scaled = value / scale
    # Division rounds, and may exceed the limit. Both comparisons are false for NaN, so NaN stays.
    scaled = tl.where(scaled > _FP8_MAX, _FP8_MAX, scaled)
    scaled = tl.where(scaled < -_FP8_MAX, -_FP8_MAX, scaled)
    tl.store(out + columns, scaled.to(out.dtype.element_ty), mask=columns < DIM)


@triton.jit
def _quantize_kernel(out, scales, x, x_stride, DIM: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    x += token * x_stride
    out += token * DIM
    columns = tl.arange(0, TILE)
    value = _load(x, columns, DIM)
    largest = tl.abs(value)
    for start in range(TILE, DIM, TILE):
        largest = tl.maximum(largest, tl.abs(_load(x, start + columns, DIM)))
    largest = tl.max(largest, 0)
    scale = tl.where(largest > 0, largest / _FP8_MAX, 1.0)
    tl.store(scales + token, scale)
    _store(out, columns, value, scale, DIM)
    for start in range(TILE, DIM, TILE):
        _store(out, start + columns, _load(x, start + columns, DIM), scale, DIM)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and float32 scales, [T, dim] and [T, 1], with value * scale near x.

    x: [T, dim], rows contiguous.   Grid: a program per token.   Bound by bytes: x read once, half
    as much written; rows too wide for the registers are read again, from the L2 cache.   Needs
    compute capability 8.9.
    """
    assert x.stride(1) == 1
    assert launch.capability(x.device) >= 89
    tokens, dim = x.shape
    out = torch.empty(tokens, dim, dtype=FP8, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    tile, warps = row_tile(dim) if dim <= MAX_COLUMNS else (_WIDE_TILE, _WIDE_WARPS)
    _quantize_kernel[(tokens,)](out, scales, x, x.stride(0), DIM=dim, TILE=tile, num_warps=warps)
    return out, scales
