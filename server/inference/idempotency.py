"""Idempotency-Keys: the same request sent again gets the same answer, and costs nothing.

A key is claimed before anything of its request happens, and no claim stays:

    free -> claimed -> stored -> free, a day later
               |-> free: let go, because nothing came of it
               '-> free: run out, because its gateway died
"""

import functools
import hashlib
import json
import uuid
import zlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from server.database.clock import from_now, now_ms, postgres_now
from server.database.database import Database
from server.database.upsert import upsert
from server.inference import errors
from server.inference.tables import idempotency_keys

MAX_KEY_CHARACTERS = 255
MAX_KEYS_PER_TENANT = 10_000
"""More can be there by as many as were claimed in the same moment."""
MAX_STORED_BYTES = 1 << 20
"""Of one answer, compressed: some 100,000 streamed tokens. A longer one is not kept."""
CLAIM_SLACK_MS = 60_000
"""A claim outlives its request's deadline, as its hold does: it must not run a second time."""
KEPT_MS = 24 * 3_600_000
PRUNED_AT_ONCE = 1000
PRUNE_INTERVAL_S = 60.0

_REPLAYED_AT_ONCE = 1 << 16
"""Bytes that are decompressed at a time, whatever they were compressed to."""
_KEY = (idempotency_keys.c.tenant_id, idempotency_keys.c.endpoint, idempotency_keys.c.key)


@dataclass(frozen=True, slots=True)
class Claim:
    """One use of a key. claim_id: tells it from those before and after it."""

    tenant_id: str
    endpoint: str
    key: str
    body_sha256: str
    claim_id: str

    @classmethod
    def of(cls, tenant_id: str, endpoint: str, key: str, body: bytes) -> "Claim":
        """body: of the request, as it was sent."""
        return cls(tenant_id, endpoint, key, hashlib.sha256(body).hexdigest(), uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What a key's request was answered. body: compressed; None for one that was too long."""

    request_id: str
    status: int
    headers: dict[str, str]
    body: bytes | None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it was sent, a piece at a time."""
        decompressor, rest = zlib.decompressobj(), self.body or b""
        while rest:
            yield decompressor.decompress(rest, _REPLAYED_AT_ONCE)
            rest = decompressor.unconsumed_tail
        yield decompressor.flush()


class IdempotencyKeys:
    """The keys of all tenants, shared by the gateways of one database.

    claim_ms: how long a claim is good for, more than a request can take.
    """

    def __init__(self, database: Database, *, claim_ms: int) -> None:
        self._database = database
        self.claim_ms = claim_ms

    async def claim(self, claim: Claim) -> StoredAnswer | None:
        """None: the key is ours, to be stored or let go. Else what it was answered before.

        Raises Conflict where another request has the key, now or before, and Limited where the
        tenant has too many.
        """
        found = await self._database.write(lambda conn: claim_key(conn, claim, self.claim_ms))
        if found is None:
            return None
        if isinstance(found, _TooMany):
            raise errors.too_many_idempotency_keys(MAX_KEYS_PER_TENANT)
        if found.body_sha256 != claim.body_sha256:
            raise errors.IdempotencyKeyMismatch
        if found.status is None:
            raise errors.IdempotencyKeyInUse
        if found.body is None:
            raise errors.IdempotentAnswerTooLong(found.request_id)
        return StoredAnswer(found.request_id, found.status, json.loads(found.headers), found.body)

    async def release(self, claim: Claim) -> None:
        """The key is free again; nothing when the claim had run out. Raises LedgerUnavailable."""
        await self._database.write(lambda conn: release_key(conn, claim))

    async def store(self, claim: Claim, answer: StoredAnswer) -> None:
        """For a day; nothing when the claim had run out. Raises LedgerUnavailable."""
        await self._database.write(lambda conn: store_answer(conn, claim, answer))

    async def prune(self) -> None:
        """A chore: forget what is older than a day, and claims that ran out."""
        while await self._database.write(prune_keys) == PRUNED_AT_ONCE:
            pass


# ---- in a transaction ----


class _TooMany:
    """The tenant has as many keys as it may have."""


def claim_key(conn: Connection, claim: Claim, claim_ms: int) -> "Row[Any] | _TooMany | None":
    """Take a key that is free or has run out, on the database's clock; else the row that has it."""
    values: dict[str, Any] = {
        "tenant_id": claim.tenant_id,
        "endpoint": claim.endpoint,
        "key": claim.key,
        "body_sha256": claim.body_sha256,
        "request_id": claim.claim_id,
        "claim_ms": claim_ms,
    }
    if conn.dialect.name == "sqlite":
        values["here_ms"] = now_ms()
    if conn.execute(_claim_statement(conn.dialect.name), values).first() is not None:
        if _count(conn, claim.tenant_id) <= MAX_KEYS_PER_TENANT:
            return None
        release_key(conn, claim)
        return _TooMany()
    # There for certain: the insert has locked it, also where it left it alone.
    return conn.execute(sa.select(idempotency_keys).where(*_is_key(claim))).one()


@functools.cache
def _claim_statement(dialect: str) -> Any:
    """The statement of `claim_key`; made once, a claim takes a third of the time."""
    now: Any = sa.bindparam("here_ms", type_=sa.BigInteger)
    if dialect != "sqlite":
        now = postgres_now()
    insert = upsert(dialect, idempotency_keys).values(
        created_at_ms=now,
        expires_at_ms=now + sa.bindparam("claim_ms", type_=sa.BigInteger),
    )
    of_new = ("body_sha256", "request_id", "created_at_ms", "expires_at_ms")
    statement = insert.on_conflict_do_update(
        index_elements=list(_KEY),
        set_={name: insert.excluded[name] for name in of_new}
        | dict.fromkeys(("status", "headers", "body")),
        where=idempotency_keys.c.expires_at_ms < now,
    )
    return statement.returning(idempotency_keys.c.key)


def release_key(conn: Connection, claim: Claim) -> bool:
    """Whether the claim still had it."""
    return conn.execute(sa.delete(idempotency_keys).where(*_is_held(claim))).rowcount == 1


def store_answer(conn: Connection, claim: Claim, answer: StoredAnswer) -> bool:
    """Whether the claim still had the key."""
    values = {
        "request_id": answer.request_id,
        "status": answer.status,
        "headers": json.dumps(answer.headers),
        "body": answer.body,
        "expires_at_ms": from_now(conn, now_ms(), KEPT_MS),
    }
    query = sa.update(idempotency_keys).where(*_is_held(claim)).values(values)
    return conn.execute(query).rowcount == 1


def prune_keys(conn: Connection) -> int:
    """How many were forgotten; PRUNED_AT_ONCE at most."""
    old = sa.select(*_KEY).where(idempotency_keys.c.expires_at_ms < from_now(conn, now_ms(), 0))
    old = old.limit(PRUNED_AT_ONCE).with_for_update(skip_locked=True)
    return conn.execute(sa.delete(idempotency_keys).where(sa.tuple_(*_KEY).in_(old))).rowcount


def _is_key(claim: Claim) -> "tuple[sa.ColumnElement[bool], ...]":
    wanted = (claim.tenant_id, claim.endpoint, claim.key)
    return tuple(column == value for column, value in zip(_KEY, wanted, strict=True))


def _is_held(claim: Claim) -> "tuple[sa.ColumnElement[bool], ...]":
    columns = idempotency_keys.c
    return (*_is_key(claim), columns.request_id == claim.claim_id, columns.status.is_(None))


def _count(conn: Connection, tenant_id: str) -> int:
    mine = sa.select(idempotency_keys.c.key).where(idempotency_keys.c.tenant_id == tenant_id)
    counted = mine.limit(MAX_KEYS_PER_TENANT + 1).subquery()
    return conn.scalar(sa.select(sa.func.count()).select_from(counted)) or 0
