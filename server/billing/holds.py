"""Holds: the cost of each request, reserved before the request is sent to an engine.

A hold ends once: it is posted with the usage event of the engine's end record, or voided when the
engine can no longer end the request.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import record_audit
from server.billing.tables import IS_OPEN, holds
from server.database.clock import database_now_ms, from_now, now_ms, postgres_now

HoldState = Literal["open", "posted", "voided"]

MAX_VOIDED_AT_ONCE = 500

# Built once: a hold takes 140 us of processor time, and took 390 us when each built its own.
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
# The holds are locked in one order, so that two settlers cannot deadlock.
_LOCKED = (
    sa.select(holds)
    .where(holds.c.request_id.in_(_IDS))
    .order_by(holds.c.request_id)
    .with_for_update()
)
_RESOLVE = (
    sa.update(holds)
    .where(holds.c.request_id.in_(_IDS), IS_OPEN)
    .values(state=sa.bindparam("to_state"), resolved_at_ms=sa.bindparam("at_ms"))
)
_INSERT = sa.insert(holds)
_INSERT_FROM_NOW = _INSERT.values(
    expires_at_ms=postgres_now() + sa.bindparam("lifetime_ms", type_=sa.BigInteger)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The reserved cost of a request: its prompt and `token_lease` completion tokens.

    model: the model name in the request.   base_model: the name of the base model that serves it.
    expires_at_ms: a time past the request's deadline in the engine.
    failed_at_ms: when the gateway answered with a server error, so the request is rated 0.
    cancelled_at_ms: when the tenant asked to cancel the request.
    traceparent: the request's place in its trace, if it is traced.
    """

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    price_version: int
    amount_nanousd: int
    num_prompt_tokens: int
    token_lease: int
    engine_id: str
    created_at_ms: int
    expires_at_ms: int
    base_model: str = ""
    adapter_id: str | None = None
    adapter_version: int | None = None
    adapter_digest: str | None = None
    state: HoldState = "open"
    resolved_at_ms: int | None = None
    failed_at_ms: int | None = None
    cancelled_at_ms: int | None = None
    traceparent: str | None = None


_NAMES = tuple(field.name for field in dataclasses.fields(Hold))


def open_hold(conn: Connection, hold: Hold) -> None:
    """Insert a hold whose lifetime begins now on the database's clock.

    Its lifetime is `expires_at_ms` less `created_at_ms`. The request may be sent once the hold is
    committed.
    """
    if conn.dialect.name == "sqlite":
        # SQLite runs on this machine, whose clock set the times of the hold.
        insert_hold(conn, hold)
        return
    values = _fields(hold)
    lifetime_ms = values.pop("expires_at_ms") - hold.created_at_ms
    conn.execute(_INSERT_FROM_NOW, {**values, "lifetime_ms": lifetime_ms})


def insert_hold(conn: Connection, hold: Hold) -> None:
    conn.execute(_INSERT, _fields(hold))


def move_hold(conn: Connection, request_id: str, engine_id: str, lifetime_ms: int) -> bool:
    """Move a hold to the engine that its request is sent to now; the engine before never had it.

    The hold expires `lifetime_ms` from now. Returns False when it is no longer open.
    """
    query = sa.update(holds).where(holds.c.request_id == request_id, IS_OPEN)
    expires_at_ms = from_now(conn, now_ms(), lifetime_ms)
    query = query.values(engine_id=engine_id, expires_at_ms=expires_at_ms)
    return conn.execute(query).rowcount == 1


def void_refused(conn: Connection, request_id: str, now_ms: int) -> bool:
    """Void the hold of a request that was never sent, or that the engine said it refused.

    Do not call it after an engine died or stopped answering, since the engine may have journaled
    the request. Returns False when the hold is no longer open.
    """
    return resolve(conn, [request_id], "voided", now_ms) == 1


def note_failed(conn: Connection, request_id: str, now_ms: int) -> None:
    """Mark a request that the gateway answers with a server error: its tokens are rated 0.

    If it is posted, the caller reverses the charge.
    """
    query = sa.update(holds).where(holds.c.request_id == request_id, holds.c.failed_at_ms.is_(None))
    conn.execute(query.values(failed_at_ms=now_ms))


def get_hold(conn: Connection, request_id: str) -> Hold | None:
    row = conn.execute(sa.select(holds).where(holds.c.request_id == request_id)).first()
    return Hold(**row._mapping) if row else None


def void_expired(
    conn: Connection,
    engine_id: str,
    *,
    as_of_ms: int,
    still_open: Collection[str],
    now_ms: int,
) -> list[str]:
    """Void this engine's holds that expired before `as_of_ms` and can no longer be used.

    Call it only when a complete journal read that began after `as_of_ms` is posted, or when the
    journal is lost. An expired hold that is then not open in the engine and has no end record will
    never get one. Returns the voided request ids, at most MAX_VOIDED_AT_ONCE.
    """
    query = sa.select(holds.c.request_id).where(
        holds.c.engine_id == engine_id, IS_OPEN, holds.c.expires_at_ms < as_of_ms
    )
    if still_open:
        query = query.where(holds.c.request_id.not_in(still_open))
    query = query.order_by(holds.c.expires_at_ms).limit(MAX_VOIDED_AT_ONCE).with_for_update()
    expired = list(conn.scalars(query))
    resolve(conn, expired, "voided", now_ms)
    return expired


def renew(conn: Connection, engine_id: str, request_ids: Collection[str], as_of_ms: int) -> None:
    """Let holds last a minute more that have expired while their requests run, which happens only
    if the clock was set ahead.
    """
    query = sa.update(holds).where(holds.c.engine_id == engine_id, IS_OPEN)
    query = query.where(holds.c.expires_at_ms < as_of_ms, holds.c.request_id.in_(request_ids))
    conn.execute(query.values(expires_at_ms=as_of_ms + 60_000))


def void_lost(conn: Connection, engine_id: str, *, actor: str, now_ms: int) -> tuple[int, int]:
    """Void expired holds of an engine whose journal is gone for good, which the settler cannot do.

    Returns (voided, still open); at most MAX_VOIDED_AT_ONCE holds are voided. Writes an audit row.
    """
    voided = void_expired(
        conn, engine_id, as_of_ms=database_now_ms(conn), still_open=(), now_ms=now_ms
    )
    detail = f"voided {len(voided)} holds"
    record_audit(conn, None, "engine.lost", detail, target=engine_id, at_ms=now_ms, actor=actor)
    query = sa.select(sa.func.count()).where(holds.c.engine_id == engine_id, IS_OPEN)
    return len(voided), conn.scalar(query) or 0


def lock_holds(conn: Connection, request_ids: list[str]) -> dict[str, Hold]:
    """Lock holds until the transaction ends, and return those that exist by request id."""
    rows = conn.execute(_LOCKED, {"ids": request_ids})
    return {row.request_id: Hold(**row._mapping) for row in rows}


def resolve(conn: Connection, request_ids: list[str], state: HoldState, now_ms: int) -> int:
    """Give open holds their final state, and return how many were open."""
    if not request_ids:
        return 0
    values = {"ids": request_ids, "to_state": state, "at_ms": now_ms}
    return conn.execute(_RESOLVE, values).rowcount


def _fields(hold: Hold) -> dict[str, Any]:
    return {name: getattr(hold, name) for name in _NAMES}


def count_open(conn: Connection, tenant_id: str) -> int:
    """How many of a tenant's requests are under way, or have ended and are not settled."""
    query = sa.select(sa.func.count()).where(holds.c.tenant_id == tenant_id, IS_OPEN)
    return conn.scalar(query) or 0


def expired_by_engine(conn: Connection, now_ms: int) -> list[tuple[str, int, int]]:
    """Return (engine_id, number, when the first expired) of open holds that have expired."""
    first_ms = sa.func.min(holds.c.expires_at_ms)
    query = sa.select(holds.c.engine_id, sa.func.count(), first_ms)
    query = query.where(IS_OPEN, holds.c.expires_at_ms <= now_ms).group_by(holds.c.engine_id)
    return [(engine_id, number, at_ms) for engine_id, number, at_ms in conn.execute(query)]


def engines_with_holds(conn: Connection) -> set[str]:
    """Return the ids of the engines that have open holds."""
    return set(conn.scalars(sa.select(holds.c.engine_id).where(IS_OPEN).distinct()))
