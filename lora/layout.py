"""Byte layout of a slab, which holds one KV block or tiles of adapters. Sizes only, no tensors.

A slab holds one KV block, `[layer, k or v, kv head, token, head_dim]`, or tiles. A tile is 8 rank
rows of one projection of one layer: A rows `[8, in]`, then B rows, rank-major, `[8, out]`.

A model on several ranks is cut as in Megatron (arXiv 1909.08053): q, k, v, gate and up by their
outputs, o and down by their inputs. A tile is cut like its projection, and the half that is not cut
lies whole on every rank:

    by outputs   A rows [8, all inputs]        B rows [8, outputs / ranks]
    by inputs    A rows [8, inputs / ranks]    B rows [8, all outputs]

So a rank adds an adapter's part to its own products without data from other ranks, and the two sums
over ranks that a layer has anyway, after o and after down, complete it. If the other halves were
cut as well (S-LoRA, arXiv 2311.03285, sec. 5), ranks would exchange four times more in a layer, and
every exchange is a launch and a wait on the way to the next token. Whole halves cost memory
instead. One rank row of an adapter on every projection of Llama-3.1-8B in bfloat16 takes 5.24 MB on
a single rank, 3.54 MB on each of two (2.62 MB with all halves cut), 2.69 MB on each of four
(1.31 MB).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from kernels.tiles import ADDRESS_UNIT_BYTES, MAX_RANK, RANK_ROWS

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

CUT_BY_INPUTS = (3, 6)
"""Indices into PROJECTIONS of those whose results are summed over all shards."""

FUSED = {"qkv_proj": (0, 1, 2), "gate_up_proj": (4, 5)}
"""Names under which some models have several projections as one module, with the outputs side by
side; the numbers are indices into PROJECTIONS. In the arena they are separate."""

Ranks = Mapping[tuple[int, int], int]
"""Ranks of the adapter's modules, by (layer, index into PROJECTIONS)."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that decide the layout."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def features(self, projection: int) -> tuple[int, int]:
        """Numbers of inputs and outputs of a projection, given by its index in PROJECTIONS."""
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
        """Shape of the part that one of `num_shards` ranks computes: its heads and MLP share."""
        return replace(
            self,
            intermediate_size=self.intermediate_size // num_shards,
            num_heads=self.num_heads // num_shards,
            num_kv_heads=self.num_kv_heads // num_shards,
        )


@dataclass(frozen=True, slots=True)
class Tile:
    """Place of rank rows [8 * index, 8 * index + 8) of a projection in a packed adapter."""

    layer: int
    projection: int
    index: int
    slab: int
    offset_bytes: int


@dataclass(frozen=True)
class Layout:
    """Size of one model's slabs, and how KV blocks and tiles lie in them.

    itemsize: bytes of an adapter's value.   kv_itemsize: bytes of a value in a KV block.
    block_size: tokens of a KV block. `of` doubles the wanted size until the largest tile fits into
    a slab, so that no tile is ever cut (only models with very small KV need it).
    num_shards: ranks that share the model. `shape` is the whole model's; sizes are those of one
    rank's shard, the same on all ranks, unless stated otherwise.
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
        """Make a layout whose slabs hold the largest tile. kv_itemsize: itemsize by default."""
        layout = cls(shape, itemsize, block_size, kv_itemsize or itemsize, num_shards)
        largest = max(layout.tile_bytes(p) for p in range(len(PROJECTIONS)))
        if largest <= layout.slab_bytes:
            return layout
        return cls.of(shape, itemsize, 2 * block_size, layout.kv_itemsize, num_shards)

    @cached_property
    def shard_shape(self) -> ModelShape:
        """Shape of the part of the model that one rank computes."""
        return self.shape.shard(self.num_shards)

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one KV block, [layer, k or v, kv head, token, head_dim]."""
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
        """Bytes of one token's KV on all ranks together."""
        return self.num_shards * self.slab_bytes / self.block_size

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of one rank row of an adapter on every projection of every layer."""
        tiles = sum(self.tile_bytes(p) for p in range(len(PROJECTIONS)))
        return self.shape.num_layers * tiles // RANK_ROWS

    @property
    def most_adapter_bytes(self) -> int:
        """Upper bound of the bytes of an adapter's slabs, as if projections never shared a slab."""
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
        """Place an adapter's tiles in slabs, first-fit, largest first.

        Returns the tiles and the number of slabs. Tiles of one projection in one slab lie next to
        each other, by layer and index.
        """
        tiles: list[Tile] = []
        used: list[int] = []  # bytes taken of each slab
        by_size = sorted(range(len(PROJECTIONS)), key=self.tile_bytes, reverse=True)
        for projection in by_size:
            size = self.tile_bytes(projection)
            slab = 0  # the slabs before this one have no room for a tile of this size
            for layer, index in _rank_rows(ranks, projection):
                while slab < len(used) and used[slab] + size > self.slab_bytes:
                    slab += 1
                if slab == len(used):
                    used.append(0)
                tiles.append(Tile(layer, projection, index, slab, used[slab]))
                used[slab] += size
        return tiles, len(used)


def _rank_rows(ranks: Ranks, projection: int) -> Iterator[tuple[int, int]]:
    """Layer and index of every tile of a projection, in order."""
    for layer in sorted(layer for layer, p in ranks if p == projection):
        for index in range(-(-ranks[layer, projection] // RANK_ROWS)):
            yield layer, index
