"""A pool that grows and shrinks while it serves, loses an engine, and starts again with fewer."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.leaving import is_settled
from engine.steps.meter import TokenMeter
from server.pool.control_files import members_file, wanted_file
from tests.e2e.base_models import Load
from tests.e2e.bill import check_streams, hold_states
from tests.e2e.stack import Stack, running
from tests.e2e.streams import engines, num_generated, run_streams, wait_until_ready

SETTINGS: dict[str, Any] = {
    "fake_engine": True, "max_num_seqs": 4, "max_model_len": 512,
    "environment": {"FAKE_STEP_S": "0.02"},
}  # fmt: skip
OPTIONS = {"max_tokens": 60, "ignore_eos": True}
LOST = "engine-2"
NUM_STREAMS, NUM_TOKENS = 6, 200


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """A pool of two engines with room for a third; its last test lets the power fail."""
    folder = tmp_path_factory.mktemp("pool")
    with running(folder, tiny_model, engines=2, max_engines=3, **SETTINGS) as stack:
        wait_until_ready(stack, 2)
        yield stack


def states(stack: Stack) -> dict[str, str]:
    """Return the states of the engines that the gateway knows, by name."""
    return {name: engine["state"] for name, engine in engines(stack).items()}


def test_a_pool_grows_under_load_and_shrinks_again_and_no_request_notices(pool: Stack) -> None:
    tenant = pool.tenant("grows")
    few, more = (Load(tenant, ["base"] * count, OPTIONS) for count in (5, 6))
    with few:
        with more:
            pool.wait(lambda: states(pool).get("engine-3") == "ready")
            pool.wait(lambda: num_generated(pool)["engine-3"] > 0)
        engine_pid = pool.pid("engine-3")
        wanted_file(pool.data_dir).write(2)
        pool.wait(lambda: states(pool)["engine-3"] == "leaving")
        pool.wait(lambda: pool.pid("engine-3") != engine_pid)
        # A stand-in follows the engine and stays a member: holds there may still be open.
        pool.wait(lambda: is_retired(pool.pid("engine-3")))
        pool.wait(lambda: states(pool)["engine-3"] == "leaving")
        few.wait_for(10)
    answers = few.answers + more.answers
    assert {answer.status_code for answer in answers} == {200}
    events = pool.settled_events(len(answers))
    assert len(events) == len(answers)
    assert {event["completion_tokens"] for event in events} == {OPTIONS["max_tokens"]}
    assert len({event["engine_id"] for event in events}) == 3, "all of them served"
    pool.wait(lambda: hold_states(pool) == {"posted": len(events)})
    pool.wait(lambda: engines(pool)["engine-3"]["figures"]["unsettled_records"] == 0)


def is_retired(pid: int) -> bool:
    return b"engine.retired" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_an_engine_that_is_killed_ends_its_own_streams_and_no_others(pool: Stack) -> None:
    tenant, before = pool.tenant("loses"), len(pool.settled_events(0))
    lost_id = engines(pool)[LOST]["engine_id"]
    lose = partial(pool.kill, LOST)
    streams = asyncio.run(run_streams(tenant, NUM_STREAMS, lose, max_tokens=NUM_TOKENS))
    cut_step = TokenMeter.read(pool.data_dir / LOST / "meter")[2:]
    # The pool heals: the engine is back under its name and with its journal, and is used.
    pool.wait(lambda: states(pool)[LOST] == "ready")
    assert engines(pool)[LOST]["engine_id"] == lost_id
    again = asyncio.run(run_streams(tenant, NUM_STREAMS, max_tokens=5))
    assert {got.finish_reason for got in again} == {"length"}
    pool.wait(lambda: num_generated(pool)[LOST])
    pool.settled_events(before + len(streams) + len(again))
    lost = dict.fromkeys((got.request_id for got in streams), lost_id)
    events = check_streams(pool, streams, NUM_TOKENS, lost, [cut_step])
    assert len({events[got.request_id]["engine_id"] for got in streams}) == 2, "both served"


def test_what_a_smaller_pool_does_not_start_again_is_billed_all_the_same(
    pool: Stack, tiny_model: Path
) -> None:
    """The power fails while two engines serve, and only one is started again."""
    tenant, before = pool.tenant("unlucky"), len(pool.settled_events(0))
    streams = asyncio.run(run_streams(tenant, NUM_STREAMS, pool.die, max_tokens=400))
    assert {got.error for got in streams} == {"cut off"}
    with running(pool.data_dir, tiny_model, engines=1, **SETTINGS) as stack:
        stack.wait(lambda: hold_states(stack) == {"posted": before + NUM_STREAMS})
        found = states(stack)
        assert (found["engine"], found[LOST]) == ("ready", "leaving")
        ours = {got.request_id for got in streams}
        events = [e for e in stack.settled_events(before) if e["request_id"] in ours]
        assert Counter(event["stop_cause"] for event in events) == {"engine_failure": len(streams)}
        assert len({event["engine_id"] for event in events}) == 2
        num_received = sum(got.num_tokens for got in streams)
        assert sum(event["completion_tokens"] for event in events) >= num_received
        assert {event["amount_nanousd"] for event in events} == {0}
        body = OPTIONS | {"model": "base", "prompt": [5]}
        answer = stack.client(tenant.api_key).post("/v1/completions", json=body)
        assert answer.status_code == 200
        names = [member.name for member in members_file(stack.data_dir).read()]
        assert set(names) >= {"engine", LOST}
        assert not is_settled(stack.data_dir / LOST), "a hold might still be open"
