"""Activations in e4m3, each token with its own scale. Meaning: `kernels.reference`."""

import torch
import triton
import triton.language as tl

from kernels.gpu import launch
from kernels.gpu.rows import row_tile
from kernels.reference import FP8, FP8_MAX

_FP8_MAX = tl.constexpr(FP8_MAX)


@triton.jit
def _quantize_kernel(out, scales, x, x_stride, DIM: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    mask = columns < DIM
    value = tl.load(x + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    scale = tl.where(largest > 0, largest / _FP8_MAX, 1.0)
    scaled = value / scale
    # Division rounds, and may pass the limit. A NaN is neither above nor below: it stays one.
    scaled = tl.where(scaled > _FP8_MAX, _FP8_MAX, scaled)
    scaled = tl.where(scaled < -_FP8_MAX, -_FP8_MAX, scaled)
    tl.store(scales + token, scale)
    tl.store(out + token * DIM + columns, scaled.to(out.dtype.element_ty), mask=mask)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and float32 scales, [T, dim] and [T, 1], with value * scale near x.

    x: [T, dim], rows contiguous.   Grid: a program per token.   Bound by bytes: x read once, half
    as much written.   Needs compute capability 8.9.
    """
    assert x.stride(1) == 1
    assert launch.capability(x.device) >= 89
    tokens, dim = x.shape
    out = torch.empty(tokens, dim, dtype=FP8, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    tile, warps = row_tile(dim)
    _quantize_kernel[(tokens,)](out, scales, x, x.stride(0), DIM=dim, TILE=tile, num_warps=warps)
    return out, scales
