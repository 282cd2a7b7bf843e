"""Holds: what every request may cost, reserved before it is sent to an engine.

A hold ends once: posted with the usage event of the engine's end record, or voided when that engine
can no longer end it.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.audit import record_audit
from server.billing.tables import holds
from server.database.clock import database_now_ms, from_now, now_ms, postgres_now
from server.limits.rules import Limit, Scope

HoldState = Literal["open", "posted", "voided"]

MAX_VOIDED_AT_ONCE = 500
_MAX_OPEN = 10_000
"""Open holds of one limit that are told; one with more seats taken is full anyway."""

_SCOPES: dict[Scope, sa.Column[str]] = {
    "tenant": holds.c.tenant_id,
    "key": holds.c.key_id,
    "adapter": holds.c.adapter_id,
}

# Made once: a hold took 390 us of a processor when each made its own, and takes 140.
_INSERT = sa.insert(holds)
_INSERT_FROM_NOW = _INSERT.values(
    expires_at_ms=postgres_now() + sa.bindparam("lifetime_ms", type_=sa.BigInteger)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What a request may cost, reserved: its prompt and `token_lease` completion tokens.

    model: the name that was asked for.   expires_at_ms: past the request's deadline in the engine.
    failed_at_ms: when the gateway answered with an error of ours; it is rated 0.
    cancelled_at_ms: when its tenant asked to end it.
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
    adapter_id: str | None = None
    adapter_version: int | None = None
    adapter_digest: str | None = None
    state: HoldState = "open"
    resolved_at_ms: int | None = None
    failed_at_ms: int | None = None
    cancelled_at_ms: int | None = None


_NAMES = tuple(field.name for field in dataclasses.fields(Hold))


def open_hold(conn: Connection, hold: Hold) -> None:
    """A hold that expires as long after now, on the database's clock, as `hold` says after its
    creation. Its request may be sent once this is committed.
    """
    if conn.dialect.name == "sqlite":
        # It runs on this machine, whose clock the hold has.
        insert_hold(conn, hold)
        return
    values = _fields(hold)
    lifetime_ms = values.pop("expires_at_ms") - hold.created_at_ms
    conn.execute(_INSERT_FROM_NOW, {**values, "lifetime_ms": lifetime_ms})


def insert_hold(conn: Connection, hold: Hold) -> None:
    conn.execute(_INSERT, _fields(hold))


def extend_hold(
    conn: Connection, request_id: str, *, token_lease: int, amount_nanousd: int
) -> bool:
    """Cover `token_lease` completion tokens in all. False when the hold is no longer open."""
    query = sa.update(holds).where(holds.c.request_id == request_id, holds.c.state == "open")
    query = query.values(token_lease=token_lease, amount_nanousd=amount_nanousd)
    return conn.execute(query).rowcount == 1


def move_hold(conn: Connection, request_id: str, engine_id: str, lifetime_ms: int) -> bool:
    """To the engine that its request is sent to now; the one before never had it.

    It expires `lifetime_ms` from now. False when the hold is no longer open.
    """
    query = sa.update(holds).where(holds.c.request_id == request_id, holds.c.state == "open")
    expires_at_ms = from_now(conn, now_ms(), lifetime_ms)
    query = query.values(engine_id=engine_id, expires_at_ms=expires_at_ms)
    return conn.execute(query).rowcount == 1


def void_refused(conn: Connection, request_id: str, now_ms: int) -> bool:
    """Void a hold whose request was never sent, or was refused by the engine's own word.

    Never after an engine died or fell silent: it may have journaled the request. False when the
    hold is no longer open.
    """
    return resolve(conn, [request_id], "voided", now_ms) == 1


def note_failed(conn: Connection, request_id: str, now_ms: int) -> Hold | None:
    """The gateway answers with an error of ours: whatever ran is counted and rated 0.

    The hold as it is now, locked. Of a posted one the caller reverses what was charged.
    """
    query = sa.update(holds).where(holds.c.request_id == request_id, holds.c.failed_at_ms.is_(None))
    conn.execute(query.values(failed_at_ms=now_ms))
    return lock_holds(conn, [request_id]).get(request_id)


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

    Call it only with a complete journal read that began after `as_of_ms` and is posted: what has
    expired, is not open in the engine and has no end record, never will have one. Or when there is
    no journal any more.
    """
    query = sa.select(holds.c.request_id).where(
        holds.c.engine_id == engine_id, holds.c.state == "open", holds.c.expires_at_ms < as_of_ms
    )
    if still_open:
        query = query.where(holds.c.request_id.not_in(still_open))
    query = query.order_by(holds.c.expires_at_ms).limit(MAX_VOIDED_AT_ONCE).with_for_update()
    expired = list(conn.scalars(query))
    resolve(conn, expired, "voided", now_ms)
    return expired


def void_lost(conn: Connection, engine_id: str, *, actor: str, now_ms: int) -> tuple[int, int]:
    """Void expired holds of an engine whose journal is gone for good, as nobody else can.

    How many, MAX_VOIDED_AT_ONCE at most, and how many are open still.
    """
    voided = void_expired(
        conn, engine_id, as_of_ms=database_now_ms(conn), still_open=(), now_ms=now_ms
    )
    record_audit(
        conn,
        at_ms=now_ms,
        actor=actor,
        action="engine.lost",
        target=engine_id,
        detail=f"voided {len(voided)} holds",
    )
    query = sa.select(sa.func.count()).where(
        holds.c.engine_id == engine_id, holds.c.state == "open"
    )
    return len(voided), conn.scalar(query) or 0


def lock_holds(conn: Connection, request_ids: list[str]) -> dict[str, Hold]:
    """These holds, by request id, as they are until the transaction ends."""
    # In one order: two settlers that lock the same holds must not deadlock.
    query = sa.select(holds).where(holds.c.request_id.in_(request_ids))
    rows = conn.execute(query.order_by(holds.c.request_id).with_for_update())
    return {row.request_id: Hold(**row._mapping) for row in rows}


def resolve(conn: Connection, request_ids: list[str], state: HoldState, now_ms: int) -> int:
    """The terminal transition of open holds; how many were open."""
    if not request_ids:
        return 0
    query = sa.update(holds).where(holds.c.request_id.in_(request_ids), holds.c.state == "open")
    return conn.execute(query.values(state=state, resolved_at_ms=now_ms)).rowcount


def _fields(hold: Hold) -> dict[str, Any]:
    return {name: getattr(hold, name) for name in _NAMES}


def open_requests(conn: Connection, limit: Limit, now_ms: int) -> list[tuple[str, int]]:
    """(request_id, left_ms) of all that may be under way and count under a limit of seats."""
    query = (
        sa.select(holds.c.request_id, holds.c.expires_at_ms)
        .where(holds.c.state == "open", _SCOPES[limit.scope] == limit.scope_id)
        .where(holds.c.expires_at_ms > now_ms)
        .limit(_MAX_OPEN)
    )
    return [(row.request_id, row.expires_at_ms - now_ms) for row in conn.execute(query)]
