"""The embedding of tokens that the host may not know yet. Reference: `kernels.reference`."""

import torch
import triton
import triton.language as tl

from kernels.gpu.rows import row_tile


# Ids lie in a step's packed input, at any address.
@triton.jit(do_not_specialize_on_alignment=["input_ids", "sources", "previous"])
def _embed_kernel(
    out, table, input_ids, sources, previous, table_stride, DIM: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    source = tl.load(sources + token)
    known = tl.load(input_ids + token)
    chosen = tl.load(previous + source.to(tl.int64), mask=source >= 0, other=0)
    entry = tl.maximum(tl.where(source >= 0, chosen, known), 0).to(tl.int64)
    mask = columns < DIM
    value = tl.load(table + entry * table_stride + columns, mask=mask, other=0.0)
    tl.store(out + token * DIM + columns, value, mask=mask)


def embed(
    table: torch.Tensor, input_ids: torch.Tensor, sources: torch.Tensor, previous: torch.Tensor
) -> torch.Tensor:
    """Rows of the embedding, [T, hidden]: of previous[sources[t]] if sources[t] >= 0, else of
    input_ids[t].

    table: [vocab, hidden], rows contiguous.   input_ids, sources: [T] int32.   previous: [..]
    int32.   Grid: a program per token.   Bound by bytes, at few tokens by two dependent loads.
    """
    assert table.stride(1) == 1
    hidden = table.shape[1]
    out = table.new_empty(len(input_ids), hidden)
    tile, warps = row_tile(hidden)
    _embed_kernel[(len(input_ids),)](
        out, table, input_ids, sources, previous, table.stride(0),
        DIM=hidden, TILE=tile, num_warps=warps,
    )  # fmt: skip
    return out
