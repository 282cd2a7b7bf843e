"""RMSNorm, with and without the residual sum before it. Reference: `kernels.reference`."""

import torch
import triton
import triton.language as tl

from kernels.gpu.rows import row_tile


@triton.jit(do_not_specialize_on_alignment=["finite"])
def _rms_norm_kernel(
    out,
    residual,
    x,
    weight,
    finite,
    residual_stride,
    x_stride,
    eps,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    mask = columns < DIM
    value = tl.load(x + token * x_stride + columns, mask=mask, other=0.0)
    if residual is not None:
        at = residual + token * residual_stride + columns
        before = tl.load(at, mask=mask, other=0.0)
        value = (before.to(tl.float32) + value.to(tl.float32)).to(before.dtype)
        tl.store(at, value, mask=mask)
    wide = value.to(tl.float32)
    if finite is not None:
        is_bad = tl.max((~(tl.abs(wide) < float("inf"))).to(tl.int32), 0) > 0
        tl.store(finite + token, 0, mask=is_bad)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    scaled = (wide * scale).to(weight.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * DIM + columns, (factor * scaled).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / rms(x).   x: [T, dim], rows contiguous.   Result: [T, dim].

    Grid: a program per token.   Bound by bytes: x read and the result written, once each.
    """
    return _norm(None, x, weight, eps, None)


def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    finite: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += x, in place; then weight * residual / rms(residual).   residual, x: [T, dim].

    finite: [T] int32, set to 0 where the sum is not finite, or None.   Grid: a program per token.
    Bound by bytes: two tensors read, two written, once each.
    """
    return _norm(residual, x, weight, eps, finite)


def _norm(
    residual: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    finite: torch.Tensor | None,
) -> torch.Tensor:
    tokens, dim = x.shape
    assert x.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    residual_stride = 0 if residual is None else residual.stride(0)
    out = x.new_empty(tokens, dim)
    tile, warps = row_tile(dim)
    _rms_norm_kernel[(tokens,)](
        out, residual, x, weight, finite, residual_stride, x.stride(0), eps,
        DIM=dim, TILE=tile, num_warps=warps,
    )  # fmt: skip
    return out
