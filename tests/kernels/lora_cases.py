"""Adapters in an arena, and a step's tokens on them, for tests of LoRA kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.block import BLOCK
from kernels.tiles import ADDRESS_UNIT_BYTES, RANK_ROWS
from kernels.work import PAIR_ROWS, LoRAWork, Site

Ranks = Mapping[tuple[int, int], int]
"""(layer, projection) -> rank, for the modules that the adapter has."""

NUM_LAYERS, NUM_PROJECTIONS = 2, 7

MIXES: dict[str, list[int]] = {
    "one token": [0],
    "identical": [1] * 19,
    "distinct": [3, 0, 4, 2, 1],
    "uniform": [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3,
    "zipf": [0] * 17 + [1] * 4 + [2] * 2 + [3],
    "with base rows": [-1] * 2 + [2] * 7 + [-1] + [0] * 3,
    "base rows only": [-1] * 5,
}
"""Each token's slot, -1 for the base model. The largest runs are longer than a block of 16."""


_STALE = -2
"""Slot of a block that earlier steps left behind: its addresses must not be read."""


@dataclass(frozen=True)
class Module:
    """An adapter's matrices for one projection.   a: [rank, in].   b: [rank, out]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class LoRACase:
    """Adapters in an arena and a step's work on them.

    blocks: (first token, tokens, slot), slot -1 for the base model.
    tile_tables, scales: by slot; they own the memory whose addresses are in `work`.
    """

    work: LoRAWork
    modules: list[dict[tuple[int, int], Module]]
    slots: list[int]
    blocks: list[tuple[int, int, int]]
    tile_tables: list[torch.Tensor]
    scales: list[torch.Tensor]

    def placed(self, there: torch.device) -> "LoRACase":
        """The same case with its work in a device's memory."""
        tables, scales = ([t.to(there) for t in part] for part in (self.tile_tables, self.scales))
        records = [_record(block, tables, scales) for block in self.blocks]
        work = replace(
            self.work,
            arena=self.work.arena.to(there),
            blocks=torch.from_numpy(np.array(records, BLOCK).view(np.int32)).view(-1, 8).to(there),
            pairs=self.work.pairs.to(there),
            counts=self.work.counts.to(there),
        )
        return replace(self, work=work, tile_tables=tables, scales=scales)

    def exact(self, y: torch.Tensor, x: torch.Tensor, site: Site) -> torch.Tensor:
        """The sum of `added` in float64, without rounding in between."""
        return self.added(y.double(), x.double(), site)

    def added(self, y: torch.Tensor, x: torch.Tensor, site: Site) -> torch.Tensor:
        """y + scale * x @ A.T @ B in the dtype of x and y, token by token."""
        total = y.clone()
        for token, slot in enumerate(self.slots):
            parts = total[token].split(site.out_features)
            for projection, part in zip(site.projections, parts, strict=True):
                module = self.modules[slot].get((site.layer, projection)) if slot >= 0 else None
                if module is not None:
                    h = x[token] @ module.a.to(x.dtype).T * module.scale
                    part += h @ module.b.to(x.dtype)
        return total


def rank_patterns() -> list[Ranks]:
    """Ranks of five adapters: even and odd ones, patterns, missing projections, missing layers."""
    everywhere = [(layer, p) for layer in range(NUM_LAYERS) for p in range(NUM_PROJECTIONS)]
    last = NUM_LAYERS - 1
    return [
        dict.fromkeys(everywhere, 8),
        {(layer, p): (1, 64, 17, 5, 40, 8, 16)[p] for layer, p in everywhere},
        {(last, p): 24 for p in (0, 2, 3, 5)},
        dict.fromkeys(everywhere, 16),
        {(layer, p): 33 for layer, p in everywhere if layer != last or p == 1},
    ]


def make_case(
    ranks: Sequence[Ranks],
    slots: Sequence[int],
    features: Mapping[int, tuple[int, int]],
    dtype: torch.dtype,
    *,
    block_rows: int = 16,
    seed: int = 0,
) -> LoRACase:
    """Make a case with adapter i in slot i.   features: (in, out) of projections with weights.

    Tiles lie in random order, with NaN around them. After the valid blocks and pairs there are
    others that would change every token.
    """
    rng = torch.Generator().manual_seed(seed)
    modules = [_modules(r, features, dtype, rng) for r in ranks]
    depths = [-(-max(r.values(), default=0) // RANK_ROWS) for r in ranks]
    lines = (NUM_LAYERS, NUM_PROJECTIONS)
    tables = [torch.full((*lines, depth), -1, dtype=torch.int32) for depth in depths]
    scales = [torch.full(lines, torch.nan) for _ in ranks]
    arena = _place_tiles(modules, tables, scales, dtype, rng)
    blocks, pairs = _blocks(slots, block_rows), []
    for number, (_, _, slot) in enumerate(blocks):
        num_pairs = -(-depths[slot] * RANK_ROWS // PAIR_ROWS) if slot >= 0 else 0
        pairs += [(number, pair) for pair in range(num_pairs)]
    wrong = [(0, min(len(slots), block_rows), slot) for slot in range(len(ranks))]
    work = LoRAWork(
        arena=arena,
        blocks=torch.empty(0),
        pairs=_int32(pairs + [(len(blocks) + 1 + i, 0) for i in range(len(wrong))]),
        counts=_int32([len(blocks), len(pairs)]),
        block_rows=block_rows,
    )
    case = LoRACase(work, modules, list(slots), [*blocks, (0, 1, _STALE), *wrong], tables, scales)
    return case.placed(arena.device)


def assert_loses_no_more(ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that ours loses at most twice what torch's loses in the same dtype; another order of
    sums may cost some bits of float32.
    """
    allowed = 2 * (torchs.double() - exact).abs().max() + 1e-6 * exact.abs().max()
    lost = (ours.double() - exact).abs().max()
    assert lost <= allowed, f"{lost:.3g} is lost, {allowed:.3g} may be"


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _modules(
    ranks: Ranks,
    features: Mapping[int, tuple[int, int]],
    dtype: torch.dtype,
    rng: torch.Generator,
) -> dict[tuple[int, int], Module]:
    modules = {}
    for (layer, projection), rank in sorted(ranks.items()):
        if projection in features:
            inputs, outputs = features[projection]
            a = (torch.randn(rank, inputs, generator=rng) / inputs**0.5).to(dtype)
            b = (torch.randn(rank, outputs, generator=rng) / rank**0.5).to(dtype)
            modules[layer, projection] = Module(a, b, 0.5 + len(modules) / 4)
    return modules


def _place_tiles(
    modules: Sequence[Mapping[tuple[int, int], Module]],
    tables: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    dtype: torch.dtype,
    rng: torch.Generator,
) -> torch.Tensor:
    """Make the arena with all tiles in it, and fill the tables with their places."""
    unit = ADDRESS_UNIT_BYTES // dtype.itemsize
    tiles = []
    for slot, of_slot in enumerate(modules):
        for (layer, projection), m in of_slot.items():
            scales[slot][layer, projection] = m.scale
            for index in range(-(-len(m.a) // RANK_ROWS)):
                rows = slice(index * RANK_ROWS, (index + 1) * RANK_ROWS)
                tile = torch.cat([_padded(part[rows]).flatten() for part in (m.a, m.b)])
                tiles.append((slot, layer, projection, index, tile))
    at, places = 1, []
    for number in torch.randperm(len(tiles), generator=rng).tolist():
        places.append((number, at))
        at += -(-len(tiles[number][4]) // unit) + number % 2
    arena = torch.full((2, -(-(at + 1) // 2) * unit), torch.nan, dtype=dtype)
    for number, at in places:
        slot, layer, projection, index, tile = tiles[number]
        tables[slot][layer, projection, index] = at
        arena.view(-1)[at * unit : at * unit + len(tile)] = tile
    return arena


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Rows padded with zeros to a whole tile, as the packer pads them."""
    return torch.cat([rows, rows.new_zeros(RANK_ROWS - len(rows), rows.shape[1])])


def _blocks(slots: Sequence[int], block_rows: int) -> list[tuple[int, int, int]]:
    """Blocks as (first token, tokens, slot); one of them has no tokens."""
    blocks: list[tuple[int, int, int]] = []
    for token, slot in enumerate(slots):
        first, count, last = blocks[-1] if blocks else (0, 0, None)
        if slot == last and count < block_rows:
            blocks[-1] = first, count + 1, slot
        else:
            blocks.append((token, 1, slot))
    return [*blocks[:1], (len(slots), 0, 0), *blocks[1:]]


def _record(
    block: tuple[int, int, int], tables: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """A BLOCK record. The base model has depth 0, and addresses that must not be read."""
    first, count, slot = block
    if slot == _STALE:
        return first, count, 1, 8, 8
    if slot < 0:
        return first, count, 0, 0, 0
    return first, count, tables[slot].shape[2], tables[slot].data_ptr(), scales[slot].data_ptr()


def _int32(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
