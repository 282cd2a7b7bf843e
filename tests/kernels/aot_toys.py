"""Kernels with one known defect each, which `tests.kernels.aot` has to find."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

Toy = Callable[[torch.dtype], object]


@triton.jit
def _copy(target, source, step, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at * step))


@triton.jit
def _matmul(out, a, b, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros((M, N), tl.float32)
    for first in range(0, K, BLOCK_K):
        left = tl.load(a + m[:, None] * K + first + k[None, :])
        right = tl.load(b + (first + k[:, None]) * N + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty))


@triton.jit
def _two_matmuls(out, a, b, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    right = tl.load(b + at)
    once = tl.dot(tl.load(a + at), right)
    tl.store(out + at, tl.dot(once.to(right.dtype), right).to(out.dtype.element_ty))


def _one_matmul(
    m: int, n: int, k: int, block_k: int, num_warps: int, num_stages: int, num_launched: int = 1
) -> Toy:
    def call(dtype: torch.dtype) -> None:
        options = {"num_warps": num_warps, "num_stages": num_stages}
        _matmul[1, num_launched](*_empty(dtype, m * n, m * k, k * n), k, m, n, block_k, **options)

    return call


def _empty(dtype: torch.dtype, *sizes: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=dtype) for size in sizes]


TOYS: dict[str, Toy] = {
    "fits": _one_matmul(64, 64, 256, 64, num_warps=4, num_stages=3),
    "spills": _one_matmul(128, 128, 256, 16, num_warps=1, num_stages=2),
    "wants much shared memory": _one_matmul(128, 128, 1024, 64, num_warps=8, num_stages=6),
    "keeps a left operand in registers": lambda dtype: _two_matmuls[(1,)](
        *_empty(dtype, *[64 * 64] * 3), 64, num_warps=4
    ),
    "loads in small pieces": lambda dtype: _copy[(1,)](*_empty(dtype, 1024, 2048), 2, 1024),
    "launches too many": _one_matmul(
        64, 64, 256, 64, num_warps=4, num_stages=3, num_launched=65536
    ),
}
