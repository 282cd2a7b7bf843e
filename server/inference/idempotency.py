"""Idempotency-Keys: the same request sent again gets the same answer, and costs nothing.

A key is claimed before anything of its request happens, and no claim stays for good:

    free -> claimed -> stored -> free, a day later
               |-> free: released, because the request came to nothing
               '-> free: its gateway died, and the next one or the claim's end frees it
"""

import functools
import hashlib
import json
import zlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from registry.errors import Limited
from server.database.clock import from_now, now_ms, postgres_now
from server.database.database import Database
from server.database.upsert import upsert
from server.inference import errors
from server.inference.attempts import attempt_ids, parent_of
from server.inference.tables import idempotency_keys

MAX_KEY_CHARACTERS = 255
MAX_KEYS_PER_TENANT = 10_000
"""Keys that a tenant may have; keys that are claimed at the same moment may exceed it."""
MAX_STORED_BYTES = 1 << 20
"""Compressed bytes of one stored answer, some 100,000 streamed tokens. Longer ones are not kept."""
CLAIM_SLACK_MS = 60_000
"""Time that a claim, as its hold, outlives its request's deadline, lest the request run twice."""
KEPT_MS = 24 * 3_600_000
PRUNED_AT_ONCE = 1000
PRUNE_INTERVAL_S = 60.0

_REPLAYED_AT_ONCE = 1 << 16
"""Bytes that are decompressed at a time, however few they were compressed to."""
_KEY = (idempotency_keys.c.tenant_id, idempotency_keys.c.endpoint, idempotency_keys.c.key)


@dataclass(frozen=True, slots=True)
class Claim:
    """One use of a key. request_id: of the request that is made under it, and of no other use."""

    tenant_id: str
    endpoint: str
    key: str
    body_sha256: str
    request_id: str

    @property
    def place(self) -> tuple[str, str, str]:
        """Primary key of the key's row."""
        return self.tenant_id, self.endpoint, self.key

    @classmethod
    def of(cls, tenant_id: str, endpoint: str, key: str, body: bytes, request_id: str) -> "Claim":
        """A new claim. body: of the request, as it was sent."""
        return cls(tenant_id, endpoint, key, hashlib.sha256(body).hexdigest(), request_id)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer to a key's request. body: compressed; None if it was too long to keep."""

    request_id: str
    status: int
    headers: dict[str, str]
    body: bytes | None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it was sent, one piece at a time."""
        decompressor, rest = zlib.decompressobj(), self.body or b""
        while rest:
            yield decompressor.decompress(rest, _REPLAYED_AT_ONCE)
            rest = decompressor.unconsumed_tail
        yield decompressor.flush()


class IdempotencyKeys:
    """The keys of all tenants, shared by the gateways of one database.

    claim_ms: how long a claim is valid, which is longer than a request can take.
    """

    def __init__(self, database: Database, *, claim_ms: int) -> None:
        self._database = database
        self.claim_ms = claim_ms

    async def claim(self, claim: Claim) -> StoredAnswer | None:
        """Return the key's stored answer, or None if the key is claimed now, to be stored or
        released.

        Raises Conflict if another body was sent with the key, if its request is under way, or if
        its answer was too long to keep, and Limited if the tenant has too many keys.
        """
        found = await self._database.write(lambda conn: claim_key(conn, claim, self.claim_ms))
        if found is None:
            return None
        if isinstance(found, Limited):
            raise found
        if found.body_sha256 != claim.body_sha256:
            raise errors.IdempotencyKeyMismatch
        if found.status is None:
            raise errors.IdempotencyKeyInUse
        if found.body is None:
            raise errors.IdempotentAnswerTooLong(found.request_id)
        return StoredAnswer(found.request_id, found.status, json.loads(found.headers), found.body)

    async def release(self, claim: Claim) -> None:
        """Free the key again, unless the claim had expired. Raises LedgerUnavailable."""
        await self._database.write(lambda conn: release_key(conn, claim))

    async def store(self, claim: Claim, answer: StoredAnswer) -> None:
        """Keep the answer for a day, unless the claim had expired. Raises LedgerUnavailable."""
        await self._database.write(lambda conn: store_answer(conn, claim, answer))

    async def prune(self) -> None:
        """A chore: delete answers that are older than a day, and expired claims."""
        while await self._database.write(prune_keys) == PRUNED_AT_ONCE:
            pass


# ---- in a transaction ----


def claim_key(conn: Connection, claim: Claim, claim_ms: int) -> "Row[Any] | Limited | None":
    """Claim a free or expired key, by the database's clock; else return the row that has it, or the
    fault of a tenant with as many keys as it may have.
    """
    values: dict[str, Any] = {
        "tenant_id": claim.tenant_id,
        "endpoint": claim.endpoint,
        "key": claim.key,
        "body_sha256": claim.body_sha256,
        "request_id": claim.request_id,
        "claim_ms": claim_ms,
    }
    if conn.dialect.name == "sqlite":
        values["here_ms"] = now_ms()
    if conn.execute(_claim_statement(conn.dialect.name), values).first() is not None:
        if _count(conn, claim.tenant_id) <= MAX_KEYS_PER_TENANT:
            return None
        release_key(conn, claim)
        # Returned: raised, it would make its whole group run again.
        return errors.too_many_idempotency_keys(MAX_KEYS_PER_TENANT)
    # The row exists for certain: the insert has locked it, even where it changed nothing.
    return conn.execute(sa.select(idempotency_keys).where(*_is_key(claim))).one()


@functools.cache
def _claim_statement(dialect: str) -> Any:
    """The statement of `claim_key`; made once, since a claim then takes a third of the time."""
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
    """Free the key; whether the claim still had it."""
    return conn.execute(sa.delete(idempotency_keys).where(*_is_held(claim))).rowcount == 1


def take_over_key(conn: Connection, request_id: str) -> bool:
    """Return whether a repeat gets the answer that a dead gateway made; if not, free its key."""
    row = idempotency_keys.c
    # The claim of a request for a route has the request's own id, its answer that of an attempt.
    parent_id = parent_of(request_id)
    request_ids = [parent_id, *attempt_ids(parent_id)] if parent_id else [request_id]
    is_of_request = row.request_id.in_(request_ids)
    # An answer that was too long to be kept has a status, and no body that a repeat could get.
    status = conn.scalar(sa.select(row.status).where(is_of_request, row.body.is_not(None)))
    if status is not None and status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return True
    conn.execute(sa.delete(idempotency_keys).where(is_of_request))
    return False


def store_answer(conn: Connection, claim: Claim, answer: StoredAnswer) -> bool:
    """Store the answer; whether the claim still had the key."""
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
    """Delete expired rows; how many there were, PRUNED_AT_ONCE at most.

    Claims stay a day longer: if the clock is set ahead, their requests may still store an answer.
    """
    row, now = idempotency_keys.c, now_ms()
    is_claim = row.status.is_(None) & (row.expires_at_ms >= from_now(conn, now, -KEPT_MS))
    old = sa.select(*_KEY).where(row.expires_at_ms < from_now(conn, now, 0), ~is_claim)
    old = old.limit(PRUNED_AT_ONCE).with_for_update(skip_locked=True)
    return conn.execute(sa.delete(idempotency_keys).where(sa.tuple_(*_KEY).in_(old))).rowcount


def _is_key(claim: Claim) -> "tuple[sa.ColumnElement[bool], ...]":
    return tuple(column == value for column, value in zip(_KEY, claim.place, strict=True))


def _is_held(claim: Claim) -> "tuple[sa.ColumnElement[bool], ...]":
    columns = idempotency_keys.c
    return (*_is_key(claim), columns.request_id == claim.request_id, columns.status.is_(None))


def _count(conn: Connection, tenant_id: str) -> int:
    mine = sa.select(idempotency_keys.c.key).where(idempotency_keys.c.tenant_id == tenant_id)
    counted = mine.limit(MAX_KEYS_PER_TENANT + 1).subquery()
    return conn.scalar(sa.select(sa.func.count()).select_from(counted)) or 0
