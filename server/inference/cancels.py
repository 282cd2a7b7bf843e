"""Answers that their tenants asked to end, at whichever gateway they asked.

A request ends where it runs. The other gateways leave a note with its hold, which all look for once
a second; SQLite serves one gateway, where there is nobody else to ask.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.tables import holds
from server.database.clock import now_ms
from server.database.database import Database, LedgerUnavailable
from server.pool.engines import Engines
from server.pool.running import Running

_POLL_S = 1.0
_MAX_FOUND = 1000
"""The newest first: those of a gateway that died stay until their holds are voided."""


@dataclass(frozen=True, slots=True)
class Cancels:
    """Ends this gateway's requests, and asks other gateways to end theirs."""

    database: Database
    engines: Engines
    running: Running

    async def cancel(self, tenant_id: str, request_id: str) -> bool:
        """False when the tenant has no such request under way. Raises LedgerUnavailable."""
        if running := self.running.get(request_id, tenant_id):
            running.is_cancelled = True
            await self.engines.abort(request_id)
            return True
        if self.database.is_sqlite:
            return False
        return await self.database.write(lambda conn: note_cancel(conn, tenant_id, request_id))

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(LedgerUnavailable):  # the next look asks again
                await self.look()

    async def look(self) -> None:
        """End what runs here and was cancelled, here or elsewhere. Raises LedgerUnavailable.

        Again and again until it has ended: the first time may have been before the engine had it.
        """
        if len(self.running) and not self.database.is_sqlite:
            for request_id in await self.database.read(noted_cancels):
                if running := self.running.find(request_id):
                    running.is_cancelled = True
        for request_id in self.running:
            if (running := self.running.find(request_id)) and running.is_cancelled:
                await self.engines.abort(request_id)


def note_cancel(conn: Connection, tenant_id: str, request_id: str) -> bool:
    """Whether the tenant has such a request under way, by its hold."""
    query = sa.update(holds).where(
        holds.c.request_id == request_id, holds.c.tenant_id == tenant_id, holds.c.state == "open"
    )
    return conn.execute(query.values(cancelled_at_ms=now_ms())).rowcount == 1


def noted_cancels(conn: Connection) -> list[str]:
    """Request ids whose holds are open and cancelled."""
    query = sa.select(holds.c.request_id).where(
        holds.c.state == "open", holds.c.cancelled_at_ms.is_not(None)
    )
    query = query.order_by(holds.c.cancelled_at_ms.desc()).limit(_MAX_FOUND)
    return list(conn.scalars(query))
