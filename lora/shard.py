"""Which part of a model a rank holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `size` equal ones."""

    index: int = 0
    size: int = 1

    def part(self, count: int) -> slice:
        """Of `count` things, those that are this rank's. `size` divides `count`."""
        assert count % self.size == 0, f"{count} cannot be cut into {self.size}"
        share = count // self.size
        return slice(self.index * share, (self.index + 1) * share)


WHOLE = Shard()
