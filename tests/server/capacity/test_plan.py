"""Plans hold together: more traffic never needs fewer engines, and what breaks is named."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.capacity.arena import default_limits
from server.capacity.engine_plan import Load, Objective
from server.capacity.hardware import HARDWARE, Hardware
from server.capacity.plan import Plan, Wish, make_plan
from server.capacity.sizes import Quantization, find_sizes
from server.capacity.steps import Rate, Speed, StepLoad, StepTimes, speed_on_paper
from server.capacity.traffic import Lengths, Traffic, percentile

A100 = HARDWARE["a100-80gb"]
SHORT = Traffic(Lengths(32, 96), Lengths(4, 12))


def plan(
    loads: Sequence[Load], hardware: Hardware = A100, model: str = "llama-3-8b", **changes: Any
) -> Plan:
    wish = Wish(
        sizes=find_sizes(model),
        hardware=hardware,
        quantization="float",
        limits=default_limits(hardware.kind),
        traffic=SHORT,
        loads=loads,
        objective=Objective(0.2, 0.05),
        utilization=0.5,
        max_devices=1,
        tensor_parallel_size=None,
        speed=lambda _: speed_on_paper(hardware),
    )
    return make_plan(replace(wish, **changes))


@settings(max_examples=4, deadline=None)
@given(st.floats(0.1, 500), st.floats(1, 4))
def test_more_traffic_never_needs_fewer_engines(rate: float, times: float) -> None:
    few, many = (plan([Load(rate=r)]).fleet.num_engines or 0 for r in (rate, times * rate))
    assert 1 <= few <= many


def test_more_users_never_need_fewer_engines() -> None:
    counts = [plan([Load(users=n)]).fleet.num_engines or 0 for n in (1, 200, 900)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_the_largest_load_within_the_objective_keeps_it_and_the_verdict_breaks_it() -> None:
    found = plan([Load(rate=1.0)])
    engine, objective = found.fleet.engine, found.wish.objective
    assert found.fleet.capacity is not None
    assert found.verdict.load is not None
    assert objective.broken_by(engine.replay(found.fleet.capacity)) == ""
    assert objective.broken_by(engine.replay(found.verdict.load)) == found.verdict.what


GPU = default_limits("gpu")
MANY_RANKS = replace(SHORT, num_adapters=64, ranks=(64,))
LONG = Traffic(Lengths(8000, 8000), Lengths(64, 64))
CHAT = Traffic(Lengths(8, 8), Lengths(64, 64))


@pytest.mark.parametrize(
    ("why", "hardware", "changes"),
    [
        ("weights", "a10g-24gb", {"sizes": find_sizes("llama-3-70b")}),
        ("arena", "a10g-24gb", {"traffic": LONG, "limits": replace(GPU, arena_bytes=1 << 29)}),
        ("seats", "a100-80gb", {"limits": replace(GPU, max_num_seqs=4)}),
        ("slabs", "a100-80gb", {"limits": replace(GPU, arena_bytes=60 << 20)}),
        ("ranks", "a100-80gb",
         {"traffic": MANY_RANKS, "limits": replace(GPU, max_sum_ranks_per_step=128)}),
        ("weight bytes", "l4-24gb", {"traffic": CHAT, "objective": Objective(None, 0.001)}),
    ],
)  # fmt: skip
def test_what_breaks_first_is_named(why: str, hardware: str, changes: dict[str, Any]) -> None:
    found = plan([Load(users=64)], HARDWARE[hardware], **changes)
    assert found.verdict.why == why
    assert found.verdict.change


def test_the_cheapest_number_of_devices_that_works_is_taken() -> None:
    found = plan([Load(users=1)], model="llama-3-70b", max_devices=8)
    assert [fleet.engine.fits for fleet in found.tried] == [False, False, True, True]
    assert found.fleet.engine.num_shards == 4
    assert {fleet.engine.quantization for fleet in found.costs} == {"float", "int8", "int4"}


def step_times(quantization: Quantization, speed: Speed) -> StepTimes:
    found = plan([Load(users=1)])
    return StepTimes(
        find_sizes("llama-3-8b"), quantization, 2, found.fleet.engine.arena.layout, speed
    )


def test_a_decode_takes_as_long_as_reading_the_weights_and_a_prefill_as_long_as_its_flops() -> None:
    speed = speed_on_paper(A100)
    float_s, int4_s = (
        step_times(form, speed).seconds(StepLoad(1, 1, 1, 100, 100))
        for form in ("float", "int4")  # type: ignore[arg-type]
    )
    # 8.03 B parameters but the embedding's 0.53 B, at 80 % of 2,039 GB/s, and 1 ms besides.
    assert float_s == pytest.approx(7.5e9 * 2 / (0.8 * 2.039e12) + 1e-3, rel=0.02)
    assert int4_s < 0.45 * float_s
    prompt = StepLoad(2048, 1, 1, 2048, 2048 * 1024)
    # 6.98 B weights of layers.
    flops_s = 2 * 6.98e9 * 2048 / (0.5 * 312e12)
    assert step_times("float", speed).seconds(prompt) == pytest.approx(flops_s, rel=0.1)


def test_a_measured_rate_is_read_between_its_points() -> None:
    rate = Rate(flops_per_s=((1, 10.0), (4, 40.0), (8, 40.0)))
    # 1 and 4 rows take as long, 8 rows twice that; flops are those of all rows.
    assert rate.seconds(0, 1, 1) == pytest.approx(0.1)
    assert rate.seconds(0, 2, 2) == pytest.approx(0.1)
    assert rate.seconds(0, 6, 6) == pytest.approx(0.15)
    assert rate.seconds(0, 16, 16) == pytest.approx(0.4)
    assert Rate(bytes_per_s=5.0).seconds(10, 100) == 2.0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_between_the_values(values: list[float], share: float) -> None:
    assert min(values) <= percentile(values, share) <= max(values) + 1e-6
