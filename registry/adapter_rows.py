"""Adapters, their versions and aliases as rows. Every query names the tenant."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, false, func, insert, select, update

from registry.ref import AdapterRef
from registry.tables import adapter_aliases as aliases
from registry.tables import adapter_versions as versions
from registry.tables import adapters

LATEST = "latest"
READY = "ready"
DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Version:
    """One immutable version. passport: as validate.Passport.to_dict() gives it."""

    adapter_id: str
    version: int
    digest: str
    object_key: str
    rank: int
    size_bytes: int
    base_revision: str
    passport: dict[str, Any]
    state: str
    created_at_ms: int
    created_by_key: str

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(
            self.adapter_id,
            self.version,
            self.digest,
            self.object_key,
            self.rank,
            self.size_bytes,
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """A name of a tenant. latest: the version that the name alone means.   aliases: to versions."""

    adapter_id: str
    tenant_id: str
    name: str
    created_at_ms: int
    latest: Version | None = None
    aliases: dict[str, int] = field(default_factory=dict)


def find_version(
    conn: Connection, tenant_id: str, name: str, *, alias: str | None, number: int | None
) -> Version | None:
    """The version under an alias or a number, None if there is none or it was deleted."""
    query = (
        select(versions)
        .join(adapters, adapters.c.adapter_id == versions.c.adapter_id)
        .where(
            adapters.c.tenant_id == tenant_id,
            adapters.c.name == name,
            adapters.c.deleted_at_ms.is_(None),
            versions.c.tenant_id == tenant_id,
            versions.c.state == READY,
        )
    )
    if alias is None:
        query = query.where(versions.c.version == number)
    else:
        query = query.join(
            aliases,
            (aliases.c.adapter_id == versions.c.adapter_id)
            & (aliases.c.version == versions.c.version),
        ).where(aliases.c.alias == alias)
    row = conn.execute(query).first()
    return _version(row) if row else None


def find_adapter(conn: Connection, tenant_id: str, name: str) -> Adapter | None:
    """The adapter of this name, None if there is none or it was deleted."""
    found = conn.execute(
        select(adapters).where(
            adapters.c.tenant_id == tenant_id,
            adapters.c.name == name,
            adapters.c.deleted_at_ms.is_(None),
        )
    ).all()
    return next(iter(_with_aliases(conn, tenant_id, found)), None)


def list_adapters(conn: Connection, tenant_id: str, after: str | None, limit: int) -> list[Adapter]:
    """Adapters by name, those after `after`."""
    query = select(adapters).where(
        adapters.c.tenant_id == tenant_id, adapters.c.deleted_at_ms.is_(None)
    )
    if after is not None:
        query = query.where(adapters.c.name > after)
    found = conn.execute(query.order_by(adapters.c.name).limit(limit)).all()
    return _with_aliases(conn, tenant_id, found)


def list_versions(
    conn: Connection, tenant_id: str, adapter_id: str, before: int | None, limit: int
) -> list[Version]:
    """Versions that were not deleted, newest first, those below `before`."""
    query = select(versions).where(
        versions.c.adapter_id == adapter_id,
        versions.c.tenant_id == tenant_id,
        versions.c.state == READY,
    )
    if before is not None:
        query = query.where(versions.c.version < before)
    query = query.order_by(versions.c.version.desc()).limit(limit)
    return [_version(row) for row in conn.execute(query)]


def find_version_row(
    conn: Connection, tenant_id: str, adapter_id: str, number: int
) -> Version | None:
    """The version of this number, also a deleted one."""
    query = select(versions).where(
        versions.c.adapter_id == adapter_id,
        versions.c.version == number,
        versions.c.tenant_id == tenant_id,
    )
    row = conn.execute(query).first()
    return _version(row) if row else None


def find_same_version(
    conn: Connection, tenant_id: str, adapter_id: str, digest: str, base_revision: str
) -> Version | None:
    """The version of this adapter with the same bytes for the same base model."""
    query = select(versions).where(
        versions.c.tenant_id == tenant_id,
        versions.c.digest == digest,
        versions.c.adapter_id == adapter_id,
        versions.c.base_revision == base_revision,
        versions.c.state == READY,
    )
    row = conn.execute(query.order_by(versions.c.version.desc())).first()
    return _version(row) if row else None


def has_digest(conn: Connection, tenant_id: str, digest: str) -> bool:
    """Whether any version of the tenant, deleted ones too, is this object."""
    query = select(versions.c.version).where(
        versions.c.tenant_id == tenant_id, versions.c.digest == digest
    )
    return conn.execute(query.limit(1)).first() is not None


def adapter_names(conn: Connection, tenant_id: str) -> set[str]:
    query = select(adapters.c.name).where(
        adapters.c.tenant_id == tenant_id, adapters.c.deleted_at_ms.is_(None)
    )
    return set(conn.execute(query).scalars())


def stored_bytes(conn: Connection, tenant_id: str) -> int:
    """Bytes of the tenant's objects that a live version uses, each counted once."""
    objects = (
        select(versions.c.digest, versions.c.size_bytes)
        .where(versions.c.tenant_id == tenant_id, versions.c.state == READY)
        .distinct()
        .subquery()
    )
    return int(conn.execute(select(func.coalesce(func.sum(objects.c.size_bytes), 0))).scalar_one())


def lock_tenant(conn: Connection, tenant_id: str) -> None:
    """Until the transaction ends nobody else changes this tenant's names, versions or quotas."""
    if conn.dialect.name == "postgresql":
        conn.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(tenant_id, 0))))
    else:
        # SQLite has one writer: a statement that writes, even nothing, waits to be it.
        conn.execute(update(adapters).where(false()).values(deleted_at_ms=None))


def open_adapter(
    conn: Connection, tenant_id: str, name: str, *, new_adapter_id: str, now_ms: int
) -> str:
    """The adapter_id under this name: the one there is, revived if deleted, or a new one."""
    query = select(adapters.c.adapter_id).where(
        adapters.c.tenant_id == tenant_id, adapters.c.name == name
    )
    adapter_id = conn.execute(query).scalar()
    if adapter_id is not None:
        conn.execute(
            update(adapters)
            .where(adapters.c.adapter_id == adapter_id, adapters.c.tenant_id == tenant_id)
            .values(deleted_at_ms=None)
        )
        return str(adapter_id)
    conn.execute(
        insert(adapters).values(
            adapter_id=new_adapter_id, tenant_id=tenant_id, name=name, created_at_ms=now_ms
        )
    )
    return new_adapter_id


def insert_version(conn: Connection, tenant_id: str, version: Version) -> None:
    conn.execute(
        insert(versions).values(
            adapter_id=version.adapter_id,
            version=version.version,
            tenant_id=tenant_id,
            digest=version.digest,
            object_key=version.object_key,
            rank=version.rank,
            size_bytes=version.size_bytes,
            base_revision=version.base_revision,
            passport=json.dumps(version.passport),
            state=version.state,
            created_at_ms=version.created_at_ms,
            created_by_key=version.created_by_key,
        )
    )


def next_version(conn: Connection, adapter_id: str) -> int:
    """One more than any number ever given, deleted versions included."""
    query = select(func.max(versions.c.version)).where(versions.c.adapter_id == adapter_id)
    return (conn.execute(query).scalar() or 0) + 1


def move_alias(
    conn: Connection, tenant_id: str, adapter_id: str, alias: str, version: int, now_ms: int
) -> None:
    row = {"version": version, "updated_at_ms": now_ms}
    moved = conn.execute(
        update(aliases)
        .where(
            aliases.c.adapter_id == adapter_id,
            aliases.c.alias == alias,
            aliases.c.tenant_id == tenant_id,
        )
        .values(row)
    )
    if moved.rowcount == 0:
        conn.execute(
            insert(aliases).values(adapter_id=adapter_id, alias=alias, tenant_id=tenant_id, **row)
        )


def mark_deleted(conn: Connection, tenant_id: str, adapter_id: str, now_ms: int) -> None:
    """The adapter and its versions stay as rows; its aliases go."""
    conn.execute(
        aliases.delete().where(aliases.c.adapter_id == adapter_id, aliases.c.tenant_id == tenant_id)
    )
    conn.execute(
        update(versions)
        .where(
            versions.c.adapter_id == adapter_id,
            versions.c.tenant_id == tenant_id,
            versions.c.state == READY,
        )
        .values(state=DELETED, deleted_at_ms=now_ms)
    )
    conn.execute(
        update(adapters)
        .where(adapters.c.adapter_id == adapter_id, adapters.c.tenant_id == tenant_id)
        .values(deleted_at_ms=now_ms)
    )


def _with_aliases(conn: Connection, tenant_id: str, rows: Sequence[Row[Any]]) -> list[Adapter]:
    ids = [row.adapter_id for row in rows]
    found: dict[str, dict[str, int]] = {adapter_id: {} for adapter_id in ids}
    query = select(aliases).where(aliases.c.adapter_id.in_(ids), aliases.c.tenant_id == tenant_id)
    for row in conn.execute(query.order_by(aliases.c.alias)):
        found[row.adapter_id][row.alias] = row.version
    latest = _latest_versions(conn, tenant_id, ids)
    return [
        Adapter(
            row.adapter_id,
            row.tenant_id,
            row.name,
            row.created_at_ms,
            latest.get(row.adapter_id),
            found[row.adapter_id],
        )
        for row in rows
    ]


def _latest_versions(
    conn: Connection, tenant_id: str, adapter_ids: list[str]
) -> dict[str, Version]:
    query = (
        select(versions)
        .join(
            aliases,
            (aliases.c.adapter_id == versions.c.adapter_id)
            & (aliases.c.version == versions.c.version),
        )
        .where(
            aliases.c.alias == LATEST,
            versions.c.adapter_id.in_(adapter_ids),
            versions.c.tenant_id == tenant_id,
        )
    )
    return {row.adapter_id: _version(row) for row in conn.execute(query)}


def _version(row: Row[Any]) -> Version:
    return Version(
        adapter_id=row.adapter_id,
        version=row.version,
        digest=row.digest,
        object_key=row.object_key,
        rank=row.rank,
        size_bytes=row.size_bytes,
        base_revision=row.base_revision,
        passport=json.loads(row.passport),
        state=row.state,
        created_at_ms=row.created_at_ms,
        created_by_key=row.created_by_key,
    )
