"""INSERT in a database's own dialect, which can say what happens if the row exists already."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, RowMapping, Table
from sqlalchemy.dialects import postgresql, sqlite


def upsert(dialect: str, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT to which `on_conflict_do_nothing` or `on_conflict_do_update` can be added.

    dialect: name of the connection's dialect, `conn.dialect.name`.
    """
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def put(conn: Connection, table: Table, row: Mapping[str, Any], *changed: str) -> RowMapping:
    """Insert a row, or set the columns `changed` of the one with its primary key. Returns it."""
    insert = upsert(conn.dialect.name, table).values(**row)
    changes = {name: insert.excluded[name] for name in changed}
    query = insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=changes)
    return conn.execute(query.returning(*table.c)).mappings().one()
