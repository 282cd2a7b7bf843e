"""Reads long results a page at a time, so that every statement is short and few rows are held."""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

PAGE_SIZE = 1000


def pages(
    conn: Connection, query: sa.Select[Any], *key: sa.ColumnElement[Any], size: int = PAGE_SIZE
) -> Iterator[list[RowMapping]]:
    """Yield the rows of a query in pages, in the order of `key`.

    key: columns of the query, which no two of its rows share.
    """
    query = query.order_by(*key).limit(size)
    rest: sa.ColumnElement[bool] = sa.true()
    while page := list(conn.execute(query.where(rest)).mappings()):
        yield page
        rest = sa.tuple_(*key) > sa.tuple_(*(sa.literal(page[-1][column]) for column in key))
