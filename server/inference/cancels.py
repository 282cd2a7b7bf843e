"""Cancellation of answers by their tenants, at any gateway.

A request ends at the gateway that runs it. Another gateway leaves a note with the request's hold,
and all gateways look for notes once a second. With SQLite there is only one gateway, and no notes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.tables import IS_CANCELLED, IS_OPEN, holds
from server.database.clock import now_ms
from server.database.database import Database
from server.inference.attempts import attempt_ids, parent_of
from server.inference.bases import Bases
from server.pool.running import Parent, RunningRequest

POLL_S = 1.0
_MAX_FOUND = 1000
"""Most notes of one poll, the newest first: a dead gateway's stay until its holds are voided."""


@dataclass(frozen=True, slots=True)
class Cancels:
    """Ends this gateway's requests, and asks other gateways to end theirs."""

    database: Database
    bases: Bases

    async def cancel(self, tenant_id: str, request_id: str) -> bool:
        """Cancel a tenant's request; False if it is not under way. Raises LedgerUnavailable.

        A request for a route may be named by its own id or by that of any of its attempts.
        """
        parent_id = parent_of(request_id) or request_id
        request_ids = [parent_id, *attempt_ids(parent_id)]
        found = [each for each in self._found(request_ids) if each.tenant_id == tenant_id]
        for each in found:
            each.is_cancelled = True
        if found:
            await self._abort_cancelled()
        if found or self.database.is_sqlite:
            return bool(found)
        return await self.database.write(lambda conn: note_cancel(conn, tenant_id, request_ids))

    async def look(self) -> None:
        """Abort requests of this gateway that were cancelled anywhere. Raises LedgerUnavailable.

        The abort is repeated until the request has ended, as the engine may not have had it before.
        """
        if self.bases.num_running and not self.database.is_sqlite:
            noted = await self.database.read(noted_cancels)
            for each in self._found([*noted, *filter(None, map(parent_of, noted))]):
                each.is_cancelled = True
        await self._abort_cancelled()

    def _found(self, request_ids: Sequence[str]) -> list[RunningRequest | Parent]:
        """The requests of these ids that are under way here, parents of attempts included."""
        parents = [self.bases.parents.get(each) for each in request_ids]
        running = [base.running.find(each) for base in self.bases for each in request_ids]
        return [found for found in (*parents, *running) if found]

    async def _abort_cancelled(self) -> None:
        for base in list(self.bases):
            for request in base.running.requests:
                if request.is_cancelled:
                    await base.abort(request.request_id)


def note_cancel(conn: Connection, tenant_id: str, request_ids: Sequence[str]) -> bool:
    """Note a cancellation; whether the tenant has such a request under way, by its hold."""
    query = sa.update(holds).where(
        holds.c.request_id.in_(request_ids),
        holds.c.tenant_id == tenant_id,
        IS_OPEN,
    )
    return conn.execute(query.values(cancelled_at_ms=now_ms())).rowcount > 0


def noted_cancels(conn: Connection) -> list[str]:
    """Request ids whose holds are open and noted as cancelled."""
    query = sa.select(holds.c.request_id).where(IS_CANCELLED)
    query = query.order_by(holds.c.cancelled_at_ms.desc()).limit(_MAX_FOUND)
    return list(conn.scalars(query))
