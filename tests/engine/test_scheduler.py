"""The scheduler: everybody gets what they would get alone, nobody is lost, nothing leaks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, tuples

from engine.batch import BAD_LOGITS
from engine.messages import ExtendLease, LeaseLow
from tests.engine.fakes import (
    LAYOUT,
    FakeClock,
    FakeLoader,
    expected_tokens,
    fake_token,
    make_adapter,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    tokens_of,
)

request_shapes = lists(
    tuples(integers(1, 90), integers(1, 40), integers(0, 4), booleans()), min_size=1, max_size=12
)


@given(request_shapes, integers(14, 40), integers(5, 64), integers(1, 6), integers(0, 2**16))
@settings(max_examples=120, deadline=None)
def test_any_mix_gives_each_request_what_it_gets_alone(
    tmp_path_factory, shapes, num_slabs, budget, num_seqs, seed
):
    """Small arenas, chunked prefill, preemption, adapters coming and going, aborts on the way."""
    loader = FakeLoader(at_once=False)
    adapters = [None, *(make_adapter(f"a{i}") for i in range(4))]
    loader.slabs = {a.object_key: i + 1 for i, a in enumerate(adapters) if a}
    scheduler = make_scheduler(
        num_slabs, loader, max_num_batched_tokens=budget, max_num_seqs=num_seqs
    )
    core = make_core(tmp_path_factory.mktemp("engine"), scheduler)
    chance = random.Random(seed)
    messages = [
        make_message(f"r{i}", prompt, output, adapters[adapter])
        for i, (prompt, output, adapter, _) in enumerate(shapes)
    ]
    aborted = {f"r{i}" for i, shape in enumerate(shapes) if shape[3]}
    outputs: dict[str, list] = {}
    pending = list(messages)
    for _ in range(3000):
        if pending and chance.random() < 0.5:
            assert core.handle("gw", pending.pop(0)) == []
        if aborted and chance.random() < 0.05:
            scheduler.abort([chance.choice(sorted(aborted))])
        if chance.random() < 0.7:
            loader.finish()
        for _, message in core.step():
            for output in message.outputs:
                outputs.setdefault(output.request_id, []).append(output)
        scheduler.check_integrity()
        if not pending and not scheduler.has_work:
            break
    assert not scheduler.has_work, "somebody waits for ever"
    for message in messages:
        got = outputs[message.request_id]
        assert [o.seq for o in got] == list(range(len(got)))
        assert [o.finish_reason is not None for o in got] == [False] * (len(got) - 1) + [True]
        expected = expected_tokens(message)
        if got[-1].finish_reason == "abort":
            assert tokens_of(got) == expected[: len(tokens_of(got))]
        else:
            assert tokens_of(got) == expected
            assert got[-1].num_prompt_tokens == len(message.prompt_token_ids)
    assert scheduler.arena.num_free + scheduler.adapters.num_slabs_used() == num_slabs


def test_a_step_stays_within_the_token_budget():
    scheduler = make_scheduler(max_num_batched_tokens=20)
    for i in range(6):
        scheduler.add("gw", make_message(f"r{i}", prompt_len=15))
    for _ in range(10):
        batch = scheduler.schedule()
        assert batch.num_tokens <= 20
        scheduler.update(batch, [7 if row.sampling else None for row in batch.rows])


def test_a_long_prefill_does_not_stop_decodes():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add("gw", make_message("short", prompt_len=4, max_tokens=30))
    batch = scheduler.schedule()
    scheduler.update(batch, [7])
    scheduler.add("gw", make_message("long", prompt_len=200))
    for _ in range(8):
        batch = scheduler.schedule()
        assert "short" in {row.request_id for row in batch.rows}
        assert batch.num_tokens == 16
        scheduler.update(batch, [7 if row.sampling else None for row in batch.rows])


def test_a_request_whose_adapter_loads_is_skipped_not_waited_for():
    loader = FakeLoader(at_once=False)
    scheduler = make_scheduler(loader=loader)
    scheduler.add("gw", make_message("cold", adapter=make_adapter()))
    scheduler.add("gw", make_message("warm"))
    assert [row.request_id for row in scheduler.schedule().rows] == ["warm"]


def test_an_adapter_that_fails_ends_its_own_requests_only(tmp_path):
    loader = FakeLoader()
    bad, good = make_adapter("bad"), make_adapter("good")
    loader.errors[bad.object_key, "disk"] = ("no such object", True)
    core = make_core(tmp_path, make_scheduler(loader=loader))
    for name, adapter in (("r1", bad), ("r2", good), ("r3", None), ("r4", bad)):
        core.handle("gw", make_message(name, adapter=adapter))
    outputs = run_until_idle(core)
    for name in ("r1", "r4"):
        assert outputs[name][-1].stop_cause == "adapter_rejected"
        assert outputs[name][-1].error == "no such object"
    assert {outputs[name][-1].finish_reason for name in ("r2", "r3")} == {"length"}


def test_a_passing_failure_is_tried_again_later(tmp_path):
    clock, loader = FakeClock(), FakeLoader()
    adapter = make_adapter()
    loader.errors[adapter.object_key, "disk"] = ("503 from the store", False)
    core = make_core(tmp_path, make_scheduler(loader=loader, clock=clock))
    core.handle("gw", make_message("r1", adapter=adapter))
    assert run_until_idle(core)["r1"][-1].stop_cause == "adapter_failed"
    loader.errors.clear()
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
        "adapter_rejected",
        "the adapter does not fit into the arena",
    )


def test_joined_loads_fetch_once():
    loader = FakeLoader(at_once=False)
    scheduler = make_scheduler(loader=loader)
    for i in range(5):
        scheduler.add("gw", make_message(f"r{i}", adapter=make_adapter()))
    scheduler.schedule()
    assert loader.num_fetches == 1


def test_an_adapter_in_use_is_never_evicted(tmp_path):
    """Two adapters of 4 slabs in an arena that holds one of them beside the KV."""
    loader = FakeLoader()
    first, second = make_adapter("first"), make_adapter("second")
    loader.slabs = {first.object_key: 4, second.object_key: 4}
    core = make_core(tmp_path, make_scheduler(num_slabs=8, loader=loader))
    core.handle("gw", make_message("r1", adapter=first, max_tokens=30))
    core.handle("gw", make_message("r2", adapter=second, max_tokens=3))
    while not core.scheduler.running:
        core.step()
    while core.scheduler.running and core.scheduler.running[0].request_id == "r1":
        assert core.adapters.is_ready(first.object_key)
        core.step()
    assert tokens_of(run_until_idle(core)["r2"])


def test_the_queue_has_a_limit():
    scheduler = make_scheduler(max_waiting=2)
    answers = [scheduler.add("gw", make_message(f"r{i}")) for i in range(3)]
    assert answers == [None, None, "queue_full"]


def test_a_prompt_beyond_the_context_is_refused():
    assert make_scheduler().add("gw", make_message(prompt_len=256)) == "prompt_too_long"


def test_bad_logits_fail_their_own_request_only():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message("bad"))
    scheduler.add("gw", make_message("good"))
    batch = scheduler.schedule()
    tokens = [BAD_LOGITS if row.request_id == "bad" else 7 for row in batch.rows]
    outputs = {o.request_id: o for _, o in scheduler.update(batch, tokens).outputs}
    assert outputs["bad"].finish_reason == "error"
    assert outputs["bad"].error == "the logits are not finite"
    assert outputs["good"].finish_reason is None


@pytest.mark.parametrize(
    ("sampling", "cause", "count"),
    [
        ({}, "max_tokens", 8),
        ({"max_tokens": 2}, "max_tokens", 2),
        ({"token_lease": 3}, "budget", 3),
        ({"stop_token_ids": (105,)}, "stop_token", 6),
    ],
)
def test_a_request_ends_at_the_first_limit_it_meets(sampling, cause, count):
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(**sampling))
    ended = []
    for token in range(100, 120):
        batch = scheduler.schedule()
        if not batch.rows:
            break
        ended = scheduler.update(batch, [token]).ended
    assert ended[0].stop_cause == cause
    assert len(ended[0].output_token_ids) == count


def test_eos_ends_a_request_unless_it_is_ignored():
    for ignore, reason in ((False, "stop"), (True, None)):
        scheduler = make_scheduler()
        scheduler.add("gw", make_message(ignore_eos=ignore))
        (_, output), *_ = scheduler.update(scheduler.schedule(), [0]).outputs
        assert output.finish_reason == reason


def test_a_stop_string_ends_the_request_and_says_how_much_text_to_cut():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(stop=(b"BC",)))
    finals = []
    for token in b"ABCD":
        batch = scheduler.schedule()
        if batch.rows:
            finals += [o for _, o in scheduler.update(batch, [token]).outputs]
    assert [o.new_token_ids for o in finals] == [(65,), (66, 67)]
    assert (finals[-1].stop_cause, finals[-1].num_stop_bytes) == ("stop_string", 2)
    assert finals[-1].num_completion_tokens == 3


def test_a_low_lease_is_announced_and_extending_it_goes_on():
    scheduler = make_scheduler(max_model_len=512)
    scheduler.add("gw", make_message(max_tokens=200, token_lease=70))
    low: list[LeaseLow] = []
    for count in range(1, 101):
        result = scheduler.update(scheduler.schedule(), [7])
        low += [message for _, message in result.leases_low]
        if count == 20:
            scheduler.extend_lease(ExtendLease(request_id="r1", token_lease=100))
    assert [m.num_completion_tokens for m in low] == [6, 36]
    assert result.ended[0].stop_cause == "budget"
    assert len(result.ended[0].output_token_ids) == 100


def test_a_request_past_its_deadline_is_ended():
    clock = FakeClock()
    scheduler = make_scheduler(clock=clock)
    scheduler.add("gw", make_message(deadline_s=5.0))
    clock.now += 5.0
    (_, output), *_ = scheduler.update(scheduler.schedule(), []).outputs
    assert output.stop_cause == "deadline"


def test_a_lost_gateway_frees_everything_it_had():
    scheduler = make_scheduler()
    scheduler.add("gw-1", make_message("r1"))
    scheduler.add("gw-2", make_message("r2"))
    scheduler.schedule()
    scheduler.abort_gateway("gw-1")
    scheduler.check_integrity()
    assert set(scheduler.requests) == {"r2"}


def test_preempted_requests_come_back_with_the_same_tokens(tmp_path):
    core = make_core(tmp_path, num_slabs=8, max_num_seqs=4)
    messages = [make_message(f"r{i}", prompt_len=20, max_tokens=60) for i in range(4)]
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    assert core.scheduler.num_preemptions > 0
    for message in messages:
        assert tokens_of(outputs[message.request_id]) == expected_tokens(message)
        # Recomputed prompt tokens are not billed twice.
        assert outputs[message.request_id][-1].num_prompt_tokens == 20


def test_an_arena_too_small_for_one_request_is_refused_at_start():
    with pytest.raises(ValueError, match="arena_bytes of at least"):
        make_scheduler(num_slabs=4, max_model_len=256)


def test_the_fake_depends_on_the_adapter():
    assert fake_token([1, 2], None) != fake_token([1, 2], make_adapter().digest)
    assert LAYOUT.block_size == 16
