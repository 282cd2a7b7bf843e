"""A tenant's share holds over real engine processes, as the gateway exchanges their totals."""

import asyncio
import itertools
from collections import Counter

import pytest

from server.pool.service_exchange import ServiceExchange
from tests.engine.fakes import make_message
from tests.engine.pulled_outputs import outputs_of
from tests.server.pool.test_engine_pool import Pool, gateway

DEMANDS = (("spread", "a"), ("spread", "b"), ("near", "a"), ("far", "b"))
"""(tenant, engine) pairs: the tenant always has requests waiting at the engine."""
NUM_TOKENS = 2000


@pytest.fixture
def pool(tmp_path):
    pool = Pool(tmp_path)
    yield pool
    for name in pool.processes:
        pool.kill(name)


async def generate_all_the_time(engines):
    """Run requests until `NUM_TOKENS` tokens are generated; return their number by tenant."""
    given, numbers = Counter(), itertools.count()

    async def ask_again_and_again(tenant, name):
        while given.total() < NUM_TOKENS:
            message = make_message(
                f"r{next(numbers)}", prompt=[7] * 5, max_tokens=10, tenant_id=tenant
            )
            async for output in outputs_of(engines, message, name):
                given[tenant] += len(output.new_token_ids)

    async with asyncio.TaskGroup() as group:
        for demand in DEMANDS * 4:
            group.create_task(ask_again_and_again(*demand))
    return given


def share_of_spread(pool):
    """Tokens of `spread`, divided by those of the other tenant that got more."""
    pool.start("a", "b", step_s=0.01, max_num_seqs=2)

    async def run():
        async with gateway(pool, "a", "b") as engines:
            return await generate_all_the_time(engines)

    given = asyncio.run(run())
    return given["spread"] / max(given["near"], given["far"])


def test_who_asks_two_engines_gets_no_more_than_those_who_ask_one_each(pool):
    assert share_of_spread(pool) < 1.35


def test_it_gets_twice_as_much_where_engines_are_told_nothing(pool, monkeypatch):
    async def tell_nobody(self, engines):
        pass

    monkeypatch.setattr(ServiceExchange, "pass_on", tell_nobody)
    assert share_of_spread(pool) > 1.6
