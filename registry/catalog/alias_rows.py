"""Rows of aliases and of their moves. Every query names the tenant."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from registry.tables import adapter_aliases as aliases
from registry.tables import alias_moves as moves

BUCKETS = 10_000
_BUCKETS_PER_PERCENT = BUCKETS // 100


@dataclass(frozen=True, slots=True)
class Canary:
    """A version on trial: `percent` (1..99) of the requests for an alias mean it."""

    version: int
    percent: int


@dataclass(frozen=True, slots=True)
class Target:
    """The meaning of an alias: a version, and perhaps a canary for a share of the requests."""

    version: int
    canary: Canary | None = None

    @property
    def versions(self) -> set[int]:
        return {self.version} | ({self.canary.version} if self.canary else set())

    def version_in(self, bucket: int) -> int:
        """The version for a bucket, 0..9999.

        The canary has the lowest buckets, so a request key that has the canary keeps it when the
        percentage rises.
        """
        if self.canary and bucket < self.canary.percent * _BUCKETS_PER_PERCENT:
            return self.canary.version
        return self.version

    def __str__(self) -> str:
        canary = f", {self.canary.percent} % to {self.canary.version}" if self.canary else ""
        return f"{self.version}{canary}"


@dataclass(frozen=True, slots=True)
class Move:
    """One change of an alias. target: its meaning from then on; None if it was removed."""

    move_id: int
    target: Target | None
    moved_at_ms: int
    moved_by: str


def bucket_of(adapter_id: str, alias: str, request_key: str) -> int:
    """Bucket of a request key, 0..9999; each adapter and alias distributes the keys differently."""
    text = "\0".join((adapter_id, alias, request_key))
    # The key is a caller's text, and half a surrogate pair in it must not fail the request.
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) % BUCKETS


def list_targets(
    conn: Connection, tenant_id: str, adapter_ids: Sequence[str]
) -> dict[str, dict[str, Target]]:
    """Targets by adapter_id and alias, the aliases in order of their names."""
    found: dict[str, dict[str, Target]] = {adapter_id: {} for adapter_id in adapter_ids}
    query = select(aliases).where(
        aliases.c.adapter_id.in_(adapter_ids), aliases.c.tenant_id == tenant_id
    )
    for row in conn.execute(query.order_by(aliases.c.adapter_id, aliases.c.alias)):
        target = make_target(row.version, row.canary_version, row.canary_percent)
        found[row.adapter_id][row.alias] = target
    return found


def move_alias(
    conn: Connection,
    tenant_id: str,
    adapter_id: str,
    alias: str,
    target: Target | None,
    now_ms: int,
    moved_by: str,
) -> None:
    """Let an alias mean a target, and note the move; None removes the alias."""
    columns = _columns(target)
    its = {"adapter_id": adapter_id, "alias": alias, "tenant_id": tenant_id}
    is_it = [aliases.c[name] == value for name, value in its.items()]
    row = columns | {"updated_at_ms": now_ms}
    if target is None:
        conn.execute(aliases.delete().where(*is_it))
    elif conn.execute(update(aliases).where(*is_it).values(row)).rowcount == 0:
        conn.execute(insert(aliases).values(its | row))
    conn.execute(insert(moves).values(moved_at_ms=now_ms, moved_by=moved_by, **its, **columns))


def list_moves(
    conn: Connection, tenant_id: str, adapter_id: str, alias: str, before: int | None, limit: int
) -> list[Move]:
    """Moves of an alias below the move_id `before`, newest first."""
    query = select(moves).where(
        moves.c.adapter_id == adapter_id,
        moves.c.alias == alias,
        moves.c.tenant_id == tenant_id,
    )
    if before is not None:
        query = query.where(moves.c.move_id < before)
    query = query.order_by(moves.c.move_id.desc()).limit(limit)
    return [_move(row) for row in conn.execute(query)]


def make_target(version: int, canary_version: int | None, canary_percent: int | None) -> Target:
    """Make a target from the columns of an alias or of a move."""
    if canary_version is None or canary_percent is None:
        return Target(version)
    return Target(version, Canary(canary_version, canary_percent))


def _move(row: Row[Any]) -> Move:
    target = None
    if row.version is not None:
        target = make_target(row.version, row.canary_version, row.canary_percent)
    return Move(row.move_id, target, row.moved_at_ms, row.moved_by)


def _columns(target: Target | None) -> dict[str, int | None]:
    canary = target.canary if target else None
    return {
        "version": target.version if target else None,
        "canary_version": canary.version if canary else None,
        "canary_percent": canary.percent if canary else None,
    }
