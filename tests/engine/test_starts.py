"""Starts of requests: limits of the queue, adapters that must be loaded, sums of ranks."""

import pytest

from engine.wire.messages import Timings
from lora.errors import Failure
from tests.engine.fakes import (
    FakeClock,
    FakeLoader,
    make_adapter,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    step,
)


def test_a_request_whose_adapter_loads_is_skipped_not_waited_for():
    loader = FakeLoader(at_once=False)
    scheduler = make_scheduler(loader=loader)
    scheduler.add("gw", make_message("cold", adapter=make_adapter()))
    scheduler.add("gw", make_message("warm"))
    assert [row.request_id for row in scheduler.schedule().rows] == ["warm"]


def test_an_adapter_that_fails_ends_its_own_requests_only(tmp_path):
    loader = FakeLoader()
    bad, good = make_adapter("bad"), make_adapter("good")
    loader.failures[bad.object_key, "disk"] = Failure("missing", "no such object")
    core = make_core(tmp_path, make_scheduler(loader=loader))
    for name, adapter in (("r1", bad), ("r2", good), ("r3", None), ("r4", bad)):
        core.handle("gw", make_message(name, adapter=adapter))
    outputs = run_until_idle(core)
    for name in ("r1", "r4"):
        assert outputs[name][-1].stop_cause == "adapter_missing"
        assert outputs[name][-1].error == "no such object"
        assert outputs[name][-1].retry_after_s is None
    assert {outputs[name][-1].finish_reason for name in ("r2", "r3")} == {"length"}


def test_an_adapter_that_does_not_come_in_time_is_said_to_be_loading(tmp_path):
    """The answer says when to retry, rather than that too many requests wait."""
    clock, loader = FakeClock(), FakeLoader(at_once=False)
    core = make_core(tmp_path, make_scheduler(loader=loader, clock=clock))
    message = make_message(adapter=make_adapter(), first_token_timeout_s=5.0)
    core.handle("gw", message)
    core.step()
    clock.now += 5.0
    final = run_until_idle(core)["r1"][-1]
    assert (final.stop_cause, final.retry_after_s) == ("adapter_loading", 1.0)
    loader.finish()
    core.step()
    assert core.adapters.entries[message.adapter.object_key].tier == "remote", "dropped load"


def test_the_last_output_says_how_long_the_adapter_and_the_turn_took(tmp_path):
    clock, loader = FakeClock(), FakeLoader(at_once=False)
    core = make_core(tmp_path, make_scheduler(loader=loader, clock=clock, max_num_seqs=1))
    core.handle("gw", make_message("warm", max_tokens=100))
    core.handle("gw", make_message("cold", adapter=make_adapter()))
    core.step()
    clock.now += 2.0
    core.step()
    loader.finish()
    core.step()
    clock.now += 1.0
    while loader.under_way:
        loader.finish()
        core.step()
    clock.now += 2.0
    core.scheduler.abort(["warm"])
    outputs = run_until_idle(core)
    warm, cold = (outputs[name][-1].timings for name in ("warm", "cold"))
    assert warm == Timings(None, None, queue_s=0.0, prefill_s=0.0, decode_s=5.0)
    assert cold == Timings(3.0, "store", 2.0, prefill_s=0.0, decode_s=0.0, fetch_s=2.0)


def test_a_request_that_never_ran_says_what_it_waited_for(tmp_path):
    clock = FakeClock()
    core = make_core(tmp_path, make_scheduler(clock=clock, max_num_seqs=1))
    for name in ("runs", "waits"):
        core.handle("gw", make_message(name, max_tokens=100))
    core.step()
    clock.now += 2.0
    core.scheduler.abort(["waits"])
    ((_, message),) = core.step()
    final = next(o for o in message.outputs if o.request_id == "waits")
    assert final.timings == Timings(queue_s=2.0)
    assert all(o.timings is None for o in message.outputs if o.request_id == "runs"), "not ended"


@pytest.mark.parametrize("was_there", [True, False])
def test_a_fetch_says_whether_the_adapter_was_on_disk(tmp_path, was_there):
    loader = FakeLoader()
    loader.is_on_disk = was_there
    core = make_core(tmp_path, make_scheduler(loader=loader))
    core.handle("gw", make_message(adapter=make_adapter()))
    timings = run_until_idle(core)["r1"][-1].timings
    assert timings.load_tier == ("disk" if was_there else "store")
    assert (timings.fetch_s is None) == was_there


def test_without_a_first_token_in_time_a_request_ends_as_an_error(tmp_path):
    clock = FakeClock()
    core = make_core(tmp_path, make_scheduler(clock=clock, max_num_seqs=1))
    core.handle("gw", make_message("runs", max_tokens=100))
    core.handle("gw", make_message("waits", first_token_timeout_s=5.0))
    core.step()
    clock.now += 5.0
    ((_, message),) = core.step()
    final = next(o for o in message.outputs if o.request_id == "waits")
    assert (final.finish_reason, final.stop_cause) == ("error", "first_token_timeout")
    assert "runs" in core.scheduler.groups


def test_a_passing_failure_is_tried_again_later(tmp_path):
    clock, loader = FakeClock(), FakeLoader()
    adapter = make_adapter()
    loader.failures[adapter.object_key, "disk"] = Failure("unavailable", "503 from the store")
    core = make_core(tmp_path, make_scheduler(loader=loader, clock=clock))
    core.handle("gw", make_message("r1", adapter=adapter))
    assert run_until_idle(core)["r1"][-1].stop_cause == "adapter_loading"
    loader.failures.clear()
    clock.now += 10
    core.handle("gw", make_message("r2", adapter=adapter))
    assert run_until_idle(core)["r2"][-1].finish_reason == "length"


def test_what_can_never_fit_is_refused_by_name(tmp_path):
    loader = FakeLoader()
    huge = make_adapter("huge")
    loader.slabs[huge.object_key] = 64
    core = make_core(tmp_path, make_scheduler(num_slabs=64, loader=loader))
    core.handle("gw", make_message(adapter=huge))
    final = run_until_idle(core)["r1"][-1]
    assert (final.stop_cause, final.error) == (
        "adapter_too_large",
        "the adapter does not fit into the arena",
    )


def test_a_long_request_is_not_blamed_on_an_adapter_that_others_can_use(tmp_path):
    loader, adapter = FakeLoader(), make_adapter("small")
    loader.slabs[adapter.object_key] = 8
    core = make_core(tmp_path, make_scheduler(num_slabs=20, loader=loader))
    for request_id, max_tokens in (("long", 240), ("short", 5), ("long beside it", 240)):
        core.handle("gw", make_message(request_id, max_tokens=max_tokens, adapter=adapter))
        final = run_until_idle(core)[request_id][-1]
        fits = max_tokens == 5
        assert final.stop_cause == ("max_tokens" if fits else "request_too_long")
        assert final.finish_reason == ("length" if fits else "error")


def test_the_distinct_adapters_of_a_step_stay_within_the_sum_of_ranks():
    scheduler = make_scheduler(max_sum_ranks_per_step=24)
    for i in range(4):
        scheduler.add("gw", make_message(f"r{i}", max_tokens=50, adapter=make_adapter(f"a{i}", 8)))
    for _ in range(5):
        scheduler.adapters.poll()
        batch = step(scheduler)
    assert len(batch.adapters) == 3
    scheduler.add("gw", make_message("joins", adapter=make_adapter("a0", 8)))
    scheduler.add("gw", make_message("base"))
    assert {"joins", "base"} <= {row.request_id for row in scheduler.schedule().rows}


def test_an_adapter_above_the_sum_of_ranks_runs_alone(tmp_path):
    core = make_core(tmp_path, max_sum_ranks_per_step=24)
    core.handle("gw", make_message("small", adapter=make_adapter("small", 8)))
    core.handle("gw", make_message("large", adapter=make_adapter("large", 256)))
    assert run_until_idle(core)["large"][-1].finish_reason == "length"


def test_a_request_without_room_is_passed_max_skips_times_and_no_more():
    scheduler = make_scheduler(max_sum_ranks_per_step=8, max_skips=2)
    for name in ("runs", "passed"):
        message = make_message(name, max_tokens=50, adapter=make_adapter(name, 8))
        scheduler.add("gw", message)
    for i in range(-5, 4):
        if i >= 0:
            scheduler.add("gw", make_message(f"r{i}", max_tokens=50))
        scheduler.adapters.poll()
        batch = step(scheduler)
    assert {row.request_id for row in batch.rows} == {"runs", "r0", "r1"}
