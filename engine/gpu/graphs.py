"""Captured graphs of steps: of decodes by number of rows and drafts, of others by number of tokens.

A step without a graph is launched kernel by kernel, which costs the host 10 to 20 ms with 32
layers. A step of more than 1,024 tokens keeps the device busy for longer than that, so that the
device does not wait for the host.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator

from engine.gpu.inputs import DECODE_BLOCK_ROWS, PREFILL_BLOCK_ROWS, StepLimits, StepShape

_MIXED_TOKENS, _MOST_MIXED_TOKENS = 128, 1024
"""Graphs with prefills have a multiple of 128 tokens: products are cut into tiles of 128 rows, so
most of the padding costs them nothing, and below 128 tokens a step only waits for the weights.
"""

_SPARE_PREFILL_ITEMS = 16
"""Least number of prefills ending in the middle of a tile that a graph has room for. An item that
is not used is a program for every kv head that returns at once: with 16 items and 8 heads, about
one for every multiprocessor.
"""


class StepGraphs:
    """Graphs by shape; a step is padded to the smallest shape that has a graph and room for it.

    Steps with prefills have three graphs for each number of tokens, since adapters are applied by
    blocks of 16 tokens or of 64, or not at all. Decodes have two for each number of rows; a draft
    is like one more row, so that steps with few drafts take the graphs of more rows.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.decode_sizes = list(_decode_sizes(limits.max_num_seqs, limits.most_choices))
        most_mixed = min(limits.max_num_batched_tokens, _MOST_MIXED_TOKENS)
        self.mixed_sizes = [*range(_MIXED_TOKENS, most_mixed, _MIXED_TOKENS), most_mixed]
        self._limits = limits
        self._graphs: dict[StepShape, Callable[[], None]] = {}

    def shapes(self) -> Iterator[StepShape]:
        """All shapes that have a graph, the largest first."""
        for num_tokens in reversed(self.mixed_sizes):
            for block_rows in (PREFILL_BLOCK_ROWS, DECODE_BLOCK_ROWS, 0):
                yield self._mixed(num_tokens, block_rows)
        for num_rows in reversed(self.decode_sizes):
            for has_lora in (True, False):
                yield StepShape.of_decodes(num_rows, has_lora)

    def fit(self, shape: StepShape) -> StepShape:
        """The smallest shape that has a graph and room for this one; else the shape itself."""
        if not shape.num_prefill_items:
            at = bisect_left(self.decode_sizes, shape.num_rows)
            if at == len(self.decode_sizes):
                return shape
            return StepShape.of_decodes(self.decode_sizes[at], shape.has_lora)
        for num_tokens in self.mixed_sizes[bisect_left(self.mixed_sizes, shape.num_tokens) :]:
            found = self._mixed(num_tokens, shape.block_rows)
            if shape.num_prefill_items <= found.num_prefill_items:
                return found
        return shape

    def keep(self, shape: StepShape, graph: Callable[[], None]) -> None:
        """Have `graph` launch steps of this shape from now on."""
        self._graphs[shape] = graph

    def find(self, shape: StepShape) -> Callable[[], None] | None:
        """The function that launches the graph of this shape; None if there is none."""
        return self._graphs.get(shape)

    def _mixed(self, num_tokens: int, block_rows: int) -> StepShape:
        num_rows = min(num_tokens, self._limits.most_choices)
        num_items = num_tokens // self._limits.prefill_queries
        num_items += min(num_rows, _SPARE_PREFILL_ITEMS)
        return StepShape(num_tokens, num_rows, block_rows, num_items)


def _decode_sizes(most_rows: int, most_tokens: int) -> Iterator[int]:
    """Yield 1, 2, 4, then every 8th number up to 256, every 32nd beyond, and `most_rows`; then, for
    drafts, every 32nd up to `most_tokens`.
    """
    size = 1
    while size < most_rows:
        yield size
        size = 2 * size if size < 8 else size + (8 if size < 256 else 32)
    size = most_rows
    while size < most_tokens:
        yield size
        size += min(size, 32)
    yield most_tokens
