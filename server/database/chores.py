"""Chores: periodic work of the gateways of one database, each done by one gateway under a lease."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from server.database.database import LedgerUnavailable
from server.database.leases import LEASE_S, Leases

logger = logging.getLogger(__name__)

Turn = Callable[[], Awaitable[object]]

_POLL_S = LEASE_S / 4
"""Seconds between polls, a quarter of a lease, so that a gateway renews its leases in time."""


@dataclass(slots=True)
class _Chore:
    """One chore.

    due_at_s: time of its next turn on the clock of `Chores`.   task: its turn, while it runs.
    """

    name: str
    turn: Turn
    interval_s: float
    due_at_s: float = 0.0
    task: asyncio.Future[object] | None = None


class Chores:
    """Runs each chore at once and then `interval_s` after the end of its last turn.

    chores: (name, turn, interval_s). A turn may be lost with its process and be run again by
    another, so it must be harmless if done twice. No chore waits for another one.
    """

    def __init__(
        self,
        leases: Leases,
        chores: Sequence[tuple[str, Turn, float]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._chores = [_Chore(*chore) for chore in chores]
        self._clock = clock

    async def run(self) -> None:
        """Run until cancelled; turns under way are cancelled with it."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(_POLL_S)
        finally:
            tasks = [chore.task for chore in self._chores if chore.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> None:
        """Keep the leases, note turns that have ended, and begin those that are due."""
        for chore in self._chores:
            if chore.task is not None and chore.task.done():
                chore.due_at_s = self._clock() + _wait_after(chore, chore.task)
                chore.task = None
            try:
                is_ours = await self._leases.hold(f"chore/{chore.name}")
            except LedgerUnavailable:
                continue  # the next poll tries again
            if is_ours and chore.task is None and self._clock() >= chore.due_at_s:
                chore.task = asyncio.ensure_future(chore.turn())


def _wait_after(chore: _Chore, ended: asyncio.Future[object]) -> float:
    """Seconds until the chore's next turn; 0 if the database was away for the last one."""
    error = None if ended.cancelled() else ended.exception()
    if isinstance(error, LedgerUnavailable):
        return 0.0
    if error is not None:
        logger.error("chore %s failed", chore.name, exc_info=error)
    return chore.interval_s
