"""What was read from the database, remembered for a moment: most requests need not ask again.

What changes at another gateway is seen when an entry is old; what changes here, at once.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")

TTL_S = 2.0
MAX_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    value: V
    read_at_s: float


class ExpiringCache(Generic[V]):
    """Values by key. A reader's exception is nobody's value: the next one reads again.

    Of many that ask at once for what is not there, one reads.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self._monotonic = monotonic
        self._max_entries = max_entries
        self._entries: OrderedDict[str, _Entry[V]] = OrderedDict()
        self._reading: dict[str, asyncio.Task[V]] = {}

    async def get(self, key: str, read: Callable[[], Awaitable[V]]) -> V:
        """At most TTL_S old. Raises what `read` raises."""
        entry = self._entries.get(key)
        if entry is not None and self._monotonic() - entry.read_at_s < TTL_S:
            return entry.value
        task = self._reading.get(key)
        if task is None:
            task = asyncio.create_task(self._read(key, read))
            self._reading[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        # Shielded: the first to ask may leave, and others wait for the same answer.
        return await asyncio.shield(task)

    def forget(self, is_changed: Callable[[V], bool] = lambda _: True) -> None:
        """After any change here: the next to ask for such a value reads it again."""
        for key in [key for key, entry in self._entries.items() if is_changed(entry.value)]:
            del self._entries[key]
        # What these read is not known yet, nor whether before the change or after it.
        self._reading.clear()

    async def _read(self, key: str, read: Callable[[], Awaitable[V]]) -> V:
        # The age of an entry counts from before it was read.
        read_at_s = self._monotonic()
        value = await read()
        if self._reading.get(key) is asyncio.current_task():
            self._entries[key] = _Entry(value, read_at_s)
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return value

    def _end(self, key: str, task: asyncio.Task[V]) -> None:
        if self._reading.get(key) is task:
            del self._reading[key]
        if not task.cancelled():
            task.exception()  # whoever asked may have left: nobody else looks at it
