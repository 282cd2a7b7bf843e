"""Gateways on a real Redis that answers, dies, does not answer, or has lost its data."""

import asyncio

import pytest

from server.limits.calls import Call
from server.limits.redis_calls import RedisCalls, StateUnavailable
from server.limits.rules import Grant, Limit, RateLimited
from server.limits.shared import SharedLimiter
from tests import needs
from tests.redis_server import RedisServer

TOKENS = Limit("tokens", "tenant", "t", 600)
SEATS = Limit("concurrency", "tenant", "t", 90)


@pytest.fixture
def server(may_start_servers, tmp_path_factory):
    needs.redis()
    server = RedisServer(tmp_path_factory.mktemp("r")).start()
    yield server
    server.stop()


async def test_a_redis_that_does_not_answer_costs_a_call_its_deadline(server):
    calls, call = RedisCalls(server.url, deadline_s=0.05), Call("standings", (TOKENS,))

    async def ask():
        return call.read(await calls.evaluate(call.keys("p"), call.arguments()))

    assert (await ask()).standings[0].remaining == 600
    server.freeze()
    with pytest.raises(StateUnavailable):
        await ask()
    server.thaw()
    await calls.evaluate(call.keys("p"), call.arguments(), is_patient=True)
    server.stop()
    with pytest.raises(StateUnavailable):
        await calls.evaluate(call.keys("p"), call.arguments(), is_patient=True)
    await calls.close()


async def race(limiters, count=200, when_half=lambda: None):
    """Ask both gateways at once for `count` seats. Returns what they granted.

    when_half: called when half of the requests were answered.
    """
    num_answered = 0

    async def ask(limiter, number):
        nonlocal num_answered
        coming = limiter.acquire(f"{number}", [SEATS], tokens=0, lifetime_ms=600_000)
        try:
            return await coming
        except RateLimited as refused:
            return refused
        finally:
            num_answered += 1
            if num_answered == count // 2:
                when_half()

    asked = (ask(limiters[number % 2], number) for number in range(count))
    found = await asyncio.gather(*asked)
    return [each for each in found if isinstance(each, Grant)]


@pytest.mark.parametrize("fault", [None, "stop", "freeze", "wipe"])
async def test_gateways_that_race_pass_a_limit_by_its_amount_at_most_while_redis_fails(
    server, fault
):
    """Gateways get exactly the limit without a fault, and after one again."""
    deadline_s = 0.2 if fault == "freeze" else 10.0
    limiters = [
        SharedLimiter("race", RedisCalls(server.url, deadline_s=deadline_s), name, place=(0, 1))
        for name in ("a", "b")
    ]
    for limiter in (*limiters, *limiters):
        await limiter.beat() if limiter._num_beats else await limiter.start()
    grants = await race(limiters, when_half=getattr(server, fault) if fault else lambda: None)
    assert SEATS.amount <= len(grants) <= SEATS.amount * (2 if fault else 1)
    if fault == "stop":
        server.start()
    server.thaw()
    for grant in grants:
        limiters[int(grant.request_id) % 2].release(grant, 0)
    for limiter in limiters:
        while not limiter._redis_counts.is_set() or limiter._num_beats < 3:
            await limiter.beat()
        await limiter.flush()
    assert len(await race(limiters)) == SEATS.amount
    for limiter in limiters:
        await limiter.close()
