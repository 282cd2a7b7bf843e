"""Whose key a request carries, remembered for a moment so that most requests ask no database.

What changes elsewhere (a key revoked at another gateway, a tenant suspended) is seen within two
seconds; what changes here, at once; that a key expires, at each use.
"""

import time
from collections.abc import Callable

import sqlalchemy as sa

from server.accounts import auth
from server.accounts.auth import Identity, InvalidApiKey
from server.database import clock
from server.database.database import Database
from server.database.expiring_cache import MAX_ENTRIES, ExpiringCache


class Identities:
    """Found by the whole HMAC of a key: a part of it, or of the key, could be another's.

    has_hard_budget: see `auth.authenticate`.
    """

    def __init__(
        self,
        database: Database,
        pepper: str,
        *,
        has_hard_budget: sa.ColumnElement[bool],
        now_ms: Callable[[], int] = clock.now_ms,
        monotonic: Callable[[], float] = time.monotonic,
        max_identities: int = MAX_ENTRIES,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._has_hard_budget = has_hard_budget
        self._now_ms = now_ms
        self._identities: ExpiringCache[Identity] = ExpiringCache(
            monotonic=monotonic, max_entries=max_identities
        )

    async def of(self, plaintext: str) -> Identity:
        """Raises InvalidApiKey, TenantSuspended, LedgerUnavailable."""
        auth.parse_key(plaintext)
        digest = auth.digest(self._pepper, plaintext)
        identity = await self._identities.get(digest, lambda: self._read(plaintext))
        if identity.expires_at_ms is not None and identity.expires_at_ms <= self._now_ms():
            raise InvalidApiKey
        return identity

    def forget(self, tenant_id: str) -> None:
        """After any change of the tenant or of its keys: the next request reads them again."""
        self._identities.forget(lambda identity: identity.tenant_id == tenant_id)

    async def _read(self, plaintext: str) -> Identity:
        return await self._database.read(
            lambda conn: auth.authenticate(
                conn, plaintext, self._pepper, self._now_ms(), self._has_hard_budget
            )
        )
