"""The three limits that tenants, keys, adapters and base models may have, and their amounts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sqlalchemy import Table
from sqlalchemy.engine import Connection, RowMapping

from server.database.upsert import put
from server.limits.rules import Limit, Metric, Scope

# Limits by the names of their columns, with the limiter's names of the metrics.
LIMITS: dict[str, Metric] = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "max_concurrency": "concurrency",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Amounts of limits; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None

    @classmethod
    def read(cls, row: RowMapping | None, prefix: str = "") -> "Amounts":
        """Read the amounts of a row that has a column for each; without a row there is no limit.

        prefix: what the columns' names begin with.
        """
        return cls(**{name: row[prefix + name] for name in LIMITS}) if row else cls()

    def limits(self, scope: Scope, scope_id: str) -> tuple[Limit, ...]:
        """The limits that are set, in the limiter's form."""
        return tuple(
            Limit(metric, scope, scope_id, amount)
            for name, metric in LIMITS.items()
            if (amount := getattr(self, name)) is not None
        )

    def write(self, conn: Connection, table: Table, key: Mapping[str, str]) -> None:
        """Insert a row of these amounts, or set those of the row with its primary key.

        key: the row's other columns.
        """
        put(conn, table, {**key, **asdict(self)}, *LIMITS)
