"""Billed tokens equal generated tokens: under disconnects, and when processes are killed."""

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.bill import Before, Kill, Seen, check_bill, hold_states, load
from tests.e2e.stack import Stack, running


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> Iterator[Stack]:
    """A stack without a model, all else real: cheap enough to kill again and again."""
    with running(
        tmp_path_factory.mktemp("killed"), tiny_model, fake_engine=True, max_model_len=512,
        environment={"FAKE_STEP_S": "0.002", "FAKE_SILENCE_S": "4"},
    ) as stack:  # fmt: skip
        for name in ("acme", "globex"):
            tenant = stack.tenant(name)
            for adapter in ("alpha", "gamma"):
                tenant.push(adapter, tiny_adapters[adapter])
        yield stack


def test_the_bill_is_the_meter_after_random_disconnects(stack: Stack) -> None:
    before = Before.of(stack)
    seen = asyncio.run(load(stack.tenants, count=100, seed=1))
    assert seen.num_errors == 0
    events = check_bill(stack, seen, before)
    assert hold_states(stack).keys() == {"posted"}
    assert sum(event["cached_tokens"] for event in events) > 0
    ended, posted = (
        [datetime.fromisoformat(e[f"{did}_at"]) for e in events] for did in ("ended", "posted")
    )
    assert max(b - a for a, b in zip(ended, posted, strict=True)) < timedelta(seconds=5)


def test_the_bill_is_exact_after_the_gateway_is_killed(stack: Stack) -> None:
    """The next gateway knows at once where adapters are."""
    tenant, before = stack.tenants[0], Before.of(stack)
    body = {"model": "alpha", "prompt": [7], "max_tokens": 1}
    assert tenant.http.post("/v1/completions", json=body).status_code == 200
    seen = asyncio.run(load(stack.tenants, count=60, seed=2, kill="gateway"))
    stack.wait_ready()
    assert tenant.http.get("/v1/adapters/alpha").json()["latest"]["tier"] == "device"
    asyncio.run(load(stack.tenants, count=10, seed=3))
    check_bill(stack, seen, before)


def test_the_bill_is_exact_after_an_engine_is_killed_and_after_it_stands_still(
    stack: Stack,
) -> None:
    before, all_seen = Before.of(stack), Seen()
    kills: tuple[Kill, ...] = ("engine", "engine", "stop")
    for number, kill in enumerate(kills):
        stack.wait_ready()
        seen = asyncio.run(load(stack.tenants, count=40, seed=10 + number, kill=kill))
        all_seen.tokens |= seen.tokens
        all_seen.cut_steps += seen.cut_steps
    events = check_bill(stack, all_seen, before)
    unpaid = [event for event in events if event["stop_cause"] == "engine_failure"]
    assert len(unpaid) >= len(kills), "each kill hit somebody"
    assert all(event["amount_nanousd"] == 0 for event in unpaid)
