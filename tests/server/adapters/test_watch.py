"""A change of adapters through one gateway reaches the next request and engine of another."""

import asyncio
import logging
from dataclasses import replace

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from registry import adapter_rows, grants, pins
from registry.alias_rows import Canary
from registry.base_models import BaseModels
from registry.base_ref import BaseRef
from registry.catalog import Catalog
from registry.events import KEPT_MS, record_event
from registry.tables import adapter_events
from server.accounts.auth import Identity
from server.accounts.tenants import suspend_tenant
from server.adapters.names import resolve_adapter
from server.adapters.watch import AdapterWatch
from server.database.database import Database
from tests.registry.factories import make_base
from tests.registry.rows import add_version
from tests.server.factories import NOW_MS, Clock, make_tenant
from tests.server.fake_engines import FakeEngines, make_welcome

A, B = "tenant-a", "tenant-b"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def catalog(base):
    return Catalog(BaseModels(base))


@pytest.fixture
def engines():
    return FakeEngines()


@pytest.fixture
def clock():
    return Clock(NOW_MS)


@pytest.fixture
def watch(sqlite_database, engines, base, clock):
    """A watch that has ticked once, so that it sees only later events."""
    watch = AdapterWatch(sqlite_database, BaseModels(base), lambda: [(base, engines)], clock)
    tick(watch)
    engines.pinned.clear()
    return watch


def tick(watch):
    asyncio.run(watch.tick())


def publish(database, base, name="pirate", versions=1, tenant_id=A):
    """Insert versions as rows, without events."""
    it = BaseRef(base.base_revision, base.model_id, base.variant)
    for version in range(1, versions + 1):
        database.write_sync(lambda c, v=version: add_version(c, tenant_id, name, v, base=it))


def ref(database, name="pirate", version=1, tenant_id=A):
    return database.read_sync(
        lambda conn: adapter_rows.find_version(conn, tenant_id, name, version).ref
    )


def move(database, catalog, version, name="pirate", alias="latest"):
    database.write_sync(lambda conn: catalog.set_alias(conn, A, name, alias, version))


def change_pin(database, name="pirate", *, unpin=False):
    def write(conn):
        adapter = adapter_rows.find_adapter(conn, A, name)
        change = pins.unpin_adapter if unpin else pins.pin_adapter
        change(conn, adapter, actor="key:k1", now_ms=NOW_MS)

    database.write_sync(write)


# ---- two gateways ----


@pytest.fixture
def gateways(empty_postgres, tmp_path):
    url = empty_postgres()
    databases = [Database(url, data_dir=tmp_path / str(number)) for number in range(2)]
    yield databases
    for database in databases:
        database.close()


async def test_an_alias_moved_through_one_gateway_is_what_the_other_serves_and_tells_its_engine(
    gateways, catalog, base, engines, clock
):
    here, there = gateways
    publish(here, base, versions=2)
    identity = Identity(
        tenant_id=A, tenant_name="acme", key_id="k1", scopes=frozenset(), weight=1, cache_salt=""
    )
    watch = AdapterWatch(there, BaseModels(base), lambda: [(base, engines)], clock)

    async def served():
        """Resolve the name at the other gateway, as a request does, in this event loop."""
        return await there.read(
            lambda conn: resolve_adapter(conn, catalog, identity, "pirate", request_key="r")
        )

    await watch.tick()
    assert (await served()).ref.version == 2
    await here.write(lambda conn: catalog.set_alias(conn, A, "pirate", "latest", 1))
    assert (await served()).ref.version == 1
    await watch.tick()
    assert engines.prefetched == [(A, ref(here, version=1))]


# ---- prefetches ----


def test_what_a_name_came_to_mean_is_prefetched_once_for_its_tenant(
    watch, sqlite_database, catalog, base, engines
):
    publish(sqlite_database, base, versions=2)
    move(sqlite_database, catalog, 1)
    move(sqlite_database, catalog, 2, alias="beta")
    move(sqlite_database, catalog, 1, alias="stable")
    tick(watch)
    tick(watch)
    wanted = [(A, ref(sqlite_database, version=1)), (A, ref(sqlite_database, version=2))]
    assert engines.prefetched == wanted


def test_both_versions_of_a_weighted_alias_are_prefetched(
    watch, sqlite_database, catalog, base, engines
):
    publish(sqlite_database, base, versions=2)
    sqlite_database.write_sync(
        lambda conn: catalog.set_alias(conn, A, "pirate", "latest", 2, Canary(1, 10))
    )
    tick(watch)
    assert {adapter.version for _, adapter in engines.prefetched} == {1, 2}


def test_what_is_deleted_or_for_another_base_model_is_not_prefetched(
    watch, sqlite_database, catalog, base, engines
):
    publish(sqlite_database, base, "gone", versions=2)
    publish(sqlite_database, replace(base, base_revision="0" * 64), "old", versions=2)
    for name in ("gone", "old"):
        move(sqlite_database, catalog, 1, name)
    sqlite_database.write_sync(lambda conn: catalog.delete_adapter(conn, A, "gone"))
    tick(watch)
    assert engines.prefetched == []


def test_only_the_engines_of_its_own_base_model_are_told_among_equal_weights(
    sqlite_database, catalog, base, clock
):
    """An engine of a replaced base model of the same name and weights is told as well."""
    twin = replace(base, model_id="twin", served_as="another template")
    told = [(model, FakeEngines()) for model in (base, twin, twin)]
    watch = AdapterWatch(sqlite_database, BaseModels(base, twin), lambda: told, clock)
    tick(watch)
    its_own = BaseRef(twin.base_revision, "twin", twin.variant)
    for number in (1, 2):
        sqlite_database.write_sync(lambda c, n=number: add_version(c, A, version=n, base=its_own))
    move(sqlite_database, catalog, 1)
    change_pin(sqlite_database)
    tick(watch)
    wanted = ref(sqlite_database, version=1)
    assert [engines.prefetched for _, engines in told] == [[], [(A, wanted)], [(A, wanted)]]
    assert [engines.pinned[-1] for _, engines in told] == [(), (wanted,), (wanted,)]


def test_an_import_of_many_adapters_prefetches_only_so_many(
    watch, sqlite_database, catalog, base, engines
):
    for number in range(70):
        publish(sqlite_database, base, f"a{number}")
        sqlite_database.write_sync(
            lambda c, n=number: record_event(
                c, "moved", A, adapter_rows.find_adapter(c, A, f"a{n}").adapter_id, 1, NOW_MS
            )
        )
    tick(watch)
    assert len(engines.prefetched) == 64
    assert engines.prefetched[0] == (A, ref(sqlite_database, "a69"))


# ---- pins ----


def test_pins_are_told_when_one_comes_follows_or_goes(
    watch, sqlite_database, catalog, base, engines
):
    publish(sqlite_database, base, versions=2)
    publish(sqlite_database, base, "beta")
    change_pin(sqlite_database)
    tick(watch)
    change_pin(sqlite_database, "beta")
    tick(watch)
    move(sqlite_database, catalog, 1)
    tick(watch)
    tick(watch)  # no new events
    first, second = (ref(sqlite_database, version=version) for version in (1, 2))
    sqlite_database.write_sync(lambda conn: catalog.delete_adapter(conn, A, "pirate"))
    tick(watch)
    change_pin(sqlite_database, "beta", unpin=True)
    tick(watch)
    beta = ref(sqlite_database, "beta")
    told = [set(each) for each in engines.pinned]
    assert told == [{second}, {second, beta}, {first, beta}, {beta}, set()]


def test_every_start_of_an_engine_is_told_all_pins(watch, sqlite_database, base, engines):
    publish(sqlite_database, base)
    change_pin(sqlite_database)
    tick(watch)
    engines.is_ready = False
    tick(watch)
    engines.is_ready, engines.welcome = True, make_welcome(epoch=2)
    tick(watch)
    tick(watch)
    assert engines.pinned == [(ref(sqlite_database),)] * 2


def test_a_pin_that_came_while_no_engine_was_there_is_told_when_it_is(
    watch, sqlite_database, base, engines
):
    engines.is_ready = False
    publish(sqlite_database, base)
    change_pin(sqlite_database)
    tick(watch)
    assert engines.pinned == []
    engines.is_ready = True
    tick(watch)
    assert engines.pinned == [(ref(sqlite_database),)]


def test_once_a_minute_pins_are_told_again_and_old_events_go(
    watch, sqlite_database, base, engines, clock
):
    sqlite_database.write_sync(
        lambda conn: record_event(conn, "granted", A, "ad_1", None, NOW_MS - KEPT_MS)
    )
    tick(watch)
    assert engines.pinned == []
    clock.now += 60_000
    tick(watch)
    assert engines.pinned == [()]
    count = sa.select(sa.func.count()).select_from(adapter_events)
    assert sqlite_database.read_sync(lambda conn: conn.execute(count).scalar()) == 0


# ---- drafts ----


def test_drafts_go_with_a_version_and_with_an_adapter(
    watch, sqlite_database, catalog, base, engines
):
    publish(sqlite_database, base, versions=3)
    publish(sqlite_database, base, "beta")
    move(sqlite_database, catalog, 3)
    digests = [ref(sqlite_database, version=number).digest for number in (1, 2, 3)]
    sqlite_database.write_sync(lambda conn: catalog.delete_version(conn, A, "pirate", 2))
    tick(watch)
    tick(watch)
    assert engines.forgotten == [(A, digests[1])]
    engines.forgotten.clear()
    sqlite_database.write_sync(lambda conn: catalog.delete_adapter(conn, A, "pirate"))
    tick(watch)
    assert sorted(engines.forgotten) == sorted((A, digest) for digest in digests)


def test_drafts_go_from_whom_an_adapter_was_shared_with(
    watch, sqlite_database, catalog, base, engines
):
    publish(sqlite_database, base)
    digest = ref(sqlite_database).digest
    adapter = sqlite_database.read_sync(lambda c: adapter_rows.find_adapter(c, A, "pirate"))
    for tenant_id in (B, "tenant-c"):
        sqlite_database.write_sync(
            lambda c, t=tenant_id: grants.grant(c, adapter, t, granted_by="key:k1", now_ms=NOW_MS)
        )
    sqlite_database.write_sync(
        lambda c: grants.revoke(c, adapter, B, actor="key:k1", now_ms=NOW_MS)
    )
    tick(watch)
    assert engines.forgotten == [(B, digest)]
    sqlite_database.write_sync(lambda c: catalog.delete_adapter(c, A, "pirate"))
    tick(watch)
    assert sorted(engines.forgotten[1:]) == [(A, digest), ("tenant-c", digest)]


def test_all_drafts_of_a_suspended_tenant_go(watch, sqlite_database, engines):
    tenant = make_tenant(sqlite_database)
    sqlite_database.write_sync(lambda c: suspend_tenant(c, tenant.tenant_id, now_ms=NOW_MS))
    tick(watch)
    tick(watch)
    assert engines.forgotten == [(tenant.tenant_id, None)]


# ---- a failing database, and the cost of a tick ----


def test_a_database_that_is_away_is_logged_once_and_nothing_is_lost(
    watch, sqlite_database, catalog, base, engines, caplog
):
    publish(sqlite_database, base, versions=2)
    move(sqlite_database, catalog, 1)

    def refuse(conn, cursor, statement, *_):
        raise sa.exc.OperationalError(statement, None, Exception("the disk is away"))

    with caplog.at_level(logging.WARNING, "server.adapters.watch"):
        event.listen(sqlite_database.engine, "before_cursor_execute", refuse)
        tick(watch)
        tick(watch)
        event.remove(sqlite_database.engine, "before_cursor_execute", refuse)
    assert len(caplog.records) == 1
    assert engines.prefetched == []
    tick(watch)
    assert engines.prefetched == [(A, ref(sqlite_database, version=1))]


def test_a_quiet_tick_is_one_query(watch, sqlite_database):
    statements = []

    def note(conn, cursor, statement, *_):
        if not statement.startswith("PRAGMA"):
            statements.append(statement)

    event.listen(sqlite_database.engine, "before_cursor_execute", note)
    tick(watch)
    event.remove(sqlite_database.engine, "before_cursor_execute", note)
    assert len([each for each in statements if each.startswith("SELECT")]) == 1
