"""Load shedding: requests that cannot be served in time are refused at once, before a queue grows.

A new request's wait is the number of answers that will begin before it, divided by the rate at
which first tokens have come lately while any answer waited. Where tenants take turns, those are at
most as many of each other tenant as of its own, so the tenant with the long queue is refused first.
Requests that wait for their adapter delay nobody and are not counted.
"""

import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from engine.wire.messages import Priority
from registry.errors import Overloaded
from server.accounts.auth import Identity
from server.inference import errors
from server.pool.running import Running, RunningRequest
from server.text.json_object import JsonObject

_HALF_LIFE_S = 10.0
"""Seconds with a waiting queue after which half of what is known of the rate is forgotten."""
_MIN_FIRST_TOKENS = 4.0
"""First tokens, weighted by age, below which the rate counts as unknown."""
_PATIENCE_OF_BATCH = 0.5
"""Share of the longest wait above which requests of the flexible tier are refused."""


@dataclass(slots=True, eq=False)
class LoadShedder:
    """Decides whether a base model has room for one more request, by those that run and wait here.

    max_queued: the most answers of all tenants that may wait, for the engines that there are now.
    max_wait_s: the first-token timeout; a request that would wait longer is refused instead.
    default_share: share of the queue for a tenant that has no share of its own: of the room that
    other tenants leave, so that there is always some for a newcomer.
    takes_turns: whether engines serve the tenants in turn, and not first come, first served.
    """

    running: Running
    _: KW_ONLY
    max_queued: Callable[[], int]
    max_wait_s: float
    default_share: float
    takes_turns: bool
    clock: Callable[[], float] = time.monotonic
    _busy_s: float = 0.0
    _first_tokens: float = 0.0
    _looked_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._looked_at = self.clock()

    def check(self, identity: Identity, priority: Priority, num_answers: int) -> None:
        """Raise Overloaded, or Limited for a tenant's queue share.

        A share counts answers, as the engines' queues do. A tenant with no waiting answer may
        always ask, even for more answers at once than its share.
        """
        limit = self._share_of(identity)
        waiting = self.running.num_waiting(identity.tenant_id)
        if waiting and waiting + num_answers > limit:
            raise errors.queue_share_exceeded(
                waiting, num_answers, limit, retry_after_s=self.wait_s(waiting) or 1.0
            )
        patience_s = self.max_wait_s * (_PATIENCE_OF_BATCH if priority is Priority.BATCH else 1.0)
        if (wait_s := self.wait_s(self._num_before(identity.tenant_id) + 1)) > patience_s:
            raise Overloaded(retry_after_s=max(1.0, wait_s - patience_s))

    def explain(self, identity: Identity) -> JsonObject:
        """A tenant's share of the queue, in the form that `GET /v1/limits` shows."""
        waiting = self.running.num_waiting(identity.tenant_id)
        limit = self._share_of(identity)
        return {
            "limit": limit,
            "used": waiting,
            "remaining": max(0, limit - waiting),
            "expected_wait_s": round(self.wait_s(self._num_before(identity.tenant_id) + 1), 3),
        }

    def wait_s(self, num_queued: int) -> float:
        """Seconds until the last of these answers has a first token; 0 if the rate is unknown."""
        self._pass_time()
        if self._first_tokens < _MIN_FIRST_TOKENS:
            return 0.0
        return num_queued * self._busy_s / self._first_tokens

    def add(self, request: RunningRequest) -> None:
        self._pass_time()
        self.running.add(request)

    def begin(self, request: RunningRequest, index: int) -> None:
        """Note the first token of one of a request's answers."""
        self._pass_time()
        if not request.is_cold and index not in request.begun:
            self._first_tokens += 1
        self.running.begin(request, index)

    def remove(self, request: RunningRequest) -> None:
        self._pass_time()
        self.running.remove(request)

    def _share_of(self, identity: Identity) -> int:
        share = identity.max_queue_share or self.default_share
        own = self.running.num_waiting(identity.tenant_id)
        others = self.running.num_waiting_of_all - own
        return max(1, math.floor(share * (self.max_queued() - others)))

    def _num_before(self, tenant_id: str) -> int:
        """Answers that will begin before a new one of this tenant."""
        queued = self.running.queued
        if not self.takes_turns:
            return sum(queued.values())
        own = queued.get(tenant_id, 0)
        return (
            sum(min(number, own + 1) for name, number in queued.items() if name != tenant_id) + own
        )

    def _pass_time(self) -> None:
        """Age what is known of the rate, but only while answers wait: an idle hour says nothing."""
        now = self.clock()
        elapsed_s, self._looked_at = now - self._looked_at, now
        if self.running.num_queued:
            keep = 0.5 ** (elapsed_s / _HALF_LIFE_S)
            self._busy_s = self._busy_s * keep + elapsed_s
            self._first_tokens *= keep
