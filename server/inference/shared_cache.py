"""A cache that its owners share: one with many entries pushes out its own."""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SharedCache(Generic[K, V]):
    """Values by owner and key, last used last. It belongs to the event loop.

    most, most_of_one: entries that all owners and that one may have.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._kept: dict[str, dict[K, V]] = {}

    def get(self, owner: str, key: K) -> V | None:
        kept = self._kept.get(owner, {})
        if (value := kept.pop(key, None)) is not None:
            kept[key] = value
        return value

    def keep(self, owner: str, key: K, value: V) -> None:
        """Keep a value. The owner that has most gives one up if there are too many."""
        kept = self._kept.setdefault(owner, {})
        kept[key] = value
        if len(kept) > self._most_of_one:
            del kept[next(iter(kept))]
        if sum(map(len, self._kept.values())) > self._most:
            most = max(self._kept.values(), key=len)
            del most[next(iter(most))]
            self._kept = {name: values for name, values in self._kept.items() if values}
