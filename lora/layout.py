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

Adapters may also change the two ends of a model, its embedding and its head, which have a row for
each token of the vocabulary. The vocabulary is cut into n chunks, so that a tile of one chunk is no
larger than half a slab or the largest other tile, and slabs do not grow. Each chunk has a place in
the tile tables like a projection's, in layers behind the model's last one: places 0 to n - 1 are
the head's, n to 2 n - 1 the embedding's, and seven places make a layer.

    chunk of the head         A rows [8, hidden]           B rows [8, tokens of the chunk]
    chunk of the embedding    A rows [8, tokens of ..]     B rows [8, hidden]

Each chunk of the head has its own copy of A, and each of the embedding a copy of B, so that a
tile is complete, and kernels treat a chunk of the head as one more projection. For Llama-3.1-8B in
bfloat16 n is 3, and the copies add 6 %. Places 2 n and 2 n + 1 are those of one more chunk of the
head and of the embedding, for tokens that adapters add to the vocabulary. These tiles are not cut
on several ranks: every rank has the whole embedding, and the first one the whole head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from kernels.tiles import ADDRESS_UNIT_BYTES, MAX_RANK, RANK_ROWS
from registry.formats.peft_format import MAX_ADDED_TOKENS

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

CUT_BY_INPUTS = (3, 6)
"""Indices into PROJECTIONS of those whose results are summed over all shards."""

FUSED = {"qkv_proj": (0, 1, 2), "gate_up_proj": (4, 5)}
"""Names under which some models have several projections as one module, with the outputs side by
side; the numbers are indices into PROJECTIONS. In the arena they are separate."""

Place = tuple[int, int]
"""Place in tile tables: (layer, index into PROJECTIONS), or that of a chunk of an end."""

Ranks = Mapping[Place, int]
"""Ranks of an adapter's modules and chunks, by place."""

_CHUNK_TOKENS = 64
"""Number of tokens that all chunks of a vocabulary, except for the last, are multiples of."""

_LEAST_SUM_RANKS = 256
_ADDED_SHARE = 0.1
"""Bytes that the adapters of a step may always add, as a share of the weights, which it reads."""
_READ_TOKENS = 512
"""Tokens whose products take no longer than to read 16-bit weights, on every GPU that
`chorale plan` knows: FLOPs by bandwidth are 117 (A10G) to 419 (L40S), 295 on an H100.
"""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that decide the layout.

    intermediate_size: 0 if adapters change no MLP, as in a mixture of experts.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def adapted(self) -> range:
        """Indices into PROJECTIONS of those that adapters may change."""
        return range(len(PROJECTIONS) if self.intermediate_size else PROJECTIONS.index("gate_proj"))

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
    """Place of rank rows [8 * index, 8 * index + 8) of a projection in a packed adapter.

    layer, projection: a Place.
    """

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
    vocab_size: 0 if adapters may not change the model's embedding and head.
    """

    shape: ModelShape
    itemsize: int
    block_size: int
    kv_itemsize: int
    num_shards: int = 1
    vocab_size: int = 0

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        itemsize: int,
        block_size: int = 16,
        kv_itemsize: int | None = None,
        num_shards: int = 1,
        vocab_size: int = 0,
    ) -> "Layout":
        """Make a layout whose slabs hold the largest tile. kv_itemsize: itemsize by default."""
        kv_itemsize = kv_itemsize or itemsize
        layout = cls(shape, itemsize, block_size, kv_itemsize, num_shards, vocab_size)
        largest = max(map(layout.tile_bytes, [*layout._adapted_places, *layout.added_places]))
        if largest <= layout.slab_bytes:
            return layout
        return cls.of(shape, itemsize, 2 * block_size, kv_itemsize, num_shards, vocab_size)

    @cached_property
    def shard_shape(self) -> ModelShape:
        """Shape of the part of the model that one rank computes."""
        return self.shape.shard(self.num_shards)

    @property
    def _adapted_places(self) -> list[Place]:
        """Places of the first layer's projections that adapters may change."""
        return [(0, projection) for projection in self.shape.adapted]

    @cached_property
    def chunks(self) -> tuple[range, ...]:
        """Tokens of each chunk of the vocabulary; none if adapters may not change the ends."""
        if not self.vocab_size:
            return ()
        most_bytes = max(self.slab_bytes // 2, *map(self.tile_bytes, self._adapted_places))
        room = most_bytes // (RANK_ROWS * self.itemsize) - self.shape.hidden_size
        unit = min(_CHUNK_TOKENS, room)
        num_chunks = -(-self.vocab_size // (room // unit * unit))
        size = _round_up(-(-self.vocab_size // num_chunks), unit)
        starts = range(0, self.vocab_size, size)
        return tuple(range(start, min(start + size, self.vocab_size)) for start in starts)

    @property
    def head_places(self) -> list[Place]:
        """Places of the head's chunks, in order."""
        return [self._end_place(number) for number in range(len(self.chunks))]

    @property
    def embedding_places(self) -> list[Place]:
        """Places of the embedding's chunks, in order."""
        return [self._end_place(len(self.chunks) + number) for number in range(len(self.chunks))]

    @property
    def added_places(self) -> list[Place]:
        """Places of tokens that adapters add, of the head and of the embedding, if they may."""
        first = 2 * len(self.chunks)
        return [self._end_place(first), self._end_place(first + 1)] if first else []

    def _end_place(self, number: int) -> Place:
        layer, place = divmod(number, len(PROJECTIONS))
        return self.shape.num_layers + layer, place

    @property
    def table_shape(self) -> tuple[int, int]:
        """Layers and places of a layer in tile tables."""
        num_places = 2 * len(self.chunks) + len(self.added_places)
        extra = -(-num_places // len(PROJECTIONS))
        return self.shape.num_layers + extra, len(PROJECTIONS)

    def features(self, place: Place) -> tuple[int, int]:
        """Numbers of inputs and outputs of a place in the tile tables."""
        layer, number = place
        if layer < self.shape.num_layers:
            return self.shard_shape.features(number)
        number += (layer - self.shape.num_layers) * len(PROJECTIONS)
        tokens, hidden = len(self.chunks[number % len(self.chunks)]), self.shape.hidden_size
        if place in self.added_places:
            tokens = MAX_ADDED_TOKENS
        is_head = number < len(self.chunks) or number == 2 * len(self.chunks)
        return (hidden, tokens) if is_head else (tokens, hidden)

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
        """Bytes of one rank row of an adapter on all projections that it may change."""
        tile_bytes = sum(map(self.tile_bytes, self._adapted_places))
        return self.shape.num_layers * tile_bytes // RANK_ROWS

    @property
    def most_adapter_bytes(self) -> int:
        """Upper bound of the bytes of an adapter's slabs, as if projections never shared a slab."""
        num_tiles = MAX_RANK // RANK_ROWS
        ends = [*self.embedding_places, *self.embedding_places, *self.added_places]
        num_slabs = sum(
            -(-num_tiles * num_modules // (self.slab_bytes // self.tile_bytes(place)))
            for num_modules, places in ((self.shape.num_layers, self._adapted_places), (1, ends))
            for place in places
        )
        return self.slab_bytes * num_slabs

    @property
    def units_per_slab(self) -> int:
        return self.slab_bytes // ADDRESS_UNIT_BYTES

    def tile_bytes(self, place: Place) -> int:
        """Bytes of a tile of a projection or chunk."""
        values = RANK_ROWS * sum(self.features(place))
        return _round_up(values * self.itemsize, ADDRESS_UNIT_BYTES)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def pack(self, ranks: Ranks) -> tuple[list[Tile], int]:
        """Place an adapter's tiles in slabs, first-fit, largest first.

        Returns the tiles and the number of slabs. Tiles of one projection in one slab lie next to
        each other, by layer and index.
        """

        def kind(place: Place) -> tuple[int, int]:
            # Tiles of one projection lie side by side, and so do chunks of one size.
            layer, number = place
            is_end = layer >= self.shape.num_layers
            return -self.tile_bytes(place), len(PROJECTIONS) if is_end else number

        tiles: list[Tile] = []
        used: list[int] = []  # bytes taken of each slab
        for _, places in groupby(sorted(ranks, key=lambda place: (kind(place), place)), kind):
            slab = 0  # the slabs before this one have no room for a tile of this size
            for place in places:
                size = self.tile_bytes(place)
                for index in range(-(-ranks[place] // RANK_ROWS)):
                    while slab < len(used) and used[slab] + size > self.slab_bytes:
                        slab += 1
                    if slab == len(used):
                        used.append(0)
                    tiles.append(Tile(*place, index, slab, used[slab]))
                    used[slab] += size
        return tiles, len(used)


def default_sum_ranks(
    layout: Layout, weight_bytes: int, step_tokens: int | None, used_share: float
) -> int:
    """Sum of the ranks of the distinct adapters that share a step, unless an operator sets it.

    weight_bytes: of the base model, which every step reads.   step_tokens: most tokens of a step on
    a GPU; None on a CPU.   used_share: of the weights, that a token computes with; a token of a
    mixture of experts uses few.
    Adapters may add a tenth to the bytes of a step. On a GPU they may also make a step of decodes
    as long as one full of a prompt's tokens: its products take as long as reading the weights that
    a token uses step_tokens / 512 times (docs/decisions/ranks-per-step.md).
    """
    share = _ADDED_SHARE
    if step_tokens is not None:
        share = max(share, used_share * step_tokens / _READ_TOKENS - 1)
    return max(_LEAST_SUM_RANKS, int(share * weight_bytes / layout.bytes_per_rank))
