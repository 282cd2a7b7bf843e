"""Swap: used where it is cheaper than recomputation, without changing tokens."""

import pytest

from engine.kv.swap import PreemptionCosts
from tests.engine.fakes import (
    FakeClock,
    expected_tokens,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    tokens_for,
    tokens_of,
    update,
)


def crowded_core(directory, num_swap_slots, prefill_tokens_per_s):
    """A core with four requests that need more than twice the arena in the end."""
    scheduler = make_scheduler(
        8, num_swap_slots=num_swap_slots, max_num_seqs=4, prefix_caching=False
    )
    scheduler.kv.swap.costs.note_prefill(int(prefill_tokens_per_s), 1.0)
    core = make_core(directory, scheduler)
    for i in range(4):
        core.handle("gw", make_message(f"r{i}", prompt_len=20, max_tokens=60))
    return core


@pytest.mark.parametrize(
    ("num_swap_slots", "prefill_tokens_per_s", "is_swapped"),
    [(32, 1, True), (32, 1e12, False), (0, 1, False)],
    ids=["slow prefill", "fast prefill", "no swap space"],
)
def test_the_cheaper_way_is_taken_and_the_tokens_are_the_same(
    tmp_path, num_swap_slots, prefill_tokens_per_s, is_swapped
):
    core = crowded_core(tmp_path, num_swap_slots, prefill_tokens_per_s)
    outputs = run_until_idle(core)
    stats = core.take_stats()
    assert stats.preemptions > 0
    assert bool(stats.swapped) == is_swapped
    assert core.runner.num_transfers > 0 or not is_swapped
    for i in range(4):
        message = make_message(f"r{i}", prompt_len=20, max_tokens=60)
        assert tokens_of(outputs[f"r{i}"]) == expected_tokens(message)
        assert outputs[f"r{i}"][-1].num_prompt_tokens == 20


def test_swapped_blocks_are_not_handed_out_before_the_step_that_copies_them():
    """Tiles may be written to a free slab at any moment, but the copy runs with the next step."""
    scheduler = make_scheduler(8, num_swap_slots=8, prefix_caching=False, max_model_len=128)
    scheduler.kv.swap.costs.note_prefill(1, 1.0)
    for i in range(2):
        scheduler.add("gw", make_message(f"r{i}", prompt_len=60, max_tokens=60))
    while not scheduler.queues.num_swaps:
        batch = scheduler.schedule()
        num_free = scheduler.arena.num_free
        if not scheduler.queues.num_swaps:
            update(scheduler, batch, tokens_for(batch))
    moved = [transfer.block_id for transfer in batch.transfers]
    assert num_free == 0
    assert len(moved) == 4
    update(scheduler, batch, tokens_for(batch))
    assert scheduler.arena.num_free == 4


def test_costs_are_what_the_issue_of_preemption_says():
    """Recompute takes tokens / prefill speed of the last minute, swap 2 * bytes / bandwidth."""
    clock = FakeClock()
    costs = PreemptionCosts(copy_bytes_per_s=1000.0, clock=clock)
    assert not costs.is_swap_cheaper(10**9, 1)  # prefill was never measured
    costs.note_prefill(500, 1.0)
    clock.now += 30
    costs.note_prefill(100, 1.0)
    assert costs.prefill_tokens_per_s == 300.0
    assert costs.is_swap_cheaper(num_tokens=301, num_bytes=500)
    assert not costs.is_swap_cheaper(num_tokens=299, num_bytes=500)
    clock.now += 45
    assert costs.prefill_tokens_per_s == 100.0
    clock.now += 600
    assert costs.prefill_tokens_per_s == 100.0, "the last measured speed"
