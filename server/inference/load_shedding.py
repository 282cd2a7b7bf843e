"""Load shedding: who could not be served in time is told so at once, before a queue grows.

How long a new request would wait is what waits before it, divided by how fast first tokens have
come lately while anybody waited. Requests that wait for their adapter are in nobody's way and are
not counted.
"""

import math
import time
from collections.abc import Callable

from engine.messages import Priority
from server.accounts.auth import Identity
from server.inference import errors
from server.pool.running import Running, RunningRequest

_HALF_LIFE_S = 10.0
"""Half of what is known about the speed is forgotten after so many seconds of a waiting queue."""
_MIN_FIRST_TOKENS = 4.0
"""Fewer, weighted by age, say nothing."""
_PATIENCE_OF_BATCH = 0.5
"""Requests of the flexible tier are shed at half the wait that the others are."""


class LoadShedder:
    """Decides whether there is room for one more request, by what runs and waits here.

    max_queued: the most answers of all tenants that may wait, at the engines that there are now.
    max_wait_s: the first-token timeout: who would wait longer is refused instead.   default_share:
    of max_queued, for a tenant that has no other.
    """

    def __init__(
        self,
        running: Running,
        *,
        max_queued: Callable[[], int],
        max_wait_s: float,
        default_share: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running = running
        self._max_queued = max_queued
        self._max_wait_s = max_wait_s
        self._default_share = default_share
        self._clock = clock
        self._busy_s = 0.0
        self._first_tokens = 0.0
        self._looked_at = clock()
        self.is_draining = False

    def check(self, identity: Identity, priority: Priority, num_answers: int) -> None:
        """Raises Unavailable while draining, Overloaded, and Limited for a tenant's queue share.

        A share counts answers, as the engines' queues do. A tenant with none waiting may always
        ask, even for more at once than its share.
        """
        if self.is_draining:
            raise errors.draining()
        limit = self._share_of(identity)
        waiting = self._running.num_waiting(identity.tenant_id)
        if waiting and waiting + num_answers > limit:
            raise errors.queue_share_exceeded(
                waiting, num_answers, limit, retry_after_s=self.wait_s(waiting) or 1.0
            )
        patience_s = self._max_wait_s * (_PATIENCE_OF_BATCH if priority is Priority.BATCH else 1.0)
        if (wait_s := self.wait_s(self._running.num_queued + 1)) > patience_s:
            raise errors.overloaded(retry_after_s=max(1.0, wait_s - patience_s))

    def explain(self, identity: Identity) -> dict[str, float]:
        """A tenant's share of the queue, as `GET /v1/limits` tells it."""
        waiting = self._running.num_waiting(identity.tenant_id)
        limit = self._share_of(identity)
        return {
            "limit": limit,
            "used": waiting,
            "remaining": max(0, limit - waiting),
            "expected_wait_s": round(self.wait_s(self._running.num_queued + 1), 3),
        }

    def wait_s(self, num_queued: int) -> float:
        """Seconds until the last of these answers has a first token; 0 while nothing is known."""
        self._pass_time()
        if self._first_tokens < _MIN_FIRST_TOKENS:
            return 0.0
        return num_queued * self._busy_s / self._first_tokens

    def add(self, request: RunningRequest) -> None:
        self._pass_time()
        self._running.add(request)

    def begin(self, request: RunningRequest, index: int) -> None:
        """Note the first token of one of its answers."""
        self._pass_time()
        if not request.is_cold and index not in request.begun:
            self._first_tokens += 1
        self._running.begin(request, index)

    def move(self, request: RunningRequest, engine: str) -> None:
        """Note that another engine has the request from now on."""
        self._running.move(request, engine)

    def remove(self, request: RunningRequest) -> None:
        self._pass_time()
        self._running.remove(request)

    def _share_of(self, identity: Identity) -> int:
        share = identity.max_queue_share or self._default_share
        return max(1, math.floor(share * self._max_queued()))

    def _pass_time(self) -> None:
        """Let knowledge grow old, but only while somebody waits: an idle hour says nothing."""
        now = self._clock()
        elapsed_s, self._looked_at = now - self._looked_at, now
        if self._running.num_queued:
            keep = 0.5 ** (elapsed_s / _HALF_LIFE_S)
            self._busy_s = self._busy_s * keep + elapsed_s
            self._first_tokens *= keep
