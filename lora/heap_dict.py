"""A dict that knows the key of its smallest value."""

import heapq
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V", bound=Any)

_MOST_STALE = 64


class HeapDict(dict[K, V]):
    """Keys with values that can be ordered; finding the first key takes logarithmic time.

    Keys of equal values must be comparable. Only `[]=` sets a value.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[V, K]] = []  # some are outdated

    def __setitem__(self, key: K, value: V) -> None:
        dict.__setitem__(self, key, value)  # super() would take half as long again
        heapq.heappush(self._heap, (value, key))
        if len(self._heap) > 2 * len(self) + _MOST_STALE:
            self._heap = [(value, key) for key, value in self.items()]
            heapq.heapify(self._heap)

    def first(self) -> K:
        """The key of the smallest value. Raises IndexError if there is none."""
        heap = self._heap
        while self.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][1]
