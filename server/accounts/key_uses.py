"""The times when API keys were last used, gathered in memory and written rarely."""

import contextlib
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.accounts.tables import api_keys
from server.database.clock import now_ms
from server.database.database import Database, DatabaseError


class KeyUses:
    """The uses since the last `write`, one time for each key that was used."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._used_at_ms: dict[str, int] = {}

    def note(self, key_id: str) -> None:
        self._used_at_ms[key_id] = now_ms()

    async def write(self) -> None:
        """Write the uses. If the database is away they are lost, since nothing depends on them."""
        uses, self._used_at_ms = self._used_at_ms, {}
        with contextlib.suppress(DatabaseError):
            await self._database.write(lambda conn: record_key_uses(conn, uses))


def record_key_uses(conn: Connection, used_at_ms: Mapping[str, int]) -> None:
    """Store {key_id: Unix milliseconds}; a time older than the stored one is ignored."""
    for key_id, at_ms in used_at_ms.items():
        is_older = sa.func.coalesce(api_keys.c.last_used_at_ms, 0) < at_ms
        query = sa.update(api_keys).where(api_keys.c.key_id == key_id, is_older)
        conn.execute(query.values(last_used_at_ms=at_ms))
