"""The two threads that grammars work on, and what each tenant's work there has cost."""

import threading
from collections import Counter, OrderedDict

from engine.grammar.lane import Lane
from engine.wire.messages import GrammarStats

_MAX_TENANTS = 1000


class Lanes:
    """A fast lane for masks, and a slow one for compilations and for the masks of slow grammars.

    figures: counters without the tenants.
    """

    def __init__(self) -> None:
        self.fast = Lane("grammar-fast")
        self.slow = Lane("grammar-slow", rests=True)
        self.figures = GrammarStats()
        self._lock = threading.Lock()
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def note_mask(self, tenant_id: str, seconds: float) -> None:
        with self._lock:
            self.figures.masks += 1
            self.figures.mask_seconds += seconds
            self._note(tenant_id, seconds)

    def note_compile(self, tenant_id: str, seconds: float, *, failed: bool) -> None:
        with self._lock:
            self.figures.compiles += 1
            self.figures.compiles_failed += failed
            self.figures.compile_seconds += seconds
            self._note(tenant_id, seconds)

    def busiest(self, count: int) -> tuple[tuple[str, float], ...]:
        """The tenants whose grammars took most, and their seconds since they were last idle."""
        with self._lock:
            return tuple(Counter(self._seconds).most_common(count))

    def _note(self, tenant_id: str, seconds: float) -> None:
        self._seconds[tenant_id] = self._seconds.pop(tenant_id, 0.0) + seconds
        if len(self._seconds) > _MAX_TENANTS:
            self._seconds.popitem(last=False)  # the one that has been idle for longest
