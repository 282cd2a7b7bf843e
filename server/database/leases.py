"""Leases: each allows one process at a time to do something, until it expires.

SQLite serves one gateway, which its file lock ensures, so every lease is granted there at once.
"""

import socket
import time
import uuid
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.database.clock import database_now_ms, from_now, now_ms
from server.database.database import Database
from server.database.tables import leases
from server.database.upsert import upsert

LEASE_S = 10.0
MACHINE = socket.gethostname()[:31]
"""Name of this machine, which holders of its leases are called after."""
_MAX_LISTED = 1000


class Leases:
    """The leases of one process, which keeps a lease by asking for it again and again.

    A lease may be lost between two calls, so work under a lease must be harmless if done twice.
    """

    def __init__(self, database: Database, lease_s: float = LEASE_S) -> None:
        self._database = database
        self._lease_s = lease_s
        self._holder = f"{MACHINE}/{uuid.uuid4().hex}"
        self._renew_at: dict[str, float] = {}

    async def hold(self, name: str) -> bool:
        """Take or keep a lease. Returns whether this process has it. Raises LedgerUnavailable."""
        if self._database.is_sqlite:
            return True
        now = time.monotonic()
        if now < self._renew_at.get(name, 0.0):
            return True
        self._renew_at.pop(name, None)
        is_ours = await self._database.write(
            lambda conn: acquire(conn, name, self._holder, int(self._lease_s * 1000))
        )
        if is_ours:
            # The lease lasts three times as long, so a lease that is renewed in time is not lost.
            self._renew_at[name] = now + self._lease_s / 3
        return is_ours

    async def release(self) -> None:
        """Give all leases back, so that no other process has to wait. Raises LedgerUnavailable."""
        self._renew_at.clear()
        if not self._database.is_sqlite:
            query = sa.delete(leases).where(leases.c.holder == self._holder)
            await self._database.write(lambda conn: conn.execute(query).rowcount)


def list_held(conn: Connection, prefix: str) -> list[tuple[str, str, int]]:
    """List leases as (name without its prefix, machine, time since the last renewal in ms)."""
    begun_ms = database_now_ms(conn) + int(LEASE_S * 1000)
    query = sa.select(leases).where(leases.c.name.startswith(prefix, autoescape=True))
    return [
        (row.name.removeprefix(prefix), row.holder.split("/")[0], begun_ms - row.expires_at_ms)
        for row in conn.execute(query.order_by(leases.c.name).limit(_MAX_LISTED))
    ]


def forget(conn: Connection, name: str) -> None:
    """Delete a lease that has expired, whose holder will not come back."""
    is_over = leases.c.expires_at_ms < from_now(conn, now_ms(), 0)
    conn.execute(sa.delete(leases).where(leases.c.name == name, is_over))


def acquire(conn: Connection, name: str, holder: str, lease_ms: int) -> bool:
    """Take or keep a lease by the database's clock; False while another process has it."""
    now: Any = from_now(conn, 0, 0)
    insert = upsert(conn.dialect.name, leases).values(
        name=name, holder=holder, expires_at_ms=from_now(conn, 0, lease_ms)
    )
    statement = insert.on_conflict_do_update(
        index_elements=["name"],
        set_={"holder": insert.excluded.holder, "expires_at_ms": insert.excluded.expires_at_ms},
        where=sa.or_(leases.c.holder == holder, leases.c.expires_at_ms < now),
    )
    return conn.execute(statement.returning(leases.c.name)).first() is not None
