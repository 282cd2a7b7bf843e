"""Sums of usage by day that a gateway of an older release left behind are made again.

Posting adds to them (`server.billing.entries`), but while gateways are replaced one after another,
one of a release without these sums may post as well. Hours are added up by every release.
"""

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.entries import lock_ledger
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.tables import USAGE_SUMS, usage_days, usage_rollups
from server.billing.usage import SUMS_OF_ROLLUP
from server.database.clock import database_now_ms
from server.database.database import Database

INTERVAL_S = 600.0
_DAY_MS = 86_400_000
_LOOKED_AT_DAYS = 3
MAX_AT_ONCE = 100
"""Days of tenants that are made again in one transaction."""

_HOURS, _DAYS = usage_rollups.c, usage_days.c
# The number is a literal: PostgreSQL takes two parameters for two different groups.
_DAY_OF_HOUR = _HOURS.hour_ms - _HOURS.hour_ms % sa.literal_column(str(_DAY_MS))
_NAMES = {"kind": _HOURS.kind, "key": _HOURS.key_id, "model": _HOURS.model}


async def mend_days(database: Database) -> None:
    """A chore: make the sums of the last days again where they are not those of their hours.

    Raises LedgerUnavailable.
    """

    def mend(conn: Connection) -> int:
        # Nobody posts between the look and the change.
        lock_ledger(conn)
        found = wrong_days(conn, MAX_AT_ONCE)
        for tenant_id, day_ms in found:
            place = (_DAYS.tenant_id == tenant_id, _DAYS.day_ms == day_ms)
            conn.execute(sa.delete(usage_days).where(*place))
            day = (_HOURS.hour_ms >= day_ms, _HOURS.hour_ms < day_ms + _DAY_MS)
            fill_days(conn, (_HOURS.tenant_id == tenant_id, *day))
        return len(found)

    if await database.read(lambda conn: wrong_days(conn, 1)):
        while await database.write(mend) == MAX_AT_ONCE:
            pass


def wrong_days(conn: Connection, limit: int) -> list[tuple[str, int]]:
    """(tenant_id, day_ms) of the last days whose sums are not those of their hours."""
    since_ms = (database_now_ms(conn) // _DAY_MS - _LOOKED_AT_DAYS + 1) * _DAY_MS
    compared = ("num_requests", "prompt_tokens", "completion_tokens", "amount_nanousd")
    hours = (
        sa.select(_HOURS.tenant_id, _DAY_OF_HOUR.label("day_ms"))
        .add_columns(*(sa.func.sum(SUMS_OF_ROLLUP[name]).label(name) for name in compared))
        .where(_HOURS.hour_ms >= since_ms)
        .group_by(_HOURS.tenant_id, _DAY_OF_HOUR)
        .subquery()
    )
    days = (
        sa.select(_DAYS.tenant_id, _DAYS.day_ms)
        .add_columns(*(sa.func.sum(_DAYS[name]).label(name) for name in compared))
        .where(_DAYS.dimension == "kind", _DAYS.day_ms >= since_ms)
        .where(_DAYS.tenant_id.in_(sa.select(hours.c.tenant_id)))
        .group_by(_DAYS.tenant_id, _DAYS.day_ms)
        .subquery()
    )
    same_day = (hours.c.tenant_id == days.c.tenant_id) & (hours.c.day_ms == days.c.day_ms)
    differs = sa.or_(days.c.day_ms.is_(None), *(hours.c[name] != days.c[name] for name in compared))
    query = sa.select(hours.c.tenant_id, hours.c.day_ms)
    query = query.select_from(hours.outerjoin(days, same_day)).where(differs).limit(limit)
    return [(tenant_id, int(day_ms)) for tenant_id, day_ms in conn.execute(query)]


def fill_days(conn: Connection, where: Iterable[sa.ColumnElement[bool]] = ()) -> None:
    """Insert the sums of days over the roll-ups that meet the conditions; none may be there yet."""
    for dimension, name in _NAMES.items():
        query = sa.select(_HOURS.tenant_id, sa.literal(dimension), _DAY_OF_HOUR, name)
        query = query.add_columns(*(sa.func.sum(SUMS_OF_ROLLUP[column]) for column in USAGE_SUMS))
        query = query.where(*where).group_by(_HOURS.tenant_id, _DAY_OF_HOUR, name)
        if dimension != "kind":
            query = query.where(_HOURS.kind.in_(SPEND_KINDS))
        key = ["tenant_id", "dimension", "day_ms", "name"]
        conn.execute(sa.insert(usage_days).from_select([*key, *USAGE_SUMS], query))
