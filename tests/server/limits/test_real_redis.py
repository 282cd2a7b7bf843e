"""Calls of a real Redis that answers, does not answer, or has lost its data."""

import asyncio
import threading

import pytest

from server.limits.redis_states import (
    Answer,
    RedisStates,
    StateLost,
    acquire_call,
    standings_call,
)
from server.limits.rules import Limit
from server.limits.shared import StateUnavailable
from tests import needs
from tests.redis_server import RedisServer

TOKENS = Limit("tokens", "tenant", "t", 600)
PREFIX = "chorale:{test}:1.0"


def test_a_redis_that_does_not_answer_costs_a_call_its_deadline(
    may_start_servers, tmp_path_factory
):
    needs.redis()
    server = RedisServer(tmp_path_factory.mktemp("r")).start()

    async def play():
        states = RedisStates(server.url, deadline_s=0.05)
        await states.begin(PREFIX, is_first=True)
        assert isinstance(await states.run(PREFIX, standings_call([TOKENS])), Answer)
        server.freeze()
        with pytest.raises(StateUnavailable):
            await states.run(PREFIX, standings_call([TOKENS]))
        server.thaw()
        await states.ping()
        server.wipe()
        with pytest.raises(StateLost):
            await states.run(PREFIX, standings_call([TOKENS]))
        server.stop()
        with pytest.raises(StateUnavailable):
            await states.ping()
        await states.close()

    try:
        asyncio.run(play())
    finally:
        server.stop()


def test_gateways_that_race_for_one_limit_get_exactly_that(redis_server):
    redis_server.wipe()
    admitted = []

    async def ask(name):
        states = RedisStates(redis_server.url, deadline_s=10.0)
        await states.begin(PREFIX, is_first=True)
        calls = [acquire_call(f"{name}-{i}", [TOKENS], 7, 60_000) for i in range(60)]
        answers = await asyncio.gather(*(states.run(PREFIX, call) for call in calls))
        admitted.extend(answer for answer in answers if not any(answer.waits))
        await states.close()

    threads = [threading.Thread(target=lambda n=n: asyncio.run(ask(n))) for n in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The limit refills by 10 a second, and the race takes less than a second.
    assert 600 // 7 <= len(admitted) <= 600 // 7 + 10
