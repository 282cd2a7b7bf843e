import dataclasses
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from server.accounts.audit_log import Asked, list_lines
from server.billing import holds as holding
from server.billing import ledger
from server.billing.ledger import PostResult
from server.billing.rating import amount_nanousd
from server.billing.tables import holds, incidents, journal_positions, usage_events
from server.database.clock import database_now_ms
from server.database.database import DEFAULT_FILE, Database
from tests.server.factories import (
    ENGINE,
    NOW_MS,
    SIGNER,
    insert_holds,
    make_end,
    make_hold,
    make_price,
    post_ends,
    receipts_of,
)


def hold_of(database, request_id="r1"):
    return database.read_sync(lambda c: holding.get_hold(c, request_id))


def events_of(database):
    query = sa.select(usage_events).order_by(usage_events.c.event_id)
    return database.read_sync(lambda c: list(c.execute(query)))


def incidents_of(database):
    query = sa.select(incidents.c.kind, incidents.c.request_id).order_by(incidents.c.incident_id)
    return database.read_sync(lambda c: [tuple(row) for row in c.execute(query)])


def contents(database):
    """All rows that a replay must leave unchanged."""
    tables = (holds, usage_events, journal_positions, incidents)
    return database.read_sync(
        lambda c: [tuple(row) for table in tables for row in c.execute(sa.select(table))]
    )


def test_an_end_record_becomes_a_usage_event_and_posts_its_hold(each_database):
    price = make_price(each_database)
    hold = make_hold(
        price, model="acme-bot", adapter_id="ada_1", adapter_version=3, adapter_digest="d" * 64
    )
    insert_holds(each_database, hold)
    assert hold_of(each_database) == hold
    record = make_end(4, adapter_digest="d" * 64, num_cached_tokens=2)
    assert post_ends(each_database, record, now_ms=NOW_MS + 9) == PostResult(
        posted=1, incidents=0, settled_seq=4
    )
    [event] = events_of(each_database)
    assert (event.tenant_id, event.key_id, event.model) == ("ten_1", "key1", "acme-bot")
    assert (event.adapter_id, event.adapter_version) == ("ada_1", 3)
    assert (event.adapter_digest, event.base_revision) == ("d" * 64, "b" * 64)
    assert (event.prompt_tokens, event.cached_tokens, event.completion_tokens) == (7, 2, 5)
    assert event.amount_nanousd == amount_nanousd(7, 2, 5, price)
    assert (event.started_at_ms, event.first_token_at_ms) == (NOW_MS, NOW_MS + 500)
    assert (event.ended_at_ms, event.posted_at_ms) == (NOW_MS + 4000, NOW_MS + 9)
    posted = dataclasses.replace(hold, state="posted", resolved_at_ms=NOW_MS + 9)
    assert hold_of(each_database) == posted
    assert each_database.read_sync(lambda c: ledger.settled_seq(c, ENGINE)) == 4


def test_an_event_says_what_its_request_waited_for_and_its_receipt_does_not(database):
    price = make_price(database)
    insert_holds(database, make_hold(price), make_hold(price, "r2"))
    waited = make_end(4, load_s=0.2504, load_tier="disk", queue_s=0.0)
    post_ends(database, waited, make_end(5, "r2"))
    waits = [(e.load_ms, e.load_tier, e.queue_ms) for e in events_of(database)]
    assert waits == [(250, "disk", 0), (None, None, None)], "a crash ended the second"
    assert not {"load_ms", "load_tier", "queue_ms"} & set(receipts_of(database)[0])


def test_the_same_records_again_change_nothing(each_database):
    price = make_price(each_database)
    insert_holds(each_database, make_hold(price, "r1"), make_hold(price, "r2"))
    records = [make_end(2, "r1"), make_end(5, "r2"), make_end(6, "stray")]
    post_ends(each_database, *records)
    before = contents(each_database)
    again = post_ends(each_database, *records, now_ms=NOW_MS + 9999)
    assert again == PostResult(posted=0, incidents=0, settled_seq=6)
    assert post_ends(each_database, records[0]).settled_seq == 6
    assert contents(each_database) == before


def test_an_end_without_a_hold_is_counted_free_and_reported(database):
    make_price(database)
    assert post_ends(database, make_end(1, "stray", tenant_id="ten_9")).incidents == 1
    [event] = events_of(database)
    assert (event.tenant_id, event.key_id, event.model) == ("ten_9", None, None)
    assert (event.completion_tokens, event.amount_nanousd, event.price_version) == (5, 0, None)
    assert incidents_of(database) == [("end_without_hold", "stray")]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"tenant_id": "ten_2"}, "tenant_differs"),
        ({"adapter_digest": "e" * 64}, "adapter_differs"),
        ({"num_completion_tokens": 34}, "amount_over_hold"),
        ({"num_cached_tokens": 8}, "counts_differ"),
    ],
)
def test_a_record_that_does_not_fit_its_hold_is_posted_and_reported(database, fields, kind):
    insert_holds(database, make_hold(make_price(database)))
    post_ends(database, make_end(1, **fields))
    assert [event.tenant_id for event in events_of(database)] == ["ten_1"]
    assert incidents_of(database) == [(kind, "r1")]


def test_a_second_end_of_a_request_is_reported_once_and_not_billed(each_database):
    price = make_price(each_database)
    insert_holds(each_database, make_hold(price))
    post_ends(each_database, make_end(1))
    for _ in range(2):
        post_ends(each_database, make_end(2))
    assert len(events_of(each_database)) == 1
    assert incidents_of(each_database) == [("ended_twice", "r1")]
    assert each_database.read_sync(lambda c: ledger.settled_seq(c, ENGINE)) == 2


def test_another_request_under_a_posted_number_is_reported(database):
    price = make_price(database)
    insert_holds(database, make_hold(price, "r1"), make_hold(price, "r2"))
    post_ends(database, make_end(1, "r1"))
    post_ends(database, make_end(1, "r2"))
    assert [event.request_id for event in events_of(database)] == ["r1"]
    assert incidents_of(database) == [("journal_conflict", "r2")]
    assert hold_of(database, "r2").state == "open"


def test_what_a_lost_engine_held_is_voided_once_it_has_expired_and_nobody_elses(each_database):
    now_ms = each_database.read_sync(database_now_ms)
    price, old = (
        make_price(each_database),
        {"created_at_ms": NOW_MS, "expires_at_ms": now_ms - 1000},
    )
    insert_holds(
        each_database,
        make_hold(price, "one", engine_id="lost", **old),
        make_hold(price, "two", engine_id="lost", **old),
        make_hold(price, "running", engine_id="lost", expires_at_ms=now_ms + 600_000),
        make_hold(price, "elsewhere", **old),
    )

    def void_lost(conn):
        return holding.void_lost(conn, "lost", actor="operator", now_ms=NOW_MS + 7)

    assert each_database.write_sync(void_lost) == (2, 1)
    assert each_database.write_sync(void_lost) == (0, 1)
    states = {name: hold_of(each_database, name).state for name in ("one", "two", "running")}
    assert states == {"one": "voided", "two": "voided", "running": "open"}
    assert hold_of(each_database, "elsewhere").state == "open"
    lines = each_database.read_sync(lambda c: list_lines(c, Asked(action="engine.lost"), 10))
    assert {(line.actor, line.target) for line in lines} == {("operator", "lost")}
    assert [line.detail for line in lines] == ["voided 0 holds", "voided 2 holds"]


def test_a_hold_expires_by_the_databases_clock_whatever_the_gateways_says(postgres_database):
    price = make_price(postgres_database)
    hold = make_hold(price, created_at_ms=1, expires_at_ms=150_001)

    def open_it(conn):
        before = database_now_ms(conn)
        holding.open_hold(conn, hold)
        return before, database_now_ms(conn)

    before, after = postgres_database.write_sync(open_it)
    expires_at_ms = hold_of(postgres_database).expires_at_ms
    assert before + 150_000 <= expires_at_ms <= after + 150_000


def test_on_sqlite_it_expires_by_the_gateways(sqlite_database):
    hold = make_hold(make_price(sqlite_database))
    sqlite_database.write_sync(lambda conn: holding.open_hold(conn, hold))
    assert hold_of(sqlite_database) == hold


def test_a_hold_that_moves_is_the_new_engines_for_a_whole_lifetime(each_database):
    hold = make_hold(make_price(each_database))
    insert_holds(each_database, hold)

    def move(conn):
        before = database_now_ms(conn)
        assert holding.move_hold(conn, "r1", "eng-2", 150_000)
        return before, database_now_ms(conn)

    before, after = each_database.write_sync(move)
    moved = hold_of(each_database)
    assert before + 150_000 <= moved.expires_at_ms <= after + 150_000
    expected = dataclasses.replace(hold, engine_id="eng-2", expires_at_ms=moved.expires_at_ms)
    assert moved == expected
    post_ends(each_database, make_end(1), engine_id="eng-2")
    assert incidents_of(each_database) == []
    assert not each_database.write_sync(lambda c: holding.move_hold(c, "r1", "eng-3", 1)), (
        "it has ended"
    )


def test_one_request_cannot_have_two_holds(each_database):
    hold = make_hold(make_price(each_database))
    insert_holds(each_database, hold)
    with pytest.raises(sa.exc.IntegrityError):
        insert_holds(each_database, hold)


def test_two_settlers_on_one_database_post_every_record_once(
    make_postgres, migrated_postgres, tmp_path
):
    url = make_postgres(migrated_postgres)
    databases = [Database(url, data_dir=tmp_path) for _ in range(2)]
    price = make_price(databases[0])
    names = [f"r{i}" for i in range(60)]
    insert_holds(databases[0], *(make_hold(price, name) for name in names))
    records = [make_end(i + 1, name) for i, name in enumerate(names)]
    start = threading.Barrier(2)

    def settle(database):
        start.wait()
        for begin in range(0, 60, 7):
            post_ends(database, *records[begin : begin + 7])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(settle, databases))
    assert [event.request_id for event in events_of(databases[0])] == names
    assert incidents_of(databases[0]) == []
    for database in databases:
        database.close()


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a model: an engine's journal as a list, and holds as a dict of states.

    `migrated` and `folder` are set by the test that runs it.
    """

    @initialize()
    def open_database(self):
        shutil.copy(self.migrated, self.folder / DEFAULT_FILE)
        for suffix in ("-wal", "-shm"):
            (self.folder / (DEFAULT_FILE + suffix)).unlink(missing_ok=True)
        self.database = Database(data_dir=self.folder)
        self.price = make_price(self.database)
        self.now_ms = NOW_MS
        self.seq = 0
        elsewhere = make_hold(self.price, "elsewhere", engine_id="engine-2", expires_at_ms=NOW_MS)
        insert_holds(self.database, elsewhere)
        self.expires_at = {"elsewhere": NOW_MS}
        self.running = {}
        self.unsent = set()
        self.journal = []
        self.num_posted = 0
        self.terminal = {}
        self.num_transitions = Counter()

    def teardown(self):
        if hasattr(self, "database"):
            self.database.close()

    @rule(sent=st.booleans())
    def hold(self, sent):
        request_id = f"r{len(self.expires_at)}"
        hold = make_hold(self.price, request_id, expires_at_ms=self.now_ms + 100)
        insert_holds(self.database, hold)
        self.expires_at[request_id] = hold.expires_at_ms
        if sent:
            self.running[request_id] = 0
            self.seq += 1
        else:
            self.unsent.add(request_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 3))
    def progress(self, data, tokens):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        self.running[request_id] = min(self.running[request_id] + tokens, 33)
        self.seq += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def end(self, data, failed):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        self._end(request_id, "engine_failure" if failed else "eos")

    @rule()
    def engine_dies(self):
        """The engine dies; its journal ends every open request when it starts again."""
        for request_id in sorted(self.running):
            self._end(request_id, "engine_failure")

    def _end(self, request_id, cause):
        self.seq += 1
        tokens = self.running.pop(request_id)
        reason = "error" if cause == "engine_failure" else "stop"
        self.journal.append(
            make_end(
                self.seq,
                request_id,
                num_completion_tokens=tokens,
                finish_reason=reason,
                stop_cause=cause,
            )
        )

    @rule(limit=st.integers(1, 5))
    def settle(self, limit):
        self._post(self.journal[self.num_posted : self.num_posted + limit])

    @rule(back=st.integers(1, 5), limit=st.integers(1, 9))
    def replay(self, back, limit):
        """Post records again: the answer to an earlier post was lost, so the settler repeats it."""
        begin = max(self.num_posted - back, 0)
        self._post(self.journal[begin : begin + limit])

    @rule(limit=st.integers(1, 5))
    def settler_is_killed_before_its_commit(self, limit):
        records = self.journal[self.num_posted : self.num_posted + limit]

        def fail(conn):
            ledger.post(conn, SIGNER, ENGINE, records, self.now_ms)
            raise InterruptedError

        with pytest.raises(InterruptedError):
            self.database.write_sync(fail)

    @rule()
    def gateway_is_killed(self):
        self.database.close()
        self.database = Database(data_dir=self.folder)

    def _post(self, records):
        result = post_ends(self.database, *records, now_ms=self.now_ms)
        done = self.num_posted
        for index, record in enumerate(self.journal):
            if index >= done and record in records:
                self.num_posted = index + 1
                self.num_transitions[record.request_id] += 1
                self.terminal[record.request_id] = "posted"
        assert result.posted == self.num_posted - done
        assert result.incidents == 0

    @rule(wait_ms=st.sampled_from([1, 50, 101]))
    def void(self, wait_ms):
        """Void expired holds as the settler does: after a complete read, as of a time before it."""
        self.now_ms += wait_ms
        as_of_ms = self.now_ms
        self._post(self.journal[self.num_posted :])
        voided = self.database.write_sync(
            lambda c: holding.void_expired(
                c, ENGINE, as_of_ms=as_of_ms, still_open=set(self.running), now_ms=NOW_MS
            )
        )
        for request_id in voided:
            assert request_id in self.unsent
            assert self.expires_at[request_id] < as_of_ms
            self.num_transitions[request_id] += 1
            self.terminal[request_id] = "voided"
        left = {id for id in self.unsent if id not in self.terminal}
        assert all(self.expires_at[request_id] >= as_of_ms for request_id in left)

    @precondition(lambda self: self.unsent | self.terminal.keys())
    @rule(data=st.data())
    def engine_refuses(self, data):
        """Void a hold that is open, or that has ended, which changes nothing."""
        request_id = data.draw(st.sampled_from(sorted(self.unsent | self.terminal.keys())))
        voided = self.database.write_sync(
            lambda c: holding.void_refused(c, request_id, self.now_ms)
        )
        assert voided == (request_id not in self.terminal)
        self.num_transitions[request_id] += voided
        self.terminal.setdefault(request_id, "voided")

    @invariant()
    def the_ledger_is_the_settled_journal(self):
        settled = self.journal[: self.num_posted]
        events = events_of(self.database)
        assert [event.request_id for event in events] == [r.request_id for r in settled]
        assert {e.price_version for e in events} <= {self.price.price_version}
        assert sum(e.completion_tokens for e in events) == sum(
            r.num_completion_tokens for r in settled
        )
        billed = [r for r in settled if r.finish_reason != "error"]
        assert sum(e.amount_nanousd for e in events) == sum(
            amount_nanousd(r.num_prompt_tokens, 0, r.num_completion_tokens, self.price)
            for r in billed
        )

    @invariant()
    def every_hold_ends_at_most_once_and_as_the_model_says(self):
        assert set(self.num_transitions.values()) <= {0, 1}
        query = sa.select(holds.c.request_id, holds.c.state)
        states = dict(self.database.read_sync(lambda c: [tuple(r) for r in c.execute(query)]))
        assert states == {id: self.terminal.get(id, "open") for id in self.expires_at}
        assert incidents_of(self.database) == []


def test_the_ledger_agrees_with_its_model_whatever_happens(migrated_sqlite, tmp_path):
    class Machine(LedgerMachine):
        migrated = migrated_sqlite
        folder = tmp_path

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
