"""Kernels with one known defect each, which `tests.kernels.aot` has to find."""

import torch
import triton
import triton.language as tl

TILE = 16 * 1024


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
    dtype: torch.dtype,
    *,
    m: int,
    n: int,
    k: int,
    block_k: int,
    num_warps: int,
    num_stages: int,
    grid: tuple[int, ...] = (1,),
) -> None:
    tensors = (torch.empty(size, dtype=dtype) for size in (m * n, m * k, k * n))
    launch = _matmul[grid]
    launch(*tensors, k, m, n, block_k, num_warps=num_warps, num_stages=num_stages)


def _fits(dtype: torch.dtype) -> None:
    _one_matmul(dtype, m=64, n=64, k=256, block_k=64, num_warps=4, num_stages=3)


def _spills(dtype: torch.dtype) -> None:
    _one_matmul(dtype, m=128, n=128, k=256, block_k=16, num_warps=1, num_stages=2)


def _wants_much_shared_memory(dtype: torch.dtype) -> None:
    _one_matmul(dtype, m=128, n=128, k=1024, block_k=64, num_warps=8, num_stages=6)


def _keeps_a_left_operand_in_registers(dtype: torch.dtype) -> None:
    tensors = (torch.empty(64 * 64, dtype=dtype) for _ in range(3))
    _two_matmuls[(1,)](*tensors, 64, num_warps=4)


def _loads_in_small_pieces(dtype: torch.dtype) -> None:
    _copy[(1,)](torch.empty(TILE, dtype=dtype), torch.empty(2 * TILE, dtype=dtype), 2, 1024)


def _launches_too_many(dtype: torch.dtype) -> None:
    small = {"m": 64, "n": 64, "k": 256, "block_k": 64}
    _one_matmul(dtype, **small, num_warps=4, num_stages=3, grid=(1, 65536))


TOYS = {
    "fits": _fits,
    "spills": _spills,
    "wants much shared memory": _wants_much_shared_memory,
    "keeps a left operand in registers": _keeps_a_left_operand_in_registers,
    "loads in small pieces": _loads_in_small_pieces,
    "launches too many": _launches_too_many,
}
