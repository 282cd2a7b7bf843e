"""How many engines the pool of one base model has, from moment to moment: told to the placer.

    awake     as many as the autoscaler says
    asleep    none, since no request was admitted for a while; the next that may be wakes it
    closed    none, once the requests under way have ended: it is drained, replaced or removed

A base model that is called off does not lose a request: as long as one is under way, from the
choice of the model to its last output, the engines stay. One that has a successor takes requests
for some seconds more, since they may have chosen it before the successor was ready.
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from registry.errors import Overloaded, Unavailable
from server.database.clock import now_ms
from server.pool.autoscaler import SLO_SHARE, Autoscaler, pool_figures
from server.pool.control_files import WantedEngines, wanted_file
from server.pool.first_tokens import FirstTokens
from server.pool.pool_settings import PoolSettings
from server.pool.running import Running

if TYPE_CHECKING:
    from server.pool.engines import Engines

logger = logging.getLogger(__name__)

TURN_S = 1.0
_LOOK_S = 0.05
_GRACE_S = 5.0
"""Seconds without a request before a pool with a successor closes."""
_DOUBT_S = 1.0
"""Seconds in which an engine that was told to go shows whether it does."""
_FIRST_WAKE_S = 30.0
"""Seconds that a start is expected to take before one was seen."""

MAX_DECISIONS = 50

KeeperState = Literal["awake", "asleep", "closed"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A number of engines that was asked for.   reason: a clause without a full stop."""

    at_ms: int
    num_engines: int
    reason: str


class Waking:
    """How engines come for requests that wait for them.

    is_ready: whether an engine takes requests.
    """

    def __init__(
        self, settings: PoolSettings, is_ready: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._is_ready = is_ready
        self._clock = clock
        self._since: float | None = None
        self._doubted_until = 0.0
        self._took_s = _FIRST_WAKE_S
        self._waiting: Counter[str] = Counter()

    @property
    def is_under_way(self) -> bool:
        return self._since is not None

    @property
    def has_waiting(self) -> bool:
        return self._waiting.total() > 0

    def begin(self) -> None:
        """Note that requests wait; an engine that is still there may have been told to go."""
        self._since = self._clock()
        self._doubted_until = self._since + _DOUBT_S * self._is_ready()

    def look(self) -> bool:
        """Whether an engine takes requests; the time that it took is what the next is told."""
        if not self._is_ready() or self._clock() < self._doubted_until:
            return False
        if self._since is not None:
            self._took_s = self._clock() - self._since
            self._since = None
        return True

    async def wait(self, tenant_id: str) -> None:
        """Return once an engine takes requests. Raises Unavailable if the model did not wake in
        time, and Overloaded if no more requests, of the tenant or of all, may wait for that.
        """
        share = max(1, math.floor(self._settings.max_queue_share * self._settings.max_waiting))
        if self._waiting[tenant_id] >= share or self._waiting.total() >= self._settings.max_waiting:
            raise Overloaded
        self._waiting[tenant_id] += 1
        deadline = self._clock() + self._settings.wake_timeout_s
        try:
            while not self.look():
                if (now_s := self._clock()) >= deadline:
                    since = now_s if self._since is None else self._since
                    raise Unavailable(
                        f"The base model {self._settings.model_id} had gone to sleep and is being "
                        "started. Send the request again after the time in Retry-After. Nothing "
                        "was billed.",
                        code="model_waking",
                        retry_after_s=max(1.0, since + self._took_s - now_s),
                    )
                await asyncio.sleep(_LOOK_S)
        finally:
            self._waiting -= Counter([tenant_id])


class Keeper:
    """The keeper of one pool; `run` is its background task.

    home: folder of the pool's control files.   number: of this gateway among those of the
    machine.
    state: as in the module's docstring; set by this alone.
    decisions: the last that this gateway told the placer, the newest first.
    """

    def __init__(
        self,
        engines: "Engines",
        running: Running,
        home: Path,
        settings: PoolSettings,
        clock: Callable[[], float] = time.monotonic,
        *,
        number: int = 1,
    ) -> None:
        self.first_tokens = FirstTokens(clock)
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._engines = engines
        self._running = running
        self._file = wanted_file(home, number)
        self._settings = settings
        self._clock = clock
        self._told = self._file.latest()
        in_force = WantedEngines(home).latest()
        self._autoscaler = Autoscaler(
            least=settings.engines,
            most=settings.most_engines,
            wanted=in_force or settings.engines,
            slo_first_token_s=settings.slo_first_token_s,
        )
        sleeps = in_force == 0 and settings.sleep_after_s is not None
        self.state: KeeperState = "asleep" if sleeps else "awake"
        self._has_successor = False
        self._asked_at = clock()
        self._waking = Waking(settings, lambda: engines.is_ready, clock)
        self._num_visits = 0

    @property
    def is_empty(self) -> bool:
        """Whether no request is under way or on its way."""
        return not len(self._running) and not self._num_visits

    # ---- requests ----

    @property
    def is_resting(self) -> bool:
        """Whether the pool sleeps, or wakes, so that a request has to wait for an engine."""
        return self.state == "asleep" or self._waking.is_under_way

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Keep the engines while the block decides on a request, which may be refused, and then
        keeps nothing awake. Raises Unavailable if the pool is closed.
        """
        if self.state == "closed":
            name = self._settings.model_id
            message = f"The base model {name} takes no requests now; its operator has"
            message += " drained it."
            raise Unavailable(message, code="model_drained", retry_after_s=30.0)
        self._num_visits += 1
        try:
            yield
        finally:
            self._num_visits -= 1

    async def wake(self, tenant_id: str) -> None:
        """Return once an engine takes requests, if the pool sleeps or was opened; else at once.

        Raises Unavailable, with the time when it probably has woken, and Overloaded.
        """
        if self.state == "asleep":
            if not self._told:
                self._waking.begin()
            self.note_admitted()
            self._tell(self._autoscaler.wanted, "a request woke it")
        if self._waking.is_under_way and not self._waking.look():
            await self._waking.wait(tenant_id)

    def note_admitted(self) -> None:
        """Note a request that was admitted, or is as far as to wake the pool: none sleeps now."""
        self._asked_at = self._clock()
        if self.state == "asleep":
            self.state = "awake"

    # ---- the operator ----

    def close(self) -> None:
        """Take no more requests; the engines go when those under way have ended."""
        self.state = "closed"

    def succeed(self) -> None:
        """Close as soon as no request comes any more, since they go to a successor."""
        if not self._has_successor:
            self._has_successor = True
            self._asked_at = self._clock()

    def open(self) -> None:
        """Take requests again; those that come before an engine is there wait, as in `wake`."""
        if self.state == "closed":
            self._waking.begin()
        self.state, self._has_successor = "awake", False
        self._asked_at = self._clock()

    def leave(self) -> None:
        """Want nothing any more, as the gateway ends and others decide."""
        if self._settings.gateways > 1:
            self._file.path.unlink(missing_ok=True)

    # ---- the background task ----

    async def run(self) -> None:
        """Look once a second, until this task is cancelled."""
        while True:
            self.turn()
            await asyncio.sleep(TURN_S)

    def turn(self) -> None:
        """Decide how many engines there should be, and tell the placer if it does not know."""
        # A request that has not begun may still be refused.
        if self._waking.has_waiting or any(request.has_begun for request in self._running.requests):
            self._asked_at = self._clock()
        if self._waking.is_under_way:
            self._waking.look()
        if self._has_successor and self._is_idle(_GRACE_S):
            self.state = "closed"
        elif self.state == "awake" and self._is_idle(self._settings.sleep_after_s):
            self.state = "asleep"
        if self.state == "awake":
            wanted = self._awake_number()
            rested = self._told == 0
            self._tell(wanted, "it serves again" if rested else self._autoscaler.reason)
        elif self.is_empty:
            self._tell(0, self._why_none())

    def _is_idle(self, after_s: float | None) -> bool:
        """Whether nobody has asked for so many seconds; None: it never counts as idle."""
        return after_s is not None and self._clock() - self._asked_at >= after_s

    def _awake_number(self) -> int:
        if self._settings.most_engines == self._settings.engines:
            return self._settings.engines
        first_token_s = self.first_tokens.percentile_s(SLO_SHARE)
        figures = pool_figures(self._engines.figures(), first_token_s)
        return self._autoscaler.decide(self._clock(), figures)

    def _why_none(self) -> str:
        if self.state == "asleep":
            return f"nobody asked for it for {self._settings.sleep_after_s:.0f} s"
        return "a successor takes its requests" if self._has_successor else "it is called off"

    def _tell(self, wanted: int, reason: str) -> None:
        # Without a file of any gateway the placer starts the least number by itself.
        is_least = self._told is None and wanted == self._settings.engines
        if wanted == self._told or (is_least and self._settings.gateways == 1):
            return
        logger.info("%s: %d engines are wanted", self._file.path.parents[1].name, wanted)
        try:
            self._file.write(wanted)
        except OSError as error:  # the next turn tries again
            logger.error("%s cannot be written: %s", self._file.path, error)
        else:
            self._told = wanted
            self.decisions.appendleft(Decision(now_ms(), wanted, reason))
