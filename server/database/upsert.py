"""An INSERT in the own dialect of a database: it can say what happens to a row that is there."""

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite


def upsert(dialect: str, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT to which `on_conflict_do_nothing` or `on_conflict_do_update` can be added.

    dialect: the name of a connection's, as in `conn.dialect.name`.
    """
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
