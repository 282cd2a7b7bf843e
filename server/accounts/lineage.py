"""API keys and their lineage: which keys made a key, and which keys came of it.

A key is bound by every key above it: its maker, the maker's maker and so on, ended ones as well. A
rotated key is the same key with another secret: it counts in the same buckets of the limits.
"""

import json
from dataclasses import dataclass, fields

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.accounts.tables import api_keys
from server.limits.amounts import Amounts

MAX_CHAIN = 8
"""Most keys in a chain in which each key made the next, the first and the last counted. One request
charges the limits of all of them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey(Amounts):
    """All facts about a key that may be listed, so not the key itself.

    created_by: id of the key that made it; None for the operator.   replaces: id of the key that it
    was rotated from.   bucket_id: id under which its limits count.
    Limits: None where it has none of its own; the tenant's, and those of its makers, hold as well.
    """

    key_id: str
    tenant_id: str
    bucket_id: str
    name: str
    prefix: str
    scopes: frozenset[str]
    created_at_ms: int
    created_by: str | None = None
    replaces: str | None = None
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None
    last_used_at_ms: int | None = None

    def is_live(self, now_ms: int) -> bool:
        is_expired = self.expires_at_ms is not None and self.expires_at_ms <= now_ms
        return self.revoked_at_ms is None and not is_expired

    @classmethod
    def of(cls, row: RowMapping) -> "ApiKey":
        values = {field.name: row[field.name] for field in fields(cls)}
        return cls(**values | {"scopes": parse_scopes(row["scopes"])})


def makers_of(conn: Connection, created_by: str | None) -> list[ApiKey]:
    """A key's maker, the maker's maker and so on, as they are now, at most MAX_CHAIN."""
    found: list[ApiKey] = []
    while created_by is not None and len(found) < MAX_CHAIN:
        query = sa.select(api_keys).where(api_keys.c.key_id == created_by)
        found.append(ApiKey.of(conn.execute(query).mappings().one()))
        created_by = found[-1].created_by
    return found


def bounded_scopes(scopes: frozenset[str], makers: list[ApiKey]) -> frozenset[str]:
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
