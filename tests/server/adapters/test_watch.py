"""A change of adapters, whichever gateway made it, reaches the engines of each."""

import asyncio
import logging
from dataclasses import replace

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from registry.base.base_models import BaseModels
from registry.catalog import adapter_rows, grants, pins
from registry.catalog.alias_rows import Canary
from registry.catalog.catalog import Catalog
from registry.catalog.events import KEPT_MS, record_event
from registry.ref import BaseRef
from registry.tables import adapter_events
from server.accounts.tenants import suspend_tenant
from server.adapters.watch import AdapterWatch
from tests.registry.factories import make_base
from tests.registry.rows import add_version
from tests.server.factories import NOW_MS, Clock, make_tenant
from tests.server.fake_engines import FakeEngines, make_welcome

A, B = "tenant-a", "tenant-b"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "model")


class World:
    """A gateway's watch, what it watches, and the engines of its base model, which it tells."""

    def __init__(self, database, base):
        self.database = database
        self.base = base
        self.catalog = Catalog(BaseModels(base))
        self.engines = FakeEngines()
        self.clock = Clock(NOW_MS)
        self.watch = self.make_watch([(base, self.engines)])

    def make_watch(self, told):
        bases = {base.model_id: base for base, _ in told}.values()
        return AdapterWatch(self.database, BaseModels(*bases), lambda: told, self.clock)

    def tick(self):
        asyncio.run(self.watch.tick())

    def write(self, fn, *args, **options):
        self.database.write_sync(lambda conn: fn(conn, *args, **options))

    def publish(self, name="pirate", versions=1, base=None):
        """Insert versions as rows, without events."""
        base = base or self.base
        it = BaseRef(base.base_revision, base.model_id, base.variant)
        for version in range(1, versions + 1):
            self.write(add_version, A, name, version, base=it)

    def ref(self, name="pirate", version=1):
        return self.database.read_sync(
            lambda conn: adapter_rows.find_version(conn, A, name, version).ref
        )

    def adapter(self, name="pirate"):
        return self.database.read_sync(lambda conn: adapter_rows.find_adapter(conn, A, name))

    def move(self, version, name="pirate", alias="latest", *canary):
        self.write(self.catalog.set_alias, A, name, alias, version, *canary)

    def delete(self, name="pirate"):
        self.write(self.catalog.delete_adapter, A, name)

    def pin(self, name="pirate"):
        self.write(pins.pin_adapter, self.adapter(name), actor="key:k1", now_ms=NOW_MS)


@pytest.fixture
def world(sqlite_database, base):
    """A world whose watch has ticked once, so that it sees only later events."""
    world = World(sqlite_database, base)
    world.tick()
    world.engines.pinned.clear()
    return world


# ---- prefetches ----


def test_what_a_name_came_to_mean_is_prefetched_once_for_its_tenant(world):
    world.publish(versions=2)
    world.move(1)
    world.move(2, alias="beta")
    world.move(1, alias="stable")
    world.tick()
    world.tick()
    wanted = [(A, world.ref(version=1)), (A, world.ref(version=2))]
    assert world.engines.prefetched == wanted


def test_both_versions_of_a_weighted_alias_are_prefetched(world):
    world.publish(versions=2)
    world.move(2, "pirate", "latest", Canary(1, 10))
    world.tick()
    assert {adapter.version for _, adapter in world.engines.prefetched} == {1, 2}


def test_what_is_deleted_or_for_another_base_model_is_not_prefetched(world):
    world.publish("gone", versions=2)
    world.publish("old", 2, replace(world.base, base_revision="0" * 64))
    for name in ("gone", "old"):
        world.move(1, name)
    world.delete("gone")
    world.tick()
    assert world.engines.prefetched == []


def test_only_the_engines_of_its_own_base_model_are_told_among_equal_weights(world, base):
    """An engine of a replaced base model of the same name and weights is told as well."""
    twin = replace(base, model_id="twin", served_as="another template")
    told = [(model, FakeEngines()) for model in (base, twin, twin)]
    world.watch = world.make_watch(told)
    world.tick()
    world.publish(versions=2, base=twin)
    world.move(1)
    world.pin()
    world.tick()
    wanted = world.ref(version=1)
    assert [engines.prefetched for _, engines in told] == [[], [(A, wanted)], [(A, wanted)]]
    assert [engines.pinned[-1] for _, engines in told] == [(), (wanted,), (wanted,)]


def test_an_import_of_many_adapters_prefetches_only_so_many(world):
    for number in range(70):
        world.publish(f"a{number}")
        world.write(record_event, "moved", A, world.adapter(f"a{number}").adapter_id, 1, NOW_MS)
    world.tick()
    assert len(world.engines.prefetched) == 64
    assert world.engines.prefetched[0] == (A, world.ref("a69"))


# ---- pins ----


def test_pins_are_told_when_one_comes_follows_or_goes(world):
    world.publish(versions=2)
    world.publish("beta")
    world.pin()
    world.tick()
    world.pin("beta")
    world.tick()
    world.move(1)
    world.tick()
    world.tick()  # no new events
    first, second = (world.ref(version=version) for version in (1, 2))
    world.delete()
    world.tick()
    world.write(pins.unpin_adapter, world.adapter("beta"), actor="key:k1", now_ms=NOW_MS)
    world.tick()
    beta = world.ref("beta")
    told = [set(each) for each in world.engines.pinned]
    assert told == [{second}, {second, beta}, {first, beta}, {beta}, set()]


def test_every_start_of_an_engine_is_told_all_pins_also_those_that_came_while_none_was_there(world):
    world.publish()
    world.pin()
    world.tick()
    world.engines.is_ready = False
    world.publish("beta")
    world.pin("beta")
    world.tick()
    for epoch in (2, 3):
        world.engines.is_ready, world.engines.welcome = True, make_welcome(epoch=epoch)
        world.tick()
        world.tick()
    told = [set(each) for each in world.engines.pinned]
    assert told == [{world.ref()}, *[{world.ref(), world.ref("beta")}] * 2]


def test_once_a_minute_pins_are_told_again_and_old_events_go(world):
    world.write(record_event, "granted", A, "ad_1", None, NOW_MS - KEPT_MS)
    world.tick()
    assert world.engines.pinned == []
    world.clock.now += 60_000
    world.tick()
    assert world.engines.pinned == [()]
    count = sa.select(sa.func.count()).select_from(adapter_events)
    assert world.database.read_sync(lambda conn: conn.execute(count).scalar()) == 0


# ---- drafts ----


def test_drafts_go_with_a_version_and_with_an_adapter(world):
    world.publish(versions=3)
    world.publish("beta")
    world.move(3)
    digests = [world.ref(version=number).digest for number in (1, 2, 3)]
    world.write(world.catalog.delete_version, A, "pirate", 2)
    world.tick()
    world.tick()
    assert world.engines.forgotten == [(A, digests[1])]
    world.engines.forgotten.clear()
    world.delete()
    world.tick()
    assert sorted(world.engines.forgotten) == sorted((A, digest) for digest in digests)


def test_drafts_go_from_whom_an_adapter_was_shared_with(world):
    world.publish()
    digest = world.ref().digest
    adapter = world.adapter()
    for tenant_id in (B, "tenant-c"):
        world.write(grants.grant, adapter, tenant_id, granted_by="key:k1", now_ms=NOW_MS)
    world.write(grants.revoke, adapter, B, actor="key:k1", now_ms=NOW_MS)
    world.tick()
    assert world.engines.forgotten == [(B, digest)]
    world.delete()
    world.tick()
    assert sorted(world.engines.forgotten[1:]) == [(A, digest), ("tenant-c", digest)]


def test_all_drafts_of_a_suspended_tenant_go(world):
    tenant = make_tenant(world.database)
    world.write(suspend_tenant, tenant.tenant_id, now_ms=NOW_MS)
    world.tick()
    world.tick()
    assert world.engines.forgotten == [(tenant.tenant_id, None)]


# ---- a failing database, and the cost of a tick ----


def test_a_database_that_is_away_is_logged_once_and_nothing_is_lost(world, caplog):
    world.publish(versions=2)
    world.move(1)

    def refuse(conn, cursor, statement, *_):
        raise sa.exc.OperationalError(statement, None, Exception("the disk is away"))

    with caplog.at_level(logging.WARNING, "server.adapters.watch"):
        event.listen(world.database.engine, "before_cursor_execute", refuse)
        world.tick()
        world.tick()
        event.remove(world.database.engine, "before_cursor_execute", refuse)
    assert len(caplog.records) == 1
    assert world.engines.prefetched == []
    world.tick()
    assert world.engines.prefetched == [(A, world.ref(version=1))]


def test_a_quiet_tick_is_one_query(world):
    statements = []

    def note(conn, cursor, statement, *_):
        if not statement.startswith("PRAGMA"):
            statements.append(statement)

    event.listen(world.database.engine, "before_cursor_execute", note)
    world.tick()
    event.remove(world.database.engine, "before_cursor_execute", note)
    assert len([each for each in statements if each.startswith("SELECT")]) == 1
