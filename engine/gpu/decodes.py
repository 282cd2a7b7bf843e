"""Work of decode attention: tiles of queries, and the splits of keys that each of them sees."""

from collections.abc import Iterator, Sequence

from kernels.work import SPLIT_KEYS, Decode


class Decodes:
    """The records and items of AttentionWork for rows that decode, made row by row.

    num_places: most records.   num_parts: of the items.   tile_queries: most queries of a tile.
    window: the widest one of the layers, None if a layer has none.
    """

    def __init__(
        self, num_places: int, num_parts: int, tile_queries: int, window: int | None
    ) -> None:
        self.records: list[Decode] = []
        self.items: list[list[tuple[int, int]]] = [[] for _ in range(num_parts)]
        self._part_places = -(-num_places // num_parts)
        self._num_sums = [0] * num_parts
        self._tile_queries = tile_queries
        self._window = window

    def add(self, token: int, start: int, count: int, block_start: int) -> None:
        """Add a row of `count` tokens, the first of which is at position `start`.

        token: place of the first one in the step.   block_start: where the row's blocks begin.
        """
        items: list[tuple[int, int]] = []
        for own in self._tiles(range(count)):
            first = len(self.records)
            splits = [self._splits(start + query + 1) for query in own]
            self._add_tile(token + own.start, start + own.start + 1, block_start, splits)
            items += [(first, split) for split in range(splits[0].start, splits[-1].stop)]
        if count > self._tile_queries:
            # Tiles of the same keys are adjacent, so that they are read from memory only once.
            items.sort(key=lambda item: item[1])
        for item in items:
            self.items[item[0] // self._part_places].append(item)

    def _tiles(self, queries: range) -> Iterator[range]:
        """Cut queries into tiles, each of which lies in one part."""
        while queries:
            left = self._part_places - len(self.records) % self._part_places
            own = queries[: min(self._tile_queries, left)]
            yield own
            queries = queries[len(own) :]

    def _add_tile(self, token: int, length: int, block_start: int, splits: Sequence[range]) -> None:
        """Add the records of a tile.   splits: of each query.   length: that its first one sees."""
        count, first = len(splits), splits[0].start
        part = len(self.records) // self._part_places
        for query, own in enumerate(splits):
            first_sum = self._num_sums[part] + (own.start - first) * count + query
            self.records.append(
                Decode(
                    token + query, length + query, block_start, count, first, first_sum, len(own)
                )
            )
        self._num_sums[part] += count * (splits[-1].stop - first)

    def _splits(self, length: int) -> range:
        """Splits of the keys that the widest window reaches from the last of `length` positions."""
        window = self._window or length
        return range(max(0, length - window) // SPLIT_KEYS, -(-length // SPLIT_KEYS))
