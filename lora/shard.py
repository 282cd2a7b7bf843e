"""Shards: the part of a model that each rank holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `size` equal parts."""

    index: int = 0
    size: int = 1

    def part(self, count: int) -> slice:
        """The slice of `count` items that is this rank's. `size` must divide `count`."""
        assert count % self.size == 0, f"{count} cannot be cut into {self.size}"
        share = count // self.size
        return slice(self.index * share, (self.index + 1) * share)


WHOLE = Shard()
