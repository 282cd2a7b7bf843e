"""Adapters and their versions as rows. Every query names the tenant."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    false,
    func,
    insert,
    select,
    update,
)

from registry.catalog.alias_rows import Target, bucket_of, list_targets, make_target
from registry.ref import AdapterRef, BaseRef
from registry.tables import adapter_aliases as aliases
from registry.tables import adapter_versions as versions
from registry.tables import adapters

LATEST = "latest"
VersionState = Literal["ready", "deleted", "purged"]
READY: Final = "ready"
DELETED: Final = "deleted"
PURGED: Final = "purged"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltAdapter:
    """A canonical object and what is known of it, whatever version it is or becomes.

    rank: the highest of its modules.   tokenizer: JSON, what `registry.formats.own_tokenizer`
    found; None for nothing.   base_revision, base_model, base_variant: of the base model that it
    was checked for; see BaseRef.
    """

    digest: str
    object_key: str
    rank: int
    size_bytes: int
    base_revision: str
    base_model: str
    base_variant: str
    passport: dict[str, Any]
    tokenizer: str | None = None

    @property
    def base(self) -> BaseRef:
        """The base model that it was checked for."""
        return BaseRef(self.base_revision, self.base_model, self.base_variant)

    def ref_as(self, adapter_id: str, version: int) -> AdapterRef:
        """The reference of the object as this version of this adapter."""
        return AdapterRef(
            adapter_id, version, self.digest, self.object_key, self.rank, self.size_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Version(BuiltAdapter):
    """One version, immutable except for state (READY, DELETED, PURGED) and deleted_at_ms.

    response_template: JSON, the format of its tool calls or the format's name; None for the base
    model's.
    """

    adapter_id: str
    version: int
    state: VersionState
    created_at_ms: int
    created_by_key: str
    deleted_at_ms: int | None = None
    response_template: str | None = None

    @property
    def ref(self) -> AdapterRef:
        return self.ref_as(self.adapter_id, self.version)

    @property
    def built(self) -> BuiltAdapter:
        """The version's object without the version."""
        return BuiltAdapter(**{it.name: getattr(self, it.name) for it in fields(BuiltAdapter)})


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a tenant. latest: the version of the alias `latest`, which the name means."""

    adapter_id: str
    tenant_id: str
    name: str
    created_at_ms: int
    deleted_at_ms: int | None = None
    latest: Version | None = None
    aliases: dict[str, Target] = field(default_factory=dict)


def object_key(tenant_id: str, digest: str) -> str:
    """Key of a canonical object: shared by a tenant's equal adapters, never across tenants."""
    return f"tenants/{tenant_id}/{digest}"


def tenant_of(object_key: str) -> str:
    """Id of the tenant in a key that `object_key` made."""
    return object_key.split("/")[1]


def find_version(conn: Connection, tenant_id: str, name: str, number: int) -> Version | None:
    """The version of this number; None if there is no such version or it was deleted."""
    query = _ready_versions(tenant_id, name).where(versions.c.version == number)
    row = conn.execute(query).first()
    return to_version(row) if row else None


def find_aliased_version(
    conn: Connection, tenant_id: str, name: str, alias: str, request_key: str
) -> Version | None:
    """The version that the alias means for this request; None if there is no such name or alias."""
    meant = aliases.c.version.label("main"), aliases.c.canary_version, aliases.c.canary_percent
    query = (
        _ready_versions(tenant_id, name)
        .add_columns(*meant)
        .join(
            aliases,
            (aliases.c.adapter_id == versions.c.adapter_id)
            # One query reads both versions of a canary alias, which could move between two queries.
            & versions.c.version.in_([aliases.c.version, aliases.c.canary_version]),
        )
        .where(aliases.c.alias == alias)
    )
    rows = {row.version: row for row in conn.execute(query)}
    if not rows:
        return None
    row = next(iter(rows.values()))
    target = make_target(row.main, row.canary_version, row.canary_percent)
    chosen = target.version_in(bucket_of(row.adapter_id, alias, request_key))
    return to_version(rows[chosen])


def find_adapter(conn: Connection, tenant_id: str, name: str) -> Adapter | None:
    """The adapter of this name; None if there is no such adapter or it was deleted."""
    found = find_adapter_row(conn, tenant_id, name)
    return found if found and found.deleted_at_ms is None else None


def find_adapter_row(conn: Connection, tenant_id: str, name: str) -> Adapter | None:
    """The adapter of this name, even if deleted, then with the aliases that it had before."""
    query = select(adapters).where(adapters.c.tenant_id == tenant_id, adapters.c.name == name)
    return next(iter(with_aliases(conn, tenant_id, conn.execute(query).all())), None)


def owner_of(conn: Connection, adapter_id: str) -> str | None:
    """Tenant id of an adapter's owner, even if it is deleted; None without such an adapter."""
    query = select(adapters.c.tenant_id).where(adapters.c.adapter_id == adapter_id)
    return conn.execute(query).scalar()


def find_version_row(
    conn: Connection, tenant_id: str, adapter_id: str, number: int
) -> Version | None:
    """The version of this number, even if it is deleted or purged."""
    query = select(versions).where(
        versions.c.adapter_id == adapter_id,
        versions.c.version == number,
        versions.c.tenant_id == tenant_id,
    )
    row = conn.execute(query).first()
    return to_version(row) if row else None


def list_digests(conn: Connection, adapter_id: str, number: int | None = None) -> list[str]:
    """Digests of an adapter's versions, or of one of them, even if they are deleted or purged."""
    query = select(versions.c.digest).where(versions.c.adapter_id == adapter_id).distinct()
    if number is not None:
        query = query.where(versions.c.version == number)
    return list(conn.execute(query).scalars())


def find_same_version(
    conn: Connection,
    tenant_id: str,
    name: str,
    built: BuiltAdapter,
    response_template: str | None,
) -> Version | None:
    """The newest ready version of this adapter with the same bytes and tokenizer, for the same base
    model, and with this format of tool calls.
    """
    same = ("digest", "base_revision", "base_model", "tokenizer")
    query = _ready_versions(tenant_id, name).where(
        versions.c.response_template == response_template,
        *(versions.c[column] == getattr(built, column) for column in same),
    )
    row = conn.execute(query.order_by(versions.c.version.desc())).first()
    return to_version(row) if row else None


def live_object_keys(conn: Connection, tenant_id: str, keys: Collection[str]) -> set[str]:
    """The given object keys that a ready or restorable version of the tenant uses."""
    # Keys end in the digest, and digests are indexed.
    digests = {key.rpartition("/")[2] for key in keys}
    query = select(versions.c.object_key).where(
        versions.c.tenant_id == tenant_id,
        versions.c.digest.in_(digests),
        versions.c.object_key.in_(keys),
        versions.c.state != PURGED,
    )
    return set(conn.execute(query).scalars())


def adapter_names(conn: Connection, tenant_id: str) -> set[str]:
    query = select(adapters.c.name).where(
        adapters.c.tenant_id == tenant_id, adapters.c.deleted_at_ms.is_(None)
    )
    return set(conn.execute(query).scalars())


def count_versions(conn: Connection, tenant_id: str, name: str) -> int:
    """Number of ready versions of the adapter of this name."""
    query = _ready_versions(tenant_id, name).with_only_columns(func.count())
    return int(conn.execute(query).scalar_one())


def stored_bytes(conn: Connection, tenant_id: str) -> int:
    """Bytes of the tenant's objects that ready versions use, each object counted once."""
    objects = (
        select(versions.c.digest, versions.c.size_bytes)
        .where(versions.c.tenant_id == tenant_id, versions.c.state == READY)
        .distinct()
        .subquery()
    )
    return int(conn.execute(select(func.coalesce(func.sum(objects.c.size_bytes), 0))).scalar_one())


def lock_tenant(conn: Connection, tenant_id: str) -> None:
    """Lock the tenant's names, versions and quotas against changes until the transaction ends."""
    if conn.dialect.name == "postgresql":
        conn.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(tenant_id, 0))))
    else:
        # SQLite has one writer, and a write statement waits to be it even if it matches no row.
        conn.execute(update(adapters).where(false()).values(deleted_at_ms=None))


def insert_version(conn: Connection, tenant_id: str, version: Version) -> None:
    row = asdict(version) | {"tenant_id": tenant_id, "passport": json.dumps(version.passport)}
    conn.execute(insert(versions).values(row))


def next_version(conn: Connection, adapter_id: str) -> int:
    """Number for a new version: one more than the highest ever given, even to deleted versions."""
    query = select(func.max(versions.c.version)).where(versions.c.adapter_id == adapter_id)
    return (conn.execute(query).scalar() or 0) + 1


def is_named(tenant_id: str, name: str) -> tuple[ColumnElement[bool], ...]:
    """SQL for whether an adapter is the tenant's of this name, and not deleted."""
    return (
        adapters.c.tenant_id == tenant_id,
        adapters.c.name == name,
        adapters.c.deleted_at_ms.is_(None),
    )


def is_meant_by(table: Table) -> ColumnElement[bool]:
    """SQL for whether a row of this table, such as a pin, names the version."""
    return (versions.c.adapter_id == table.c.adapter_id) & (versions.c.version == table.c.version)


def with_aliases(conn: Connection, tenant_id: str, rows: Sequence[Row[Any]]) -> list[Adapter]:
    """Make the tenant's adapters from their rows, and read their aliases and `latest`."""
    ids = [row.adapter_id for row in rows]
    targets = list_targets(conn, tenant_id, ids)
    latest = _latest_versions(conn, tenant_id, ids)
    return [
        Adapter(**row._mapping, latest=latest.get(row.adapter_id), aliases=targets[row.adapter_id])
        for row in rows
    ]


def to_version(row: Row[Any]) -> Version:
    """Make a version from its row."""
    values = {it.name: row._mapping[it.name] for it in fields(Version)}
    return Version(**values | {"passport": json.loads(row.passport)})


def _ready_versions(tenant_id: str, name: str) -> Select[Any]:
    return (
        select(versions)
        .join(adapters, adapters.c.adapter_id == versions.c.adapter_id)
        .where(
            *is_named(tenant_id, name),
            versions.c.tenant_id == tenant_id,
            versions.c.state == READY,
        )
    )


def _latest_versions(
    conn: Connection, tenant_id: str, adapter_ids: list[str]
) -> dict[str, Version]:
    query = (
        select(versions)
        .join(aliases, is_meant_by(aliases))
        .where(
            aliases.c.adapter_id.in_(adapter_ids),
            aliases.c.alias == LATEST,
            aliases.c.tenant_id == tenant_id,
        )
    )
    rows = conn.execute(query).all()
    # A condition on the versions' tenant makes SQLite read all versions: 250 ms a page of 100,000.
    assert all(row.tenant_id == tenant_id for row in rows)
    return {row.adapter_id: to_version(row) for row in rows}
