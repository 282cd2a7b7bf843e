"""The gated activations, with the LoRA expand of its inputs. Reference: `kernels.reference`."""

import torch
import triton
import triton.language as tl

from kernels.elementwise import Activation
from kernels.gpu import launch
from kernels.gpu.expansion import (
    PLANE_COLUMNS,
    ROWS_OF_SMALL_BLOCK,
    TILE_ROWS,
    add_other_pairs,
    b_start,
    dot,
    first_line,
    load_pair,
    places_of,
    rows_of,
    tile_line,
)
from kernels.work import Delta

_PLAIN_COLUMNS = 1024

_COLUMNS = tl.constexpr(128)
_WARPS = 4
_MOST_REGISTERS = {80: 96, 90: 96, 100: 96, 103: 96}
"""Registers of a thread at most, by compute capability, for blocks of 16 tokens. The compiler would
take 128, so that 4 programs fit on a multiprocessor and not 5. Elsewhere it would spill some.
"""


@triton.jit
def _gated(gate, up, GELU: tl.constexpr):
    z = gate
    if GELU:  # by tanh: (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u))
        z = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    return gate / (1.0 + tl.exp(-z)) * up


@triton.jit
def _gated_product(
    out, gate_up, row_stride, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, GELU: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < WIDTH
    at = gate_up + token * row_stride + columns
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    product = _gated(gate, up, GELU)
    tl.store(out + token * WIDTH + columns, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _look_up(blocks, tile, num_tiles, line, BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """(first token, tokens, depth, tile table, first places of gate, of up) of a tile of rows."""
    first, count, depth, table = rows_of(blocks, tile, tile < num_tiles, BLOCK_ROWS, ROWS)
    gate_0, gate_1 = places_of(tile_line(table, depth, line), depth, 0)
    up_0, up_1 = places_of(tile_line(table, depth, line + 1), depth, 0)
    return first, count, depth, table, gate_0, gate_1, up_0, up_1


@triton.jit(
    do_not_specialize=["num_tokens", "line"],
    do_not_specialize_on_alignment=["counts"],
)
def _gated_product_expand(
    out,
    gate_up,
    planes,
    arena,
    blocks,
    counts,
    num_tokens,
    row_stride,
    line,
    WIDTH: tl.constexpr,
    B_START: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    GELU: tl.constexpr,
):
    TILES: tl.constexpr = (WIDTH + _COLUMNS - 1) // _COLUMNS
    num_items = tl.load(counts) * (BLOCK_ROWS // ROWS) * TILES
    first, count, depth, table, gate_0, gate_1, up_0, up_1 = _look_up(
        blocks, tl.program_id(0) // TILES, num_items // TILES, line, BLOCK_ROWS, ROWS
    )
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = tl.cast(index, tl.int32)  # The interpreter counts in Python's integers.
        row = tl.arange(0, ROWS)
        rows, row_mask = first + row, row < count
        columns = item % TILES * _COLUMNS + tl.arange(0, _COLUMNS)
        mask = row_mask[:, None] & (columns < WIDTH)[None, :]
        at = gate_up + rows[:, None] * row_stride + columns[None, :]
        gate = tl.load(at, mask=mask, other=0.0)
        up = tl.load(at + WIDTH, mask=mask, other=0.0)
        gate_h, gate_b = load_pair(
            arena, gate_0, gate_1, planes, num_tokens, rows, row_mask,
            0, columns, WIDTH, B_START, NUM_PLANES, 2 * PLANE_COLUMNS,
        )  # fmt: skip
        up_h, up_b = load_pair(
            arena, up_0, up_1, planes, num_tokens, rows, row_mask,
            PLANE_COLUMNS, columns, WIDTH, B_START, NUM_PLANES, 2 * PLANE_COLUMNS,
        )  # fmt: skip
        own_depth, own_table = depth, table
        # The next item is looked up while these products wait for their operands.
        following = item + tl.num_programs(0)
        first, count, depth, table, gate_0, gate_1, up_0, up_1 = _look_up(
            blocks, following // TILES, num_items // TILES, line, BLOCK_ROWS, ROWS
        )
        zeros = tl.zeros((ROWS, _COLUMNS), tl.float32)
        gate_delta = add_other_pairs(
            dot(gate_h, gate_b, zeros), arena, tile_line(own_table, own_depth, line),
            own_depth, planes, num_tokens, rows, row_mask,
            0, columns, WIDTH, B_START, NUM_PLANES, 2 * PLANE_COLUMNS,
        )  # fmt: skip
        up_delta = add_other_pairs(
            dot(up_h, up_b, zeros), arena, tile_line(own_table, own_depth, line + 1),
            own_depth, planes, num_tokens, rows, row_mask,
            PLANE_COLUMNS, columns, WIDTH, B_START, NUM_PLANES, 2 * PLANE_COLUMNS,
        )  # fmt: skip
        gate = gate.to(tl.float32) + gate_delta
        up = up.to(tl.float32) + up_delta
        target = out + rows[:, None] * WIDTH + columns[None, :]
        tl.store(target, _gated(gate, up, GELU).to(out.dtype.element_ty), mask=mask)


def gated(
    gate_up: torch.Tensor, activation: Activation, delta: Delta | None = None
) -> torch.Tensor:
    """silu(gate) * up or gelu(gate) * up, [T, intermediate]; `delta` is added to gate_up first, in
    the same pass.

    gate_up: [T, 2 * intermediate], gate first.
    Grid: a program per (token, 1024 columns); with `delta` persistent over (block of tokens, 128
    columns of gate and of up). Bound by bytes: gate_up's, the result's, and B's for every block of
    tokens. Reference: `kernels.reference`.
    """
    is_gelu = activation == "gelu_tanh"
    num_tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, width))
    if delta is None:
        grid = (num_tokens, triton.cdiv(width, _PLAIN_COLUMNS))
        _gated_product[grid](
            out, gate_up, gate_up.stride(0), WIDTH=width, BLOCK_N=_PLAIN_COLUMNS, GELU=is_gelu
        )
        return out
    work, site = delta.work, delta.site
    is_small = work.block_rows <= ROWS_OF_SMALL_BLOCK
    launch.persistent(
        _gated_product_expand,
        out,
        gate_up,
        delta.planes,
        work.arena,
        work.blocks,
        work.counts,
        num_tokens,
        gate_up.stride(0),
        first_line(site),
        WIDTH=width,
        B_START=b_start(site),
        NUM_PLANES=delta.planes.shape[0],
        BLOCK_ROWS=work.block_rows,
        ROWS=min(work.block_rows, TILE_ROWS),
        GELU=is_gelu,
        num_warps=_WARPS,
        maxnreg=_MOST_REGISTERS.get(launch.capability(out.device)) if is_small else None,
    )
    return out
