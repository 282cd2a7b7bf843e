"""A store that fails: requests for its adapters get a typed error, other requests are not affected.

tests/lora has every fault of a store; these are those that a customer hears of.
"""

import json
from collections.abc import Iterator

import boto3
import httpx
import pytest

from tests.e2e.faulty.conftest import BUCKET, Lora, World
from tests.faulty_s3 import Kind


@pytest.fixture(autouse=True)
def _well_again(world: World) -> Iterator[None]:
    yield
    world.s3.clear()


def test_a_fault_that_passes_is_nothing_to_the_customer(world: World) -> None:
    lora = world.make_lora()
    world.s3.fail("reset", key=lora.key, times=1)
    assert world.ask(lora.name).status_code == 200
    assert world.residency(lora)["tier"] == "device"


@pytest.mark.parametrize("fault", ["unavailable", "hang"])
def test_a_store_that_is_down_is_a_503_until_it_is_well(world: World, fault: Kind) -> None:
    lora = world.make_lora()
    with world.others_going_on():
        world.s3.fail(fault, key=lora.key)
        for stream in (False, True):
            answer = world.ask(lora.name, stream=stream)
            check_error(answer, 503, "adapter_loading")
            assert int(answer.headers["retry-after"]) >= 1
        found = world.residency(lora)
        assert (found["tier"], found["size_bytes"] > 0) == ("failed", True)
        assert found["error"], "the operator is told more than the customer"
        world.s3.clear()
        world.wait_served(lora)
    assert world.residency(lora)["error"] is None
    check_bill(world, lora, {"adapter_loading"})


def test_an_object_that_is_damaged_or_lost_is_a_502_until_it_is_uploaded_again(
    world: World,
) -> None:
    damaged, lost = world.make_lora(), world.make_lora()
    with world.others_going_on():
        world.s3.fail("wrong_bytes", key=damaged.key)
        boto3.client("s3").delete_object(Bucket=BUCKET, Key=lost.key)
        for lora, code in ((damaged, "adapter_corrupt"), (lost, "adapter_missing")):
            for stream in (False, True):
                answer = world.ask(lora.name, stream=stream)
                check_error(answer, 502, code)
                assert answer.headers["x-should-retry"] == "false"
            assert world.residency(lora)["tier"] == "failed"
        world.s3.clear()
        for lora in (damaged, lost):
            world.tenant.push(lora.name, lora.folder)
    for lora in (damaged, lost):
        world.wait_served(lora)
    check_bill(world, damaged, {"adapter_corrupt"})
    check_bill(world, lost, {"adapter_missing"})


def test_a_fetcher_that_is_killed_is_asked_again_by_a_request_that_waits(world: World) -> None:
    lora = world.make_lora()
    asked = world.s3.count(lora.key)
    world.s3.fail("hang", key=lora.key, times=1)
    with world.others_going_on() as pool:
        waiting = pool.submit(world.ask, lora.name)
        world.stack.wait(lambda: world.s3.count(lora.key) > asked)
        world.stack.kill("fetcher")
        assert waiting.result().status_code == 200
    assert world.residency(lora)["tier"] == "device"


def check_error(answer: httpx.Response, status: int, code: str) -> None:
    """Check status and code, and that the message does not tell where the object is."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert "othing was billed" in error["message"]
    for secret in ("tenants/", "127.0.0.1", BUCKET):
        assert secret not in error["message"]


def check_bill(world: World, lora: Lora, causes: set[str]) -> None:
    """Check that the adapter's failed requests are in the ledger and cost nothing."""

    def failed() -> list[dict[str, object]]:
        lines = world.stack.operator.get("/admin/v1/usage/export?format=jsonl").text.splitlines()
        own = [event for event in map(json.loads, lines) if event["model"] == lora.name]
        return [event for event in own if event["finish_reason"] == "error"]

    world.stack.wait(failed)
    for event in failed():
        assert event["stop_cause"] in causes
        assert (event["amount_nanousd"], event["completion_tokens"]) == (0, 0)
        assert event["is_failed"]
