"""Two ranks that share a quantised model: they answer as PEFT does, and one that is killed costs
nobody anything.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.e2e.bill import Before, check_bill, kill_rank, load
from tests.e2e.oracle import TinyWorld, check_oracle
from tests.e2e.stack import running
from tests.quantized_models import save_quantized
from tests.tiny_models import ALL_TARGETS, save_adapter, save_model

SPECS = {
    "patterns": {"r": 4, "rank_pattern": {"v_proj": 11, "down_proj": 9}},
    "wide": {"r": 16, "use_rslora": True, "target_modules": [*ALL_TARGETS, "lm_head"]},
    "ends": {"r": 3, "target_modules": ["o_proj", "down_proj", "embed_tokens", "lm_head"]},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyWorld]:
    """The ranks of an untied FP8 checkpoint, whose config is in the old spelling."""
    folder = tmp_path_factory.mktemp("ranks")
    whole = save_model(folder / "model", tied=False, old_spelling=True, intermediate_size=192)
    quantized, twin = save_quantized(whole, folder, "FP8")
    dirs = {
        name: save_adapter(twin, folder / name, seed=300 + i, **spec)
        for i, (name, spec) in enumerate(SPECS.items())
    }
    with running(folder / "stack", quantized, tensor_parallel_size=2) as stack:
        yield TinyWorld.on(stack, twin, dirs)


def test_two_ranks_of_a_quantised_model_equal_peft_on_its_numbers(world: TinyWorld) -> None:
    check_oracle(world, count=16)


def test_swapping_two_adapters_on_purpose_fails_the_oracle(world: TinyWorld) -> None:
    swapped = world.dirs | {"wide": world.dirs["ends"], "ends": world.dirs["wide"]}
    with pytest.raises(AssertionError, match=r"^\[2, 3"):
        check_oracle(replace(world, dirs=swapped), count=8)


def test_the_bill_is_exact_after_a_rank_of_the_model_is_killed(world: TinyWorld) -> None:
    stack, before = world.stack, Before.of(world.stack)
    seen = asyncio.run(load([world.tenant], count=30, seed=5, kill="rank"))
    stack.wait_ready()
    after = asyncio.run(load([world.tenant], count=5, seed=6))
    assert after.num_errors == 0, "the ranks are back"
    unpaid = [e for e in check_bill(stack, seen, before) if e["stop_cause"] == "engine_failure"]
    assert unpaid
    assert all(event["amount_nanousd"] == 0 for event in unpaid)


def test_an_idle_engine_notices_the_loss_of_a_rank_before_a_request_finds_it(
    world: TinyWorld,
) -> None:
    kill_rank(world.stack)
    world.stack.wait(lambda: world.stack.operator.get("/ready").status_code == 503)
    world.stack.wait_ready()
    assert asyncio.run(load([world.tenant], count=2, seed=7)).num_errors == 0
