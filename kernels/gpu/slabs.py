"""Copies of slabs by their ids. Reference: `kernels.reference`."""

import torch
import triton
import triton.language as tl

_PIECE_WORDS = 8192
_WARPS = 8
"""A piece is 32 KiB, copied by 256 threads: each has eight loads of 16 bytes in flight."""


# Ids lie in a step's packed input, at any address.
@triton.jit(do_not_specialize_on_alignment=["target_ids", "source_ids"])
def _copy_kernel(
    target,
    target_ids,
    source,
    source_ids,
    target_stride,
    source_stride,
    WORDS: tl.constexpr,
    PIECE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    to = tl.load(target_ids + index).to(tl.int64) * target_stride
    start = tl.load(source_ids + index).to(tl.int64) * source_stride
    mask = words < WORDS
    tl.store(target + to + words, tl.load(source + start + words, mask=mask, other=0), mask=mask)


def copy_slabs(
    target: torch.Tensor, target_ids: torch.Tensor, source: torch.Tensor, source_ids: torch.Tensor
) -> None:
    """target[target_ids[i]] = source[source_ids[i]].

    target, source: [slabs, slab_bytes] uint8, slab_bytes a multiple of 16; either may be pinned
    host memory. If both are the same memory, no slab may be both read and written.
    Ids: [n] int32, those of the target distinct.   Grid: (n, pieces of a slab).   Bound by bytes:
    of memory, or of PCIe.
    """
    num_words, rest = divmod(source.shape[1], 4)
    assert rest == 0
    assert target.shape[1] == source.shape[1]
    words = target.view(torch.int32), source.view(torch.int32)
    grid = (len(target_ids), triton.cdiv(num_words, _PIECE_WORDS))
    _copy_kernel[grid](
        words[0], target_ids, words[1], source_ids, words[0].stride(0), words[1].stride(0),
        WORDS=num_words, PIECE=_PIECE_WORDS, num_warps=_WARPS,
    )  # fmt: skip
