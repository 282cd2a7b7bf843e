"""Answers that their tenants asked to end, at whichever gateway they asked.

A request ends where it runs. The other gateways leave a note with its hold, which all look for once
a second; SQLite serves one gateway, where there is nobody else to ask.
"""

import asyncio
import contextlib

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.tables import holds
from server.database.clock import now_ms
from server.database.database import LedgerUnavailable
from server.gateway import Gateway

_POLL_S = 1.0
_MAX_FOUND = 1000
"""The newest first: those of a gateway that died stay until their holds are voided."""


async def cancel(gateway: Gateway, tenant_id: str, request_id: str) -> bool:
    """False when the tenant has no such request under way. Raises LedgerUnavailable."""
    if running := gateway.running.get(request_id, tenant_id):
        running.is_cancelled = True
        await gateway.engines.abort(request_id)
        return True
    if gateway.database.is_sqlite:
        return False
    return await gateway.database.write(lambda conn: note_cancel(conn, tenant_id, request_id))


async def watch(gateway: Gateway) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(_POLL_S)
        with contextlib.suppress(LedgerUnavailable):  # the next look asks again
            await look(gateway)


async def look(gateway: Gateway) -> None:
    """End what runs here and was cancelled, here or elsewhere. Raises LedgerUnavailable.

    Again and again until it has ended: the first time may have been before the engine had it.
    """
    if len(gateway.running) and not gateway.database.is_sqlite:
        for request_id in await gateway.database.read(noted_cancels):
            if running := gateway.running.find(request_id):
                running.is_cancelled = True
    for request_id in gateway.running:
        if (running := gateway.running.find(request_id)) and running.is_cancelled:
            await gateway.engines.abort(request_id)


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
