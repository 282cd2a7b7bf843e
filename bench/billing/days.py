"""Sums of usage by day, for measurements that fill the sums by hour without posting."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.tables import USAGE_SUMS, usage_days, usage_rollups
from server.billing.usage import SUMS_OF_ROLLUP

_HOURS = usage_rollups.c
# The number is a literal: PostgreSQL takes two parameters for two different groups.
_DAY_OF_HOUR = _HOURS.hour_ms - _HOURS.hour_ms % sa.literal_column("86400000")


def fill_days(conn: Connection) -> None:
    """Insert the sums of days over all roll-ups; none may be there yet."""
    names = {"kind": _HOURS.kind, "key": _HOURS.key_id, "model": _HOURS.model}
    for dimension, name in names.items():
        query = sa.select(_HOURS.tenant_id, sa.literal(dimension), _DAY_OF_HOUR, name)
        query = query.add_columns(*(sa.func.sum(SUMS_OF_ROLLUP[column]) for column in USAGE_SUMS))
        query = query.group_by(_HOURS.tenant_id, _DAY_OF_HOUR, name)
        if dimension != "kind":
            query = query.where(_HOURS.kind.in_(SPEND_KINDS))
        key = ["tenant_id", "dimension", "day_ms", "name"]
        conn.execute(sa.insert(usage_days).from_select([*key, *USAGE_SUMS], query))
