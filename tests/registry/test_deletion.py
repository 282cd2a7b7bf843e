"""Deleted adapters and versions are hidden at once and can be restored during the retention."""

import pytest
from sqlalchemy import select

from registry.base.base_models import BaseModels
from registry.catalog.adapter_rows import live_object_keys
from registry.catalog.alias_rows import Canary, Target
from registry.catalog.catalog import RETENTION_S, Catalog
from registry.tables import adapter_events, audit_log
from tests.refusals import refused

A, B = "tenant-a", "tenant-b"


@pytest.fixture
def three(make_version):
    """Versions 1 to 3 of pirate; latest is 3, prod is 1."""
    return [make_version(content=c, alias="prod" if c == "1" else None) for c in "123"]


def test_deleted_adapters_are_listed_while_they_can_be_restored(
    catalog, connection, clock, make_version
):
    for name in ("parrot", "pirate", "robot"):
        make_version(name=name, content=name)
    make_version(tenant_id=B)
    catalog.delete_adapter(connection, B, "pirate")
    for name in ("robot", "pirate"):
        catalog.delete_adapter(connection, A, name)
        clock.now_s += 1
    listed = [name for name, _ in catalog.list_deleted(connection, A, 9)]
    assert listed == ["pirate", "robot"]
    assert [name for name, _ in catalog.list_deleted(connection, A, 1)] == ["pirate"]
    clock.now_s += RETENTION_S
    assert catalog.list_deleted(connection, A, 9) == []


def test_a_version_that_was_deleted_before_its_adapter_stays_deleted(catalog, connection, three):
    """The version stays deleted even if both were deleted in the same millisecond."""
    catalog.delete_version(connection, A, "pirate", 2)
    catalog.delete_adapter(connection, A, "pirate")
    catalog.restore_adapter(connection, A, "pirate")
    listed = catalog.list_versions(connection, A, "pirate", include_deleted=True)
    assert [(v.version, v.state) for v in listed] == [(3, "ready"), (2, "deleted"), (1, "ready")]


def test_a_name_that_is_uploaded_again_starts_without_its_old_aliases(
    catalog, connection, database, three, make_version
):
    with database.begin() as conn:
        catalog.delete_adapter(conn, A, "pirate")
    make_version(content="4")
    adapter = catalog.get_adapter(connection, A, "pirate")
    assert adapter.aliases == {"latest": Target(4)}
    with refused("not_deleted"):
        catalog.restore_adapter(connection, A, "pirate")
    assert catalog.restore_version(connection, A, "pirate", 2).ref == three[1].ref
    assert catalog.resolve(connection, A, "pirate@2") == three[1]


def test_a_version_that_an_alias_means_is_not_deleted(catalog, connection, three):
    catalog.set_alias(connection, A, "pirate", "prod", 1, Canary(3, 10))
    for number, aliases in ((1, ("prod",)), (3, ("latest", "prod"))):
        with refused("version_in_use", match=f"by {', '.join(aliases)};"):
            catalog.delete_version(connection, A, "pirate", number)


@pytest.mark.parametrize("number", [0, -1, 4, 10**12, 10**30])
def test_a_number_that_was_never_given_is_not_found(catalog, connection, three, number):
    for ask in (catalog.delete_version, catalog.restore_version):
        with refused("model_not_found"):
            ask(connection, A, "pirate", number)


def test_what_was_never_there_is_not_restored(catalog, connection):
    for name in ("pirate", "Pirate", ""):
        with refused("model_not_found"):
            catalog.restore_adapter(connection, A, name)


# ---- the retention ----


def test_a_purge_has_a_limit(catalog, connection, make_version, clock, monkeypatch):
    for content in map(str, range(5)):
        make_version(content=content)
        make_version(B, content=content)
    for tenant_id in (A, B):
        catalog.delete_adapter(connection, tenant_id, "pirate")
    clock.now_s += RETENTION_S + 1
    monkeypatch.setattr("registry.catalog.catalog._MAX_PURGED", 4)
    assert [catalog.purge_deleted(connection) for _ in range(4)] == [4, 4, 2, 0]


def test_a_gateway_whose_clock_is_late_restores_nothing_that_is_purged(
    catalog, base, connection, three, clock
):
    """Requests of a restored adapter without its objects would fail."""
    catalog.delete_version(connection, A, "pirate", 2)
    catalog.delete_adapter(connection, A, "pirate")
    early = Catalog(BaseModels(base), lambda: clock.now_s + RETENTION_S + 1)
    assert early.purge_deleted(connection) == 3
    with refused("retention_over"):
        catalog.restore_adapter(connection, A, "pirate")
    with refused("model_not_found"):
        catalog.resolve(connection, A, "pirate")


def test_an_object_is_in_use_until_its_last_version_is_purged(
    catalog, connection, make_version, three, clock
):
    twin = make_version(name="poet", content="2")
    theirs = make_version(B, content="2")
    keys = {version.object_key for version in (*three, theirs)} | {f"tenants/{A}/{'0' * 64}"}

    def live():
        return live_object_keys(connection, A, keys)

    everything = {version.object_key for version in three}
    assert twin.object_key == three[1].object_key
    assert live() == everything
    catalog.delete_adapter(connection, A, "pirate")
    assert live() == everything
    clock.now_s += RETENTION_S + 1
    catalog.purge_deleted(connection)
    assert live() == {twin.object_key}
    assert live_object_keys(connection, A, []) == set()


# ---- the audit log and events ----


def test_each_deletion_and_return_is_told(catalog, connection, three):
    def told():
        audit = connection.execute(select(audit_log).order_by(audit_log.c.audit_id)).all()
        events = connection.execute(select(adapter_events).order_by(adapter_events.c.event_id))
        return [(row.actor, row.action, row.target) for row in audit], [
            (row.kind, row.version) for row in events
        ]

    before = [len(rows) for rows in told()]
    for act in (catalog.delete_version, catalog.restore_version):
        act(connection, A, "pirate", 2, actor="key:k1")
    for act in (catalog.delete_adapter, catalog.restore_adapter):
        act(connection, A, "pirate", actor="key:k2")
    audit, events = (rows[count:] for rows, count in zip(told(), before, strict=True))
    assert audit == [
        ("key:k1", "version.delete", "tenant-a/pirate@2"),
        ("key:k1", "version.restore", "tenant-a/pirate@2"),
        ("key:k2", "adapter.delete", "tenant-a/pirate"),
        ("key:k2", "adapter.restore", "tenant-a/pirate"),
    ]
    assert events == [("removed", 2), ("restored", 2), ("removed", None), ("restored", None)]
