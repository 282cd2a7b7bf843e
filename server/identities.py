"""Whose key a request carries, remembered for a moment so that most requests ask no database.

What changes elsewhere (a key revoked at another gateway, a tenant suspended) is seen when an entry
is `TTL_S` old; what changes here, at once; that a key expires, at each use.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from server import auth, clock
from server.auth import Identity, InvalidApiKey
from server.database import Database

TTL_S = 2.0
MAX_IDENTITIES = 10_000


@dataclass(frozen=True, slots=True)
class _Entry:
    identity: Identity
    read_at_s: float


class Identities:
    """By the whole HMAC of a key: a part of it, or of the key, could be another's.

    Unknown keys are not remembered. Of many requests with one key that is not, one reads.
    """

    def __init__(
        self,
        database: Database,
        pepper: str,
        *,
        now_ms: Callable[[], int] = clock.now_ms,
        monotonic: Callable[[], float] = time.monotonic,
        max_identities: int = MAX_IDENTITIES,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._now_ms = now_ms
        self._monotonic = monotonic
        self._max_identities = max_identities
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._reading: dict[str, asyncio.Task[Identity]] = {}

    async def of(self, plaintext: str) -> Identity:
        """Raises InvalidApiKey, TenantSuspended, LedgerUnavailable."""
        auth.parse_key(plaintext)
        digest = auth.digest(self._pepper, plaintext)
        entry = self._entries.get(digest)
        if entry is not None and self._monotonic() - entry.read_at_s < TTL_S:
            identity = entry.identity
        else:
            identity = await self._read(digest, plaintext)
        if identity.expires_at_ms is not None and identity.expires_at_ms <= self._now_ms():
            raise InvalidApiKey
        return identity

    def forget(self, tenant_id: str) -> None:
        """After any change of the tenant or of its keys: the next request reads them again."""
        changed = [
            digest
            for digest, entry in self._entries.items()
            if entry.identity.tenant_id == tenant_id
        ]
        for digest in changed:
            del self._entries[digest]
        # Whose these are is not known yet, nor whether they read before the change or after.
        self._reading.clear()

    async def _read(self, digest: str, plaintext: str) -> Identity:
        task = self._reading.get(digest)
        if task is None:
            task = asyncio.create_task(self._read_once(digest, plaintext))
            self._reading[digest] = task
            task.add_done_callback(lambda done: self._end(digest, done))
        # Shielded: the first to ask may leave, and others wait for the same answer.
        return await asyncio.shield(task)

    async def _read_once(self, digest: str, plaintext: str) -> Identity:
        # The age of an entry counts from before it was read.
        read_at_s = self._monotonic()
        identity = await self._database.read(
            lambda conn: auth.authenticate(conn, plaintext, self._pepper, self._now_ms())
        )
        if self._reading.get(digest) is asyncio.current_task():
            self._entries[digest] = _Entry(identity, read_at_s)
            self._entries.move_to_end(digest)
            if len(self._entries) > self._max_identities:
                self._entries.popitem(last=False)
        return identity

    def _end(self, digest: str, task: asyncio.Task[Identity]) -> None:
        if self._reading.get(digest) is task:
            del self._reading[digest]
        if not task.cancelled():
            task.exception()  # whoever asked may have left: nobody else looks at it
