"""Fills the sums of usage by day where a benchmark wrote entries and their roll-ups itself."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.receipts.rows import COST_KINDS
from server.billing.tables import usage_days, usage_rollups


def fill_days(conn: Connection) -> None:
    """Add up the roll-ups, as posting their entries would have done."""
    hours = usage_rollups.c
    sums = [column.name for column in usage_days.c if not column.primary_key]
    values = {name: hours[name] for name in sums if name != "num_requests"}
    num_served = hours.num_entries - hours.num_failed_requests
    values["num_requests"] = sa.case((hours.kind == "usage", num_served), else_=0)
    conn.execute(sa.delete(usage_days))
    for dimension, name in (("kind", hours.kind), ("key", hours.key_id), ("model", hours.model)):
        # The numbers are literals: PostgreSQL takes two parameters for two different groups.
        day_ms = hours.hour_ms - hours.hour_ms % sa.literal_column("86400000")
        query = sa.select(
            hours.tenant_id, sa.literal(dimension), day_ms, name,
            *(sa.func.sum(values[column]) for column in sums),
        ).group_by(hours.tenant_id, day_ms, name)  # fmt: skip
        if dimension != "kind":
            query = query.where(hours.kind.in_(COST_KINDS))
        key = ["tenant_id", "dimension", "day_ms", "name"]
        conn.execute(sa.insert(usage_days).from_select([*key, *sums], query))
