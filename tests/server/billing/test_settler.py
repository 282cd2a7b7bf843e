import asyncio
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from engine.errors import EngineDeadError
from engine.wire.records import JournalRecords
from server.billing import ledger
from server.billing.settler import EngineLag, Settler, SettlerConfig
from server.billing.tables import holds, incidents, usage_events
from server.database.database import LedgerUnavailable
from server.database.leases import Leases
from tests.server.factories import (
    ENGINE,
    NOW_MS,
    SIGNER,
    insert_holds,
    make_end,
    make_hold,
    make_price,
)


class FakeEngine:
    """A journal that answers as an engine's does.

    ended: requests whose ends it has.   failures: raised by the first reads, in turn.
    """

    def __init__(self, *ended, engine_id=ENGINE, failures=()):
        self.engine_id = engine_id
        self.records = []
        self.open_request_ids = []
        self.last_seq = 0
        self.failures = list(failures)
        self.reads = []
        for name in ended:
            self.end(name)

    def end(self, request_id):
        self.last_seq += 1
        self.records.append(make_end(self.last_seq, request_id))

    async def read_journal(self, engine_id, settled_seq, limit):
        self.reads.append(settled_seq)
        if self.failures:
            raise self.failures.pop(0)
        left = [record for record in self.records if record.seq > settled_seq]
        return JournalRecords(
            engine_id=self.engine_id,
            ends=tuple(left[:limit]),
            last_seq=self.last_seq,
            complete=len(left) <= limit,
            open_request_ids=tuple(self.open_request_ids),
        )


class Silent(FakeEngine):
    """An engine that never answers, beside another one that does."""

    def __init__(self, other=None):
        super().__init__()
        self.other = other

    async def read_journal(self, engine_id, settled_seq, limit):
        if engine_id == ENGINE:
            await asyncio.Event().wait()
        return await self.other.read_journal(engine_id, settled_seq, limit)


class FakeTracer:
    def __init__(self):
        self.exported = []

    def export_late(self, name, traceparents, began_at):
        self.exported.append((name, traceparents))


def make_settler(
    database, engine, *, ids=(ENGINE,), leases=None, clock_ms=lambda: NOW_MS, tracer=None, **config
):
    return Settler(
        database,
        SIGNER,
        leases or Leases(database),
        engine.read_journal,
        engine_ids=lambda: ids,
        now_ms=lambda conn: clock_ms(),
        config=SettlerConfig(**config),
        tracer=tracer,
    )


def hold_requests(database, *names, **fields):
    price = make_price(database)
    insert_holds(database, *(make_hold(price, name, **fields) for name in names))


def posted(database):
    query = sa.select(usage_events.c.request_id).order_by(usage_events.c.event_id)
    return database.read_sync(lambda c: list(c.scalars(query)))


def states(database):
    query = sa.select(holds.c.request_id, holds.c.state)
    return database.read_sync(lambda c: {row.request_id: row.state for row in c.execute(query)})


def kinds(database):
    return database.read_sync(lambda c: list(c.scalars(sa.select(incidents.c.kind))))


def settle(settler, **options):
    return asyncio.run(settler.settle(**options))


def run_settler(settler, meanwhile):
    """Run a settler until `meanwhile` is over, a coroutine that gets it when all was settled."""

    async def run():
        running = asyncio.create_task(settler.run())
        while not settler.lags.get(ENGINE) or settler.lags[ENGINE].complete_at_ms is None:
            await asyncio.sleep(0.001)
        await meanwhile()
        settler.stop()
        await running

    asyncio.run(asyncio.wait_for(run(), 10))


def test_one_pass_posts_the_whole_journal_in_groups_and_the_next_acknowledges_it(each_database):
    names = [f"r{i}" for i in range(7)]
    engine = FakeEngine(*names)
    hold_requests(each_database, *names)
    settler = make_settler(each_database, engine, group_size=3)
    assert settle(settler)
    assert posted(each_database) == names
    assert set(states(each_database).values()) == {"posted"}
    assert engine.reads == [0, 3, 6]
    lag = settler.lags[ENGINE]
    assert (lag.settled_seq, lag.last_seq, lag.complete_at_ms) == (7, 7, NOW_MS)
    assert settle(settler)
    assert engine.reads == [0, 3, 6, 7]
    assert posted(each_database) == names


def test_the_lag_of_an_engine_that_another_gateway_settles_is_not_known(sqlite_database):
    engine = FakeEngine("r1")
    hold_requests(sqlite_database, "r1")
    are_ours = [True, False]

    async def hold(name):
        return are_ours.pop(0)

    settler = make_settler(sqlite_database, engine, leases=SimpleNamespace(hold=hold))
    settle(settler)
    assert settler.lags[ENGINE].complete_at_ms == NOW_MS
    settle(settler)
    assert settler.lags[ENGINE] == EngineLag()


async def test_an_engine_is_settled_by_one_gateway_while_that_one_holds_the_lease(
    postgres_database,
):
    engine = FakeEngine("stray")
    first, second = (make_settler(postgres_database, engine) for _ in range(2))
    await first.settle()
    num_reads = len(engine.reads)
    engine.end("another")
    await second.settle()
    assert len(engine.reads) == num_reads, "a read would acknowledge records"
    await first.settle()
    assert posted(postgres_database) == ["stray", "another"]


@pytest.mark.parametrize("failure", [ConnectionResetError(), TimeoutError(), EngineDeadError()])
def test_a_dead_engine_is_waited_for(database, failure):
    engine = FakeEngine("r1", failures=[failure] * 2)
    hold_requests(database, "r1")
    settler = make_settler(database, engine)
    results = [settle(settler) for _ in range(5)]
    # The settler fails, skips one pass, fails, and skips two.
    assert results == [False] * 5
    assert len(engine.reads) == 2
    assert settler.lags[ENGINE].num_failures == 2
    assert settle(settler)
    assert posted(database) == ["r1"]
    assert settler.lags[ENGINE].num_failures == 0


def test_the_time_that_a_dead_engine_sits_out_is_bounded(sqlite_database):
    engine = FakeEngine(failures=[EngineDeadError()] * 1000)
    settler = make_settler(sqlite_database, engine, max_skipped=4)
    for _ in range(100):
        settle(settler)
    assert len(engine.reads) >= 100 // 5


def test_an_engine_that_never_answers_does_not_hold_up_another(sqlite_database):
    alive = FakeEngine("stray", engine_id="engine-2")
    settler = make_settler(
        sqlite_database, Silent(alive), ids=(ENGINE, "engine-2"), read_timeout_s=0.01
    )
    assert not settle(settler)
    assert posted(sqlite_database) == ["stray"]


def test_the_settlement_of_a_traced_request_is_exported_once(database):
    engine, tracer = FakeEngine("traced", "other", "stray"), FakeTracer()
    place = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    price = make_price(database)
    traced, other = make_hold(price, "traced", traceparent=place), make_hold(price, "other")
    insert_holds(database, traced, other)
    settler = make_settler(database, engine, tracer=tracer)
    assert settle(settler)
    engine.end("late")
    assert settle(settler)
    assert tracer.exported == [("settle", (place,))]


def test_an_unwritable_ledger_is_waited_for(sqlite_database, monkeypatch):
    class Unwritable:
        read = sqlite_database.read
        is_sqlite = True
        down = True

        async def write_apart(self, fn):
            if self.down:
                raise LedgerUnavailable("the disk is full")
            return await sqlite_database.write_apart(fn)

        write = sqlite_database.write

    database = Unwritable()
    settler = make_settler(database, FakeEngine("stray"))
    assert not settle(settler)
    database.down = False
    assert settle(settler, patient=False)
    assert posted(sqlite_database) == ["stray"]


def test_holds_are_voided_only_after_a_complete_read(each_database):
    engine = FakeEngine("stray", "unread")
    hold_requests(each_database, "unused", "running", "unread", expires_at_ms=NOW_MS - 1)
    hold_requests(each_database, "later", expires_at_ms=NOW_MS)
    engine.open_request_ids = ["running"]
    settler = make_settler(each_database, engine, group_size=1, void_interval_s=0)
    settle(settler)
    settle(settler)
    assert states(each_database) == {
        "unused": "voided",
        "running": "open",
        "unread": "posted",
        "later": "open",
    }


def test_nothing_is_voided_while_the_engine_is_gone(database):
    hold_requests(database, "r1", expires_at_ms=NOW_MS - 1)
    settle(make_settler(database, FakeEngine(failures=[EngineDeadError()])))
    assert states(database) == {"r1": "open"}


def test_expired_holds_are_looked_for_at_intervals(sqlite_database):
    now = [NOW_MS]
    settler = make_settler(
        sqlite_database, FakeEngine(), clock_ms=lambda: now[0], void_interval_s=5
    )
    settle(settler)
    hold_requests(sqlite_database, "r1", expires_at_ms=NOW_MS - 1)
    now[0] += 4999
    settle(settler)
    assert states(sqlite_database) == {"r1": "open"}
    now[0] += 1
    settle(settler)
    assert states(sqlite_database) == {"r1": "voided"}


def test_a_clock_that_is_set_ahead_voids_no_hold_of_a_request_on_its_way(sqlite_database):
    now = [NOW_MS]
    engine = FakeEngine()
    settler = make_settler(sqlite_database, engine, clock_ms=lambda: now[0], void_interval_s=5)
    settle(settler)
    hold_requests(sqlite_database, "sent", "lost", expires_at_ms=NOW_MS + 600_000)
    now[0] += 3_600_000
    settle(settler)
    assert states(sqlite_database) == {"sent": "open", "lost": "open"}
    engine.open_request_ids = ["sent"]
    now[0] += 5_000
    settle(settler)
    assert states(sqlite_database) == {"sent": "open", "lost": "voided"}
    query = sa.select(holds.c.expires_at_ms).where(holds.c.state == "open")
    assert sqlite_database.read_sync(lambda c: c.scalar(query)) > now[0]


@pytest.mark.parametrize("other", [{"last_seq": 3}, {"engine_id": "engine-9"}])
def test_a_journal_that_is_gone_is_an_incident_and_voids_nothing(database, other):
    engine = FakeEngine(*(f"stray-{i}" for i in range(9)))
    hold_requests(database, "r1", expires_at_ms=NOW_MS - 1)
    leases = Leases(database)
    settle(make_settler(database, engine, leases=leases, void_interval_s=10**9))
    database.write_sync(lambda c: c.execute(sa.delete(incidents)))
    hold_requests(database, "r2", expires_at_ms=NOW_MS - 1)
    engine.records, engine.last_seq = [], 9
    for name, value in other.items():
        setattr(engine, name, value)
    settler = make_settler(database, engine, leases=leases)
    for _ in range(3):
        assert not settle(settler)
    assert kinds(database) == ["journal_lost"]
    assert states(database)["r2"] == "open"


def test_running_settles_on_wake_and_stops_when_told(database):
    engine = FakeEngine()
    settler = make_settler(database, engine, poll_s=60)

    async def end_one():
        engine.end("stray")
        settler.wake()
        while settler.lags[ENGINE].settled_seq < 1:
            await asyncio.sleep(0.001)

    run_settler(settler, end_one)
    assert posted(database) == ["stray"]


def test_ends_that_come_after_others_wait_for_their_pass_and_a_stop_does_not(sqlite_database):
    """The pass after the first one would begin in a minute."""
    engine, passes = FakeEngine(), []
    settler = make_settler(sqlite_database, engine, poll_s=60, gather_s=0, interval_s=60)
    settler._engine_ids = lambda: passes.append(None) or [ENGINE]

    async def end_two():
        for name in ("one", "another"):
            engine.end(name)
            settler.wake()
            for _ in range(50):
                await asyncio.sleep(0.001)
        assert len(passes) == 1
        assert await settler.drain(5)

    run_settler(settler, end_two)
    assert posted(sqlite_database) == ["one", "another"]


def test_a_journal_that_could_not_be_read_is_not_left_until_the_next_poll(database):
    engine = FakeEngine("stray", failures=[EngineDeadError()])
    settler = make_settler(database, engine, poll_s=60, retry_s=0.001)
    run_settler(settler, lambda: asyncio.sleep(0))
    assert posted(database) == ["stray"]


async def test_who_waits_for_the_first_pass_gets_it_when_all_is_posted(sqlite_database):
    engine = FakeEngine("stray", failures=[EngineDeadError()])
    settler = make_settler(sqlite_database, engine)
    await settler.settle()
    assert not await settler.wait_settled(0)
    await settler.settle(patient=False)
    assert await settler.wait_settled(0)
    assert posted(sqlite_database) == ["stray"]


async def test_draining_posts_what_is_readable_even_after_failures(database):
    settler = make_settler(database, FakeEngine("stray", failures=[EngineDeadError()]))
    assert not await settler.settle()
    assert await settler.drain(5)
    assert posted(database) == ["stray"]


async def test_draining_gives_up_in_time(sqlite_database):
    settler = make_settler(sqlite_database, Silent())
    assert await settler.drain(0.01) is False


def test_cancelling_in_the_middle_loses_nothing_and_posts_nothing_twice(database):
    names = [f"r{i}" for i in range(20)]
    engine = FakeEngine(*names)
    hold_requests(database, *names)

    async def run(cancel_after):
        settler = make_settler(database, engine, group_size=1)
        running = asyncio.create_task(settler.run())
        while len(engine.reads) < cancel_after:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    for cancel_after in (1, 4, 9):
        asyncio.run(run(cancel_after))
    settle(make_settler(database, engine))
    assert posted(database) == names
    assert kinds(database) == []
    assert database.read_sync(lambda c: ledger.settled_seq(c, ENGINE)) == 20
