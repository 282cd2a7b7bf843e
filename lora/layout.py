"""Where everything lies in a slab: one KV block, or tiles of adapters. Sizes only, no tensors.

A slab holds one KV block, `[layer, k or v, kv head, token, head_dim]`, or tiles. A tile is 8 rank
rows of one projection of one layer: A rows `[8, in]`, then B rows, rank-major, `[8, out]`.

A model over several ranks is cut as Megatron cuts it (arXiv 1909.08053): q, k, v, gate and up by
their outputs, o and down by their inputs. A tile is cut with its projection, and what is not cut
lies whole on every rank:

    by outputs   A rows [8, all inputs]        B rows [8, outputs / ranks]
    by inputs    A rows [8, inputs / ranks]    B rows [8, all outputs]

So a rank adds an adapter's part to its own products without numbers of the others, and the two sums
over ranks that a layer has anyway, after o and after down, complete it. Where the other halves are
cut as well (S-LoRA, arXiv 2311.03285, sec. 5), ranks exchange four times more in a layer, and every
exchange is a launch and a wait on the way to the next token. Whole halves take memory instead. One
rank row of an adapter on every projection of Llama-3.1-8B in bfloat16 takes 5.24 MB on a single
rank, 3.54 MB on each of two (2.62 MB with all halves cut), 2.69 MB on each of four (1.31 MB).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from kernels.tiles import ADDRESS_UNIT_BYTES, MAX_RANK, RANK_ROWS

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

CUT_BY_INPUTS = (3, 6)
"""Of PROJECTIONS, those whose results are sums over all shards."""

Ranks = Mapping[tuple[int, int], int]
"""(layer, index into PROJECTIONS) -> rank, only for modules that the adapter has."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the layout."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def features(self, projection: int) -> tuple[int, int]:
        """(in, out) of a projection, by its index in PROJECTIONS."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, intermediate = self.hidden_size, self.intermediate_size
        return (
            (hidden, q),
            (hidden, kv),
            (hidden, kv),
            (q, hidden),
            (hidden, intermediate),
            (hidden, intermediate),
            (intermediate, hidden),
        )[projection]

    def shard(self, num_shards: int) -> "ModelShape":
        """What one of so many ranks computes: its heads, its part of the MLP."""
        return replace(
            self,
            intermediate_size=self.intermediate_size // num_shards,
            num_heads=self.num_heads // num_shards,
            num_kv_heads=self.num_kv_heads // num_shards,
        )


@dataclass(frozen=True, slots=True)
class Tile:
    """Rank rows [8 * index, 8 * index + 8) of a projection: their place in a packed adapter."""

    layer: int
    projection: int
    index: int
    slab: int
    offset_bytes: int


@dataclass(frozen=True)
class Layout:
    """One model's slab: its size, and how KV blocks and tiles lie in it.

    itemsize: bytes of an adapter's value.   kv_itemsize: of a value in a KV block.
    block_size: tokens of a KV block. It starts at the wanted size and doubles until the largest
    tile fits into a slab, so that no tile is ever cut (only models with very small KV need it).
    num_shards: ranks that share the model. `shape` is the whole model's; every size here is that of
    one rank's shard, the same on all of them.
    """

    shape: ModelShape
    itemsize: int
    block_size: int
    kv_itemsize: int
    num_shards: int = 1

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        itemsize: int,
        block_size: int = 16,
        kv_itemsize: int | None = None,
        num_shards: int = 1,
    ) -> "Layout":
        """kv_itemsize: as itemsize where not given."""
        layout = cls(shape, itemsize, block_size, kv_itemsize or itemsize, num_shards)
        largest = max(layout.tile_bytes(p) for p in range(len(PROJECTIONS)))
        if largest <= layout.slab_bytes:
            return layout
        return cls.of(shape, itemsize, 2 * block_size, layout.kv_itemsize, num_shards)

    @cached_property
    def shard_shape(self) -> ModelShape:
        """What one rank computes."""
        return self.shape.shard(self.num_shards)

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int]:
        """[layer, k or v, kv head, token, head_dim] of one block."""
        s = self.shard_shape
        return (s.num_layers, 2, s.num_kv_heads, self.block_size, s.head_dim)

    @cached_property
    def kv_block_elems(self) -> int:
        layers, two, heads, tokens, dim = self.kv_shape
        return layers * two * heads * tokens * dim

    @cached_property
    def slab_bytes(self) -> int:
        return _round_up(self.kv_block_elems * self.kv_itemsize, ADDRESS_UNIT_BYTES)

    @property
    def kv_bytes_per_token(self) -> float:
        """On all ranks together."""
        return self.num_shards * self.slab_bytes / self.block_size

    @property
    def bytes_per_rank(self) -> int:
        """Of an adapter on every projection of every layer."""
        tiles = sum(self.tile_bytes(p) for p in range(len(PROJECTIONS)))
        return self.shape.num_layers * tiles // RANK_ROWS

    @property
    def most_adapter_bytes(self) -> int:
        """What no adapter's slabs exceed, even if projections shared no slab."""
        num_tiles = self.shape.num_layers * MAX_RANK // RANK_ROWS
        in_slab = [self.slab_bytes // self.tile_bytes(p) for p in range(len(PROJECTIONS))]
        return self.slab_bytes * sum(-(-num_tiles // count) for count in in_slab)

    @property
    def units_per_slab(self) -> int:
        return self.slab_bytes // ADDRESS_UNIT_BYTES

    def tile_bytes(self, projection: int) -> int:
        num_inputs, num_outputs = self.shard_shape.features(projection)
        values = RANK_ROWS * (num_inputs + num_outputs)
        return _round_up(values * self.itemsize, ADDRESS_UNIT_BYTES)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def pack(self, ranks: Ranks) -> tuple[list[Tile], int]:
        """First-fit of an adapter's tiles into slabs, largest first; also how many slabs it takes.

        Tiles of one projection in one slab lie next to each other, by layer and index.
        """
        tiles: list[Tile] = []
        used: list[int] = []  # bytes taken of each slab
        by_size = sorted(range(len(PROJECTIONS)), key=self.tile_bytes, reverse=True)
        for projection in by_size:
            size = self.tile_bytes(projection)
            slab = 0  # those before it have no room for a tile of this size
            for layer, index in _rank_rows(ranks, projection):
                while slab < len(used) and used[slab] + size > self.slab_bytes:
                    slab += 1
                if slab == len(used):
                    used.append(0)
                tiles.append(Tile(layer, projection, index, slab, used[slab]))
                used[slab] += size
        return tiles, len(used)


def _rank_rows(ranks: Ranks, projection: int) -> Iterator[tuple[int, int]]:
    """(layer, index) of every tile of a projection, in order."""
    for layer in sorted(layer for layer, p in ranks if p == projection):
        for index in range(-(-ranks[layer, projection] // RANK_ROWS)):
            yield layer, index
