"""Identities of API keys, remembered for a moment so that most requests ask no database.

A change elsewhere (a key revoked at another gateway, a tenant suspended) is seen within two
seconds; a change at this gateway at once; the expiry of a key at each use.
"""

import time
from collections.abc import Callable

import sqlalchemy as sa

from registry.errors import InvalidApiKey
from server.accounts import auth
from server.accounts.auth import Identity
from server.database import clock
from server.database.database import Database
from server.database.expiring_cache import MAX_ENTRIES, ExpiringCache


class Identities:
    """Identities by the whole HMAC of their key, since a part of it could be another key's as well.

    has_hard_budget: see `auth.identify`.
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
        """The identity of a key. Raises InvalidApiKey, Forbidden, LedgerUnavailable."""
        return await self.of_hmac(auth.parse_key(plaintext), auth.digest(self._pepper, plaintext))

    async def of_hmac(self, key_id: str, key_hmac: str) -> Identity:
        """The identity of the key of an id and an HMAC. Raises as `of` does."""
        identity = await self._identities.get(key_hmac, lambda: self._read(key_id, key_hmac))
        if identity.expires_at_ms is not None and identity.expires_at_ms <= self._now_ms():
            raise InvalidApiKey
        return identity

    def forget(self, tenant_id: str) -> None:
        """Forget a tenant's identities after a change of it or its keys, to read them again."""
        self._identities.forget(lambda identity: identity.tenant_id == tenant_id)

    async def _read(self, key_id: str, key_hmac: str) -> Identity:
        return await self._database.read(
            lambda conn: auth.identify(
                conn, key_id, key_hmac, self._now_ms(), self._has_hard_budget
            )
        )
