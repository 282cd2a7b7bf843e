"""Lineage of keys: which keys made a key, and which keys came of it.

A key is bound by every key above it: its maker, the maker's maker and so on, ended ones as well. A
rotated key is the same key with another secret: it counts in the same buckets of the limits.
"""

import json
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.accounts.tables import api_keys
from server.limits.amounts import Amounts
from server.limits.rules import Limit

MAX_CHAIN = 8
"""Most keys in a chain in which each key made the next, the first and the last counted. One request
charges the limits of all of them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """A key above another, as it is now.   limits: those that are set for it."""

    key_id: str
    scopes: frozenset[str]
    limits: tuple[Limit, ...]
    is_revoked: bool


def makers_of(conn: Connection, created_by: str | None) -> list[Maker]:
    """A key's maker, the maker's maker and so on, at most MAX_CHAIN."""
    found: list[Maker] = []
    while created_by is not None and len(found) < MAX_CHAIN:
        query = sa.select(api_keys)
        row = conn.execute(query.where(api_keys.c.key_id == created_by)).one()
        found.append(
            Maker(
                key_id=row.key_id,
                scopes=parse_scopes(row.scopes),
                limits=Amounts.read(row._mapping).limits("key", row.bucket_id),
                is_revoked=row.revoked_at_ms is not None,
            )
        )
        created_by = row.created_by
    return found


def bounded_scopes(scopes: frozenset[str], makers: list[Maker]) -> frozenset[str]:
    """The part of `scopes` that every key above has now; revoked and expired keys count as well."""
    if len(makers) >= MAX_CHAIN:  # such a chain is never made
        return frozenset()
    return scopes.intersection(*(maker.scopes for maker in makers))


def came_of(bucket_id: str, among: sa.ColumnElement[bool]) -> sa.Select[tuple[str]]:
    """Ids of the keys that meet the condition `among` and count in a bucket: rotations of its key,
    and all that these made, and those.
    """
    key = api_keys.c
    # Each key is followed upwards, by primary keys: there are many more ended keys than live ones,
    # and a walk downwards would meet all of them.
    first = sa.select(key.key_id.label("leaf"), key.created_by, key.bucket_id)
    line = first.where(among).cte("line", recursive=True)
    above = sa.select(line.c.leaf, key.created_by, key.bucket_id)
    line = line.union(above.where(key.key_id == line.c.created_by))
    return sa.select(line.c.leaf).where(line.c.bucket_id == bucket_id)


def parse_scopes(stored: str) -> frozenset[str]:
    return frozenset(json.loads(stored))
