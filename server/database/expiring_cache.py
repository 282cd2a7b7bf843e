"""A cache of values from the database for a moment, so that most requests need not read them.

A change at another gateway is seen when an entry has expired; a change at this one at once.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

V = TypeVar("V")

TTL_S = 2.0
MAX_ENTRIES = 10_000


class ExpiringCache(Generic[V]):
    """Values by key. A reader's exception is not cached: the next caller reads again.

    If many callers ask at once for a missing value, one reader runs for all of them.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self._monotonic = monotonic
        self._max_entries = max_entries
        # Each value with the time when it was read.
        self._entries: OrderedDict[str, tuple[V, float]] = OrderedDict()
        self._reading: dict[str, asyncio.Task[V]] = {}

    async def get(self, key: str, read: Callable[[], Awaitable[V]]) -> V:
        """The value, at most TTL_S old. Raises what `read` raises."""
        entry = self._entries.get(key)
        if entry is not None and self._monotonic() - entry[1] < TTL_S:
            return entry[0]
        task = self._reading.get(key)
        if task is None:
            task = asyncio.create_task(self._read(key, read))
            self._reading[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        # The task is shielded: the first caller may leave while others wait for the same value.
        return await asyncio.shield(task)

    def forget(self, is_changed: Callable[[V], bool] = lambda _: True) -> None:
        """Forget values after a change at this gateway, so that they are read again."""
        for key in [key for key, (value, _) in self._entries.items() if is_changed(value)]:
            del self._entries[key]
        # Reads under way may be from before the change, so their values will not be kept.
        self._reading.clear()

    async def _read(self, key: str, read: Callable[[], Awaitable[V]]) -> V:
        # The age of an entry counts from before it was read.
        read_at_s = self._monotonic()
        value = await read()
        if self._reading.get(key) is asyncio.current_task():
            self._entries[key] = (value, read_at_s)
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return value

    def _end(self, key: str, task: asyncio.Task[V]) -> None:
        if self._reading.get(key) is task:
            del self._reading[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved, since all callers may have left
