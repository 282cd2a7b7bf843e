"""INSERT in a database's own dialect, which can say what happens if the row exists already."""

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite


def upsert(dialect: str, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT to which `on_conflict_do_nothing` or `on_conflict_do_update` can be added.

    dialect: name of the connection's dialect, `conn.dialect.name`.
    """
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
