"""An engine that is asked to stop announces it, ends its requests and waits to be settled."""

import asyncio
import subprocess
import sys
from contextlib import aclosing

import pytest

from engine.errors import EngineAwayError, EngineDeadError
from engine.journal.lines import read_records
from engine.leaving import GRACE_S, Leaving, forget_settled, is_settled, mark_settled
from engine.retired import VOIDING_S, RetiredCore, Retirement
from engine.wire.messages import (
    EngineStats,
    ProveAdapter,
    ReadJournal,
    Residency,
    Welcome,
)
from engine.wire.records import EndRecord, ResidencyRecord
from tests.engine.fakes import FakeClock, expected_tokens, make_adapter, make_message
from tests.engine.test_process import (
    START_S,
    collect,
    connected,
    drain,
    greet,
    outputs_of,
    starting_engines,
    wait_until,
    write_config,
)


@pytest.fixture
def engine(tmp_path):
    with starting_engines(tmp_path) as start:
        yield start


def start_retired(directory, **changes):
    path = write_config(directory, **changes)
    return subprocess.Popen([sys.executable, "-m", "engine.retired", str(path)])


async def settle(client, until):
    """Read the journal to its end repeatedly, as the settler does; return all records."""
    found, position = {}, 0
    while not until():
        try:
            answer = await client.read_journal(client.welcome.engine_id, position, 100)
        except (EngineDeadError, AttributeError):
            await asyncio.sleep(0.02)
            continue
        found |= {record.seq: record for record in answer.records}
        position = max([position, *found])
        await asyncio.sleep(0.02)
    return list(found.values())


async def ask_for_ever(client):
    while True:
        await collect(client, make_message("one more", max_tokens=1))


# ---- when an engine may leave ----


@pytest.mark.parametrize(
    ("asked_s_ago", "refuses", "over_for"),
    [
        ([], False, set()),
        ([0.0], False, {"nobody", "nobody settled"}),  # a request may still be on its way
        ([GRACE_S], True, {"nobody", "nobody settled", "settled"}),
        ([99.9, 40.0], True, {"nobody", "nobody settled", "settled"}),
        ([100.0, 40.0], True, {"nobody", "nobody settled", "settled", "unsettled"}),
    ],
)
def test_it_refuses_after_a_while_and_is_over_when_nobody_needs_it_or_its_time_is_up(
    asked_s_ago, refuses, over_for
):
    clock = FakeClock()
    leaving, now = Leaving(100.0, clock), clock.now
    for ago_s in asked_s_ago:
        clock.now = now - ago_s
        leaving.begin()
    clock.now = now
    assert (leaving.has_begun, leaving.refuses) == (bool(asked_s_ago), refuses)
    whom = {"nobody": (False, False), "nobody settled": (False, True), "settled": (True, True),
            "unsettled": (True, False)}  # fmt: skip
    over = {who for who, state in whom.items()
            if leaving.is_over(has_gateways=state[0], is_settled=state[1])}  # fmt: skip
    assert over == over_for


def test_a_folder_is_settled_until_an_engine_runs_there_again(tmp_path):
    assert is_settled(tmp_path), "no engine ever ran there"
    (tmp_path / "journal").mkdir()
    assert not is_settled(tmp_path)
    mark_settled(tmp_path)
    assert is_settled(tmp_path)
    forget_settled(tmp_path)
    assert not is_settled(tmp_path)


# ---- the process ----


def test_who_leaves_says_so_ends_its_requests_and_goes_when_they_are_settled(engine, tmp_path):
    process = engine(step_s=0.02)

    async def run():
        async with connected(tmp_path) as client:
            message = make_message("long", max_tokens=150, adapter=make_adapter())
            async with aclosing(outputs_of(client, message)) as stream:
                tokens = list((await anext(stream)).new_token_ids)
                process.terminate()
                await wait_until(lambda: client.stats and client.stats.is_leaving)
                on_its_way = make_message("on its way", max_tokens=3)
                late = [t async for o in outputs_of(client, on_its_way) for t in o.new_token_ids]
                assert late == expected_tokens(on_its_way)
                with pytest.raises(EngineAwayError, match="leaves"):
                    await ask_for_ever(client)
                async for output in stream:
                    tokens += output.new_token_ids
            assert tokens == expected_tokens(message), "the answer is complete"
            assert process.poll() is None, "its journal is not settled yet"
            records = await settle(client, lambda: process.poll() is not None)
            assert process.returncode == 0
            assert "long" in {r.request_id for r in records if isinstance(r, EndRecord)}
            *_, last = read_records(tmp_path / "engine" / "journal")
            assert last == records[-1], "all records were settled"
            assert isinstance(last, ResidencyRecord), "residency until the end is recorded"

    asyncio.run(run())


def test_a_new_gateway_hears_at_once_that_it_leaves_and_its_proofs_stay_unanswered(
    engine, tmp_path
):
    process = engine(leave_timeout_s=4.0)

    async def run():
        async with connected(tmp_path) as client:
            await collect(client, make_message(max_tokens=2, adapter=make_adapter()))
            process.terminate()
            await wait_until(lambda: client.stats and client.stats.is_leaving)
            greeting = await asyncio.to_thread(greet, tmp_path)
            assert [type(message) for message in greeting] == [Welcome, EngineStats, Residency]
            assert greeting[1].is_leaving, "the first figures say so"
            with pytest.raises(EngineAwayError, match="leaves"):
                await ask_for_ever(client)
            with pytest.raises(EngineDeadError, match="died"):
                await client.prove(make_adapter(), tmp_path / "object", alone=False)

    asyncio.run(run())


# ---- a retired engine's folder ----


def make_retired():
    class Journal:
        engine_id = "eng-1"
        is_settled = False
        num_unsettled = 3

        def answer(self, message):
            return (message.settled_seq, message.limit)

    clock = FakeClock()
    return clock, RetiredCore(Journal(), 100.0, clock)


def test_what_is_retired_is_not_through_before_every_hold_has_expired_and_was_looked_for():
    clock, core = make_retired()
    read = ReadJournal(engine_id="eng-1", settled_seq=7, limit=9)
    core.journal.is_settled = True
    assert core.handle("g", read) == [("g", (7, 9))]
    assert not core.is_settled
    clock.now += 100.0
    assert not core.is_settled, "no read since the holds expired"
    core.journal.is_settled = False
    core.handle("g", read)
    assert not core.is_settled
    core.journal.is_settled = True
    core.handle("g", ReadJournal(engine_id="eng-2", settled_seq=7))
    assert not core.is_settled, "the read was for another engine"
    core.handle("g", read)
    assert core.is_settled


def test_what_is_retired_answers_no_other_question():
    _, core = make_retired()
    proof = ProveAdapter(proof_id="p", adapter=make_adapter(), object_path="")
    assert core.handle("g", proof) == []
    assert core.take_stats().unsettled_records == 3


def test_a_retirement_waits_for_gateways_and_goes_when_it_is_asked_to():
    retirement = Retirement()
    assert retirement.has_begun
    assert retirement.refuses
    assert not retirement.is_over(has_gateways=False, is_settled=False)
    assert retirement.is_over(has_gateways=False, is_settled=True)
    retirement.begin()
    assert retirement.is_over(has_gateways=True, is_settled=False)


def test_what_a_killed_engine_had_open_is_ended_and_settled_without_it(engine, tmp_path):
    process = engine(step_s=0.02)

    async def run():
        async with connected(tmp_path) as client:
            stream = outputs_of(client, make_message("cut", max_tokens=400))
            num_received = len((await anext(stream)).new_token_ids)
            process.kill()
            process.wait()
            with pytest.raises(EngineDeadError):
                await drain(stream)
            engine_id = client.welcome.engine_id
            retired = start_retired(tmp_path, hold_lifetime_s=-VOIDING_S)
            try:
                await wait_until(lambda: client.is_ready)
                await wait_until(lambda: client.stats)
                assert client.stats.is_leaving
                assert client.welcome.engine_id == engine_id, "the retired engine keeps its id"
                with pytest.raises(EngineAwayError, match="leaves"):
                    await collect(client, make_message("new"))
                records = await settle(client, lambda: retired.poll() is not None)
                assert retired.returncode == 0
            finally:
                retired.kill()
                retired.wait()
            (end,) = [r for r in records if isinstance(r, EndRecord)]
            assert (end.request_id, end.stop_cause) == ("cut", "engine_failure")
            assert end.num_completion_tokens >= num_received > 0

    asyncio.run(run())
    assert is_settled(tmp_path / "engine")


def test_a_retired_engine_that_is_stopped_before_its_end_is_not_settled(engine, tmp_path):
    process = engine()

    async def run():
        async with connected(tmp_path):
            process.kill()
            process.wait()

    asyncio.run(run())
    retired = start_retired(tmp_path)

    async def ask():
        async with connected(tmp_path) as client:
            await wait_until(lambda: client.stats)
            retired.terminate()
            assert await asyncio.to_thread(retired.wait, START_S) == 0

    asyncio.run(ask())
    assert not is_settled(tmp_path / "engine")
    mark_settled(tmp_path / "engine")
    engine()

    async def again():
        async with connected(tmp_path) as client:
            await collect(client, make_message(max_tokens=2))
            assert not is_settled(tmp_path / "engine"), "an engine runs there again"

    asyncio.run(again())
