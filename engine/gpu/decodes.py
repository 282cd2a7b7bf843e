"""Work of decode attention: tiles of queries, and the splits of keys that each of them sees."""

import numpy as np
import numpy.typing as npt

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
        self._part_places = -(-num_places // num_parts)
        self._num_sums = [0] * num_parts
        self._tile_queries = tile_queries
        self._window = window
        # (number of the row, place of the first record, splits from .. to) of each tile.
        self._tiles: list[tuple[int, int, int, int]] = []
        self._num_rows = 0

    def add(self, token: int, start: int, count: int, block_start: int) -> None:
        """Add a row of `count` tokens, the first of which is at position `start`.

        token: place of the first one in the step.   block_start: where the row's blocks begin.
        """
        self._num_rows += 1
        while count:
            # A tile lies in one part.
            left = self._part_places - len(self.records) % self._part_places
            own = min(count, self._tile_queries, left)
            self._add_tile(token, start + 1, own, block_start)
            token, start, count = token + own, start + own, count - own

    def items(self) -> list[npt.NDArray[np.int32]]:
        """The items of each part, [.., 2]."""
        tiles = np.array(self._tiles, dtype=np.int32).reshape(-1, 4)
        counts = tiles[:, 3] - tiles[:, 2]
        row, place, first = np.repeat(tiles[:, :3], counts, axis=0).T
        own_start = np.repeat(np.cumsum(counts) - counts, counts)
        split = first + np.arange(len(first), dtype=np.int32) - own_start
        # Tiles of the same keys are adjacent, so that they are read from memory only once.
        order = np.lexsort((split, row))
        items = np.stack((place, split), axis=1).astype(np.int32)[order]
        part = items[:, 0] // max(1, self._part_places)
        return [items[part == number] for number in range(len(self._num_sums))]

    def _add_tile(self, token: int, length: int, count: int, block_start: int) -> None:
        """Add the records of a tile.   length: positions that the first query sees."""
        place = len(self.records)
        part = place // self._part_places
        splits = [self._splits(length + query) for query in range(count)]
        first, end = splits[0].start, splits[-1].stop
        for query, own in enumerate(splits):
            first_sum = self._num_sums[part] + (own.start - first) * count + query
            self.records.append(
                Decode(
                    token + query, length + query, block_start, count, first, first_sum, len(own)
                )
            )
        self._num_sums[part] += count * (end - first)
        self._tiles.append((self._num_rows, place, first, end))

    def _splits(self, length: int) -> range:
        """Splits of the keys that the widest window reaches from the last of `length` positions."""
        window = self._window or length
        return range(max(0, length - window) // SPLIT_KEYS, -(-length // SPLIT_KEYS))
