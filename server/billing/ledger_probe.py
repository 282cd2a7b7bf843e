"""Finds out whether the ledger can be written, by writing to it."""

import asyncio
import time
from collections.abc import Callable

from sqlalchemy.engine import Connection

from server.database.clock import now_ms
from server.database.database import Database, DatabaseError
from server.database.tables import leases
from server.database.upsert import put

_FRESH_S = 1.0
"""Age up to which an answer is reused: anybody may ask without a key, and each write is durable."""


class LedgerProbe:
    """Probes by changing a row: a transaction that changes nothing succeeds even on a full disk."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._asking = asyncio.Lock()
        self._asked_at = -_FRESH_S
        self._is_writable = False

    async def is_writable(self) -> bool:
        """Whether the ledger could be written at most a second ago."""
        async with self._asking:
            if self._clock() >= self._asked_at + _FRESH_S:
                self._is_writable = await self._write()
                self._asked_at = self._clock()
            return self._is_writable

    async def _write(self) -> bool:
        try:
            await self._database.write(_touch)
        except DatabaseError:
            return False
        return True


def _touch(conn: Connection) -> None:
    row = {"name": "probe", "holder": "", "expires_at_ms": now_ms()}
    put(conn, leases, row, "expires_at_ms")
