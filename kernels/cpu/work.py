"""Inputs of a step's CPU kernels: which positions rows attend to, and the adapters of tokens."""

from dataclasses import dataclass

import torch

from kernels.tiles import ADDRESS_UNIT_BYTES, RANK_ROWS
from kernels.work import Site

Tile = tuple[torch.Tensor, torch.Tensor]
"""Rank rows of A, [8, in], and of B, rank-major, [8, out]; rows past the rank are zero."""


@dataclass(frozen=True, slots=True)
class AdapterRuns:
    """Runs of a step's tokens that share an adapter.

    arena: [slabs, elements] in the adapters' dtype.
    bounds: [S, 2] int32, run s is tokens [first, end); runs rise and do not overlap. Tokens outside
    all runs are on the base model.
    tile_tables: S of [layers, projections, depth] int32, a tile's place in the arena in units of
    ADDRESS_UNIT_BYTES, -1 for none; a module's tiles come first.
    scales: S of [layers, projections] float32.   Tables and scales are contiguous.
    """

    arena: torch.Tensor
    bounds: torch.Tensor
    tile_tables: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]

    def tiles(self, number: int, site: Site, projection: int) -> list[Tile]:
        """Tiles of one module of a run's adapter: A's rows, [8, in], and B's, [8, out]."""
        width = site.in_features
        out_features = site.out_features[site.projections.index(projection)]
        found = []
        for address in self.tile_tables[number][site.layer, projection].tolist():
            if address < 0:
                break
            start = self.arena.storage_offset() + address * (
                ADDRESS_UNIT_BYTES // self.arena.itemsize
            )
            a = self.arena.as_strided((RANK_ROWS, width), (width, 1), start)
            b_shape = RANK_ROWS, out_features
            b = self.arena.as_strided(b_shape, (out_features, 1), start + RANK_ROWS * width)
            found.append((a, b))
        return found


@dataclass(frozen=True, slots=True)
class StepWork:
    """T tokens of B rows. Row b's tokens are [query_starts[b], query_starts[b + 1]), the last ones
    of its seq_lens[b] positions; their KV lies in the blocks from block_starts[b] on.

    positions, slots: [T] int64; a slot is block * block_size + offset, where a token's KV goes.
    query_starts, block_starts: [B + 1] int32.   seq_lens: [B] int32.   blocks: [..] int32.
    kv: [slabs, elements], the arena as KV; each implementation has its own layout of a block.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_starts: torch.Tensor
    blocks: torch.Tensor
    kv: torch.Tensor
    adapters: AdapterRuns
