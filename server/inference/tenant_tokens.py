"""Tokens by tenant for Prometheus, with a bound on the number of tenants that have a name there."""

import time
from collections import Counter
from collections.abc import Callable

OTHER = "other"
"""Stands for all tenants that have no series of their own."""
_WINDOW_S = 3600.0
"""Time after which the busiest tenants are looked for anew, so that series do not come and go."""
_SEEN_PER_NAMED = 20
"""Tenants that are counted within a window, for each that may be named; later ones are not."""


class TenantTokens:
    """Prompt and completion tokens of the `most` busiest tenants, and of all others together.

    A tenant's counts grow as long as it is named. A tenant that was not among the busiest of the
    last hour gives its place to one that was, and begins at 0 should it come back: to Prometheus
    that is a restart. The counts of all others only grow.
    """

    def __init__(self, most: int = 50, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._counts: dict[str, tuple[int, int]] = {OTHER: (0, 0)}
        self._seen: Counter[str] = Counter()
        self._ends_at = clock() + _WINDOW_S

    def note(self, tenant_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        if self._clock() >= self._ends_at:
            self._choose()
        if tenant_id in self._seen or len(self._seen) < _SEEN_PER_NAMED * self._most:
            self._seen[tenant_id] += prompt_tokens + completion_tokens
        is_named = tenant_id in self._counts or len(self._counts) <= self._most
        name = tenant_id if is_named else OTHER
        prompt, completion = self._counts.get(name, (0, 0))
        self._counts[name] = (prompt + prompt_tokens, completion + completion_tokens)

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Prompt and completion tokens by tenant; those of all others by OTHER."""
        return self._counts.copy()

    def _choose(self) -> None:
        """Name the busiest tenants of the window that ends, and begin the next one."""
        busiest = {tenant_id for tenant_id, _ in self._seen.most_common(self._most)}
        unnamed = busiest - self._counts.keys()
        idle = [name for name in self._counts if name != OTHER and name not in busiest]
        num_free = self._most + 1 - len(self._counts)
        for name in sorted(idle, key=self._seen.__getitem__)[: max(0, len(unnamed) - num_free)]:
            del self._counts[name]
        self._counts |= dict.fromkeys(unnamed, (0, 0))
        self._seen.clear()
        self._ends_at = self._clock() + _WINDOW_S
