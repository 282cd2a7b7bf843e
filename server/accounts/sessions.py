"""Sessions of the console: a key is shown once, and for twelve hours a cookie stands for it.

A session has the rights that its key has at the moment, and ends with it. The cookie's token is in
the database as its hash; a request must also have the token's CSRF token in a header, which only a
page of this server can know.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import record_audit
from registry.errors import InvalidApiKey, Limited
from registry.tables import audit_log
from server.accounts import auth
from server.accounts.admin_key import AdminKey
from server.accounts.auth import Identity
from server.accounts.identities import Identities
from server.accounts.tables import api_keys, console_sessions
from server.database import clock
from server.database.database import Database
from server.database.expiring_cache import ExpiringCache

LIFETIME_S = 12 * 3600
MAX_SESSIONS = 20
"""Most sessions of a key at a time; one more ends the oldest."""
MAX_SIGN_INS = 20
MAX_SIGN_INS_OF_TENANT = 60
"""Most sessions that begin within a minute with one key, and with all keys of a tenant. Nothing
bounds the operator's, who can fill the audit log in other ways as well.
"""

_BEGIN = "session.begin"
_OPERATOR = "operator"
"""Stands for a key's id in the operator's sessions."""
_MAX_TOKEN_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class _Session:
    key_id: str
    key_hmac: str
    expires_at_ms: int


class Sessions:
    """Begins, finds and ends sessions."""

    def __init__(
        self,
        database: Database,
        pepper: str,
        admin_key: AdminKey,
        identities: Identities,
        *,
        now_ms: Callable[[], int] = clock.now_ms,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._admin_key = admin_key
        self._identities = identities
        self._now_ms = now_ms
        self._found: ExpiringCache[_Session | None] = ExpiringCache(monotonic=monotonic)

    async def begin(self, key: str) -> str:
        """Begin a session of a tenant's key or of the operator's. Returns its token.

        Raises InvalidApiKey, Forbidden, Limited, DatabaseError.
        """
        tenant_id, key_id = None, _OPERATOR
        if not self._admin_key.is_it(key):
            identity = await self._identities.of(key)
            tenant_id, key_id = identity.tenant_id, identity.key_id
        token, now_ms = secrets.token_urlsafe(32), self._now_ms()
        key_hmac = auth.digest(self._pepper, key)

        def write(conn: Connection) -> Limited | None:
            if tenant_id and (limited := _too_many(conn, key_id, tenant_id, now_ms)):
                return limited  # Returned: raised, it would make its whole group run again.
            _make_room(conn, key_id, now_ms)
            session = {"token_sha256": _sha256(token), "key_id": key_id, "key_hmac": key_hmac}
            times = {"created_at_ms": now_ms, "expires_at_ms": now_ms + LIFETIME_S * 1000}
            conn.execute(sa.insert(console_sessions).values(**session, **times))
            _audit(conn, _BEGIN, key_id, tenant_id, now_ms)
            return None

        if limited := await self._database.write(write):
            raise limited
        return token

    async def identity_of(self, token: str) -> Identity:
        """The identity of the key that a session is of. Raises InvalidApiKey if the session or its
        key has ended, or it is the operator's; Forbidden, DatabaseError.
        """
        session = await self._find(token)
        return await self._identities.of_hmac(session.key_id, session.key_hmac)

    async def is_operators(self, token: str) -> bool:
        """Whether a session is the operator's. Raises InvalidApiKey if it has ended."""
        session = await self._find(token)
        if session.key_id != _OPERATOR:
            return False
        operators_hmac = auth.digest(self._pepper, self._admin_key.current())
        if not hmac.compare_digest(session.key_hmac, operators_hmac):
            raise InvalidApiKey
        return True

    async def end(self, token: str) -> None:
        """End a session; nothing happens if there is none."""
        try:
            # Anybody may ask for this, and strangers must not fill the queue of writes.
            await self._find(token)
        except InvalidApiKey:
            return

        def write(conn: Connection) -> None:
            place = console_sessions.c.token_sha256 == _sha256(token)
            query = sa.delete(console_sessions).where(place)
            key_id = conn.scalar(query.returning(console_sessions.c.key_id))
            if key_id is not None:
                owner = sa.select(api_keys.c.tenant_id).where(api_keys.c.key_id == key_id)
                _audit(conn, "session.end", key_id, conn.scalar(owner), self._now_ms())

        await self._database.write(write)
        self._found.forget()

    async def _find(self, token: str) -> _Session:
        if len(token) > _MAX_TOKEN_CHARACTERS:
            raise InvalidApiKey
        digest = _sha256(token)
        session = await self._found.get(
            digest, lambda: self._database.read(lambda conn: _read(conn, digest))
        )
        if session is None or session.expires_at_ms <= self._now_ms():
            raise InvalidApiKey
        return session


def csrf_token(token: str) -> str:
    """The header of a session's requests, which no page of another site can know."""
    return hmac.new(token.encode(), b"csrf", "sha256").hexdigest()


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _read(conn: Connection, digest: str) -> _Session | None:
    columns = console_sessions.c
    query = sa.select(columns.key_id, columns.key_hmac, columns.expires_at_ms)
    row = conn.execute(query.where(columns.token_sha256 == digest)).first()
    return None if row is None else _Session(*row)


def _too_many(conn: Connection, key_id: str, tenant_id: str, now_ms: int) -> Limited | None:
    """The refusal of a key or a tenant that has signed in too often lately, by the audit log."""
    line, begin_ms = audit_log.c, now_ms - 60_000
    whose = (
        ("This key", line.target == key_id, MAX_SIGN_INS),
        ("Your account", line.tenant_id == tenant_id, MAX_SIGN_INS_OF_TENANT),
    )
    for who, is_its, most in whose:
        query = sa.select(line.at_ms).where(line.at_ms > begin_ms, line.action == _BEGIN, is_its)
        at_ms = conn.scalar(query.order_by(line.at_ms.desc()).offset(most - 1).limit(1))
        if at_ms is not None:
            wait_s = (at_ms - begin_ms) / 1000
            message = f"{who} has signed in {most} times within a minute. Try again later."
            return Limited(message, retry_after_s=wait_s)
    return None


def _make_room(conn: Connection, key_id: str, now_ms: int) -> None:
    """Delete sessions that have expired, and the key's oldest if it has as many as it may."""
    columns = console_sessions.c
    conn.execute(sa.delete(console_sessions).where(columns.expires_at_ms <= now_ms))
    newest = (
        sa.select(columns.token_sha256)
        .where(columns.key_id == key_id)
        .order_by(columns.created_at_ms.desc(), columns.token_sha256)
        .limit(MAX_SESSIONS - 1)
    )
    is_older = columns.token_sha256.not_in(newest)
    conn.execute(sa.delete(console_sessions).where(columns.key_id == key_id, is_older))


def _audit(conn: Connection, action: str, key_id: str, tenant_id: str | None, now_ms: int) -> None:
    actor = key_id if key_id == _OPERATOR else f"key:{key_id}"
    record_audit(conn, tenant_id, action, target=key_id, at_ms=now_ms, actor=actor)
