"""A real model bills exactly what its runner sampled."""

import asyncio

from tests.e2e.bill import Before, check_bill, load
from tests.e2e.oracle import TinyWorld


def test_a_real_model_bills_exactly_what_its_runner_sampled(tiny: TinyWorld) -> None:
    before = Before.of(tiny.stack)
    seen = asyncio.run(load([tiny.tenant], count=40, seed=7))
    assert seen.num_errors == 0
    check_bill(tiny.stack, seen, before)
