"""Seats, KV and ranks go by service: a tenant below its share gets room in a few steps."""

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, sampled_from, tuples

from engine.wire.messages import Priority
from tests.engine.fair_pool import Service, Steps
from tests.engine.fakes import (
    LAYOUT,
    FakeLoader,
    make_adapter,
    make_message,
    make_scheduler,
)

LONG = 400
"""Tokens of a hog's answers, longer than any test runs."""


class Engine(Steps):
    """A scheduler with a fake runner."""

    def send(self, name, tenant, prompt_len=9, max_tokens=LONG, **fields):
        fields = {"tenant_id": tenant, **fields}
        self.scheduler.add("gw", make_message(name, prompt_len, max_tokens, **fields))

    def step(self):
        """Run a step; return the ids of the requests in it."""
        self.scheduler.adapters.poll()
        batch = super().step()
        self.scheduler.check_integrity()
        return {row.request_id for row in batch.rows}

    def steps_until(self, name):
        """Number of steps until a request is in one, at most 50."""
        return next((i for i in range(1, 50) if name in self.step()), 50)

    def seats(self):
        """Seats of each tenant."""
        held = [request.tenant_id for request in self.scheduler.queues.running]
        return {tenant: held.count(tenant) for tenant in sorted(set(held))}


def make_engine(num_slabs=400, lag=0, loader=None, **config):
    defaults = {"scheduling_policy": "vtc", "max_model_len": 512, "prefix_caching": False}
    return Engine(make_scheduler(num_slabs, loader, **defaults | config), lag)


@settings(max_examples=30, deadline=None)
@given(
    num_seqs=integers(2, 8),
    hogs=lists(tuples(integers(1, 40), sampled_from([1.0, 3.0])), min_size=1, max_size=3),
    lag=integers(0, 1),
    steps_before=integers(1, 12),
    prefix_caching=booleans(),
    num_slabs=sampled_from([40, 60, 400]),
)
def test_a_tenant_below_its_share_gets_a_seat_within_a_few_steps(
    num_seqs, hogs, lag, steps_before, prefix_caching, num_slabs
):
    """A backlogged tenant's seats never stay below its weighted share of them, in VTC's terms."""
    engine = make_engine(
        num_slabs, lag, max_num_seqs=num_seqs, max_waiting=1000, prefix_caching=prefix_caching
    )
    for hog, (num_requests, weight) in enumerate(hogs):
        for i in range(num_requests):
            engine.send(f"hog{hog}-{i}", f"hog{hog}", weight=weight, n=3)
    for _ in range(steps_before):
        engine.step()
    engine.send("small", "small")
    weights = 1.0 + sum(weight for _, weight in hogs)
    has_share = num_seqs / weights >= 1
    steps = engine.steps_until("small")
    assert not has_share or steps <= 4 + lag


def fill(engine, weights, **fields):
    """One tenant takes all seats; a step later the others come, each with more than it can have."""
    first, *others = weights
    for i in range(60):
        engine.send(f"{first}{i}", first, weight=weights[first], **fields)
    while engine.seats().get(first, 0) < engine.scheduler.config.max_num_seqs:
        engine.step()
    for tenant in others:
        for i in range(60):
            engine.send(f"{tenant}{i}", tenant, weight=weights[tenant], **fields)


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_tenants_that_come_have_two_thirds_of_what_the_first_has_in_a_few_steps(weight):
    engine = make_engine(num_slabs=1000, max_num_seqs=24)
    fill(engine, {"a": 1.0, "b": weight, "c": weight})
    for _ in range(24):
        engine.step()
    seats, preemptions = engine.seats(), engine.scheduler.queues.num_preemptions
    assert sum(seats.values()) == 24
    assert all(1.5 * (seats[t] + 1) / weight > seats["a"] - 1 for t in "bc")
    for _ in range(100):
        engine.step()
    assert engine.seats() == seats, "nobody is preempted back and forth"
    assert engine.scheduler.queues.num_preemptions == preemptions == 24 - seats["a"]


def test_turns_make_seats_equal_as_answers_end_and_preempt_nobody():
    engine = make_engine(num_slabs=1000, max_num_seqs=24, max_num_batched_tokens=128)
    fill(engine, {"a": 1.0, "b": 1.0}, max_tokens=10)
    for _ in range(30):
        engine.step()
    preemptions = engine.scheduler.queues.num_preemptions
    held = []
    for _ in range(20):
        engine.step()
        held.append(engine.seats()["b"])
    assert 9 <= sum(held) / len(held) <= 15
    assert engine.scheduler.queues.num_preemptions == preemptions


def test_the_newest_answer_of_the_tenant_with_most_seats_gives_way():
    engine = make_engine(max_num_seqs=6)
    for name in ("a0", "a1", "b0", "a2", "a3", "b1"):
        engine.send(name, name[0])
        engine.step()
    engine.send("c0", "c")
    engine.steps_until("c0")
    assert engine.seats() == {"a": 3, "b": 2, "c": 1}
    assert [r.request_id for r in engine.scheduler.queues.waiting] == ["a3"]


def test_kv_is_shared_like_seats():
    engine = make_engine(num_slabs=40, max_num_seqs=40)
    size = LAYOUT.block_size
    for i in range(10):
        engine.send(f"a{i}", "a", 4 * size - 1, 2 * size)
    for _ in range(20):
        engine.step()
    assert engine.scheduler.arena.num_available < 10
    engine.send("b0", "b", 10 * size, 10)
    assert engine.steps_until("b0") <= 3


def test_one_request_that_is_a_tenants_all_is_not_taken_from_it():
    engine = make_engine(num_slabs=32, max_num_seqs=4)
    engine.send("a0", "a", 31 * LAYOUT.block_size, 16)
    for _ in range(10):
        engine.step()
    engine.send("b0", "b", 20 * LAYOUT.block_size, 4)
    engine.step()
    engine.step()
    assert engine.seats() == {"a": 1}
    assert engine.scheduler.queues.num_preemptions == 0


def test_an_adapter_finds_room_in_an_arena_that_another_tenants_kv_fills():
    adapter = make_adapter("small")
    loader = FakeLoader()
    loader.slabs = {adapter.object_key: 4}
    engine = make_engine(num_slabs=40, max_num_seqs=40, loader=loader)
    for i in range(10):
        engine.send(f"a{i}", "a", 4 * LAYOUT.block_size - 1, 64)
    for _ in range(20):
        engine.step()
    engine.send("b0", "b", adapter=adapter)
    assert engine.steps_until("b0") <= 6


def test_an_adapter_finds_ranks_in_a_step_that_another_tenants_adapters_fill():
    own = [make_adapter(f"a{i}", rank=16) for i in range(4)]
    small = make_adapter("small", rank=16)
    loader = FakeLoader()
    loader.slabs = {adapter.object_key: 1 for adapter in (*own, small)}
    engine = make_engine(max_num_seqs=40, max_sum_ranks_per_step=64, loader=loader)
    for i in range(12):
        engine.send(f"a{i}", "a", adapter=own[i % 4])
    for _ in range(8):
        engine.step()
    assert len(engine.seats()) == 1
    engine.send("b0", "b", adapter=small)
    assert engine.steps_until("b0") <= 6
    assert engine.seats()["a"] == 9


def test_other_policies_and_lower_classes_take_nothing():
    for config, fields in (
        ({"scheduling_policy": "fcfs"}, {}),
        ({"scheduling_policy": "sjf"}, {}),
        ({}, {"priority": Priority.BATCH}),
    ):
        engine = make_engine(max_num_seqs=4, **config)
        for i in range(8):
            engine.send(f"a{i}", "a")
        engine.step()
        engine.send("b0", "b", **fields)
        for _ in range(20):
            engine.step()
        assert engine.seats() == {"a": 4}


def test_a_passed_request_of_a_more_served_tenant_holds_up_only_its_own():
    engine = make_engine(max_num_seqs=8, max_skips=0, max_sum_ranks_per_step=32)
    first, second = make_adapter("one", rank=32), make_adapter("two", rank=32)
    engine.send("a0", "a", adapter=first)
    for _ in range(4):
        engine.step()
    engine.send("a1", "a", adapter=second)
    for _ in range(4):
        engine.step()
    engine.send("a2", "a")
    engine.send("b0", "b")
    assert engine.steps_until("b0") <= 2
    assert "a2" not in engine.step()


@settings(max_examples=20, deadline=None)
@given(
    shapes=lists(tuples(sampled_from("abc"), integers(1, 30), integers(1, 12)), max_size=30),
    num_seqs=integers(1, 5),
    num_slabs=integers(33, 60),
)
def test_tenants_are_charged_for_what_steps_compute_and_for_nothing_that_gave_way(
    shapes, num_seqs, num_slabs
):
    engine = make_engine(num_slabs, max_num_seqs=num_seqs, max_num_batched_tokens=16)
    engine.service = Service(dict.fromkeys("abc", 1.0))
    arrivals = list(shapes)
    for step in range(600):
        if arrivals and step % 2:
            tenant, prompt_len, max_tokens = arrivals.pop(0)
            engine.send(f"r{step}", tenant, prompt_len, max_tokens)
        engine.step()
    assert not engine.scheduler.has_work
    charged = dict(engine.scheduler.policy.take_service())
    assert {t: charged.get(t, 0.0) for t in "abc"} == pytest.approx(engine.service.given)
