"""Steps in flight: what their rows have computed, and what is learned from the time they take."""

import pytest

from engine.scheduling.in_flight import InFlight, Launched
from engine.steps.batch import Batch, ScheduledRow
from engine.wire.messages import SamplingParams
from tests.engine.fakes import FakeClock, make_message, make_scheduler

SAMPLING = SamplingParams(max_tokens=9)


class Estimate:
    """Notes what it is told of steps."""

    def __init__(self):
        self.told = []

    def note(self, *step):
        self.told.append(step)

    def note_after_pause(self, *step):
        self.told.append(("paused", *step))


@pytest.mark.parametrize(
    ("rows", "is_after_pause", "tokens_per_s", "told"),
    [
        ([(9, 0)], False, 4.5, []),
        ([(9, 0), (1, 0)], True, 5.0, []),
        ([(4, 0), *[(1, 0)] * 5], False, 0.0, []),
        ([(1, 0), (8, 7)], False, 0.0, [(2, 7, 2.0)]),
        ([(1, 0)], True, 0.0, [("paused", 1, 0, 3.0)]),
    ],
    ids=["prompt", "mostly prompt", "mostly decodes", "drafts", "after a pause"],
)
def test_steps_of_prompts_tell_their_speed_and_steps_of_decodes_what_they_take(
    rows, is_after_pause, tokens_per_s, told
):
    """rows: (tokens, drafts among them). The step begins 1 s after the last one, and takes 2 s."""
    clock, estimate = FakeClock(0.0), Estimate()
    scheduler = make_scheduler(clock=clock)
    kv, outputs = scheduler.kv, scheduler.outputs
    in_flight = InFlight(scheduler.adapters, kv, outputs, estimate, clock)
    batch = Batch(
        1, tuple(ScheduledRow("r", (0,) * num, 5, (0,), num_drafts=drafts) for num, drafts in rows)
    )
    in_flight.steps.append(Launched(batch, (), 1.0, is_after_pause))
    kv.arena.launch_step(1)
    clock.now = 3.0
    in_flight.finish(batch)
    assert kv.swap.costs.prefill_tokens_per_s == tokens_per_s
    assert estimate.told == told


@pytest.mark.parametrize(
    ("num_accepted", "num_again", "has_blocks", "computed"),
    [
        (0, None, True, 2),
        (2, None, True, 4),
        (2, None, False, 0),  # preempted meanwhile
        (0, 3, True, 2),  # whose grammar forces tokens
        (0, 4, True, 1),  # whose mask is late
    ],
)
def test_a_row_with_three_drafts_has_computed_its_tokens_and_the_accepted_drafts(
    num_accepted, num_again, has_blocks, computed
):
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(prompt_len=3))
    (request,) = scheduler.queues.waiting
    request.block_ids = [0] if has_blocks else []
    request.num_in_flight_tokens, request.num_pending_tokens = 5, 1
    row = ScheduledRow("r1", (1, 2, 3, 4, 5), 0, (0,), sampling=SAMPLING, num_drafts=3)
    launched = Launched(Batch(1, (row,)), [request], 0.0, is_after_pause=False)
    if num_again is not None:
        launched.leave_out(0, num_again)
        assert request.num_in_flight_tokens == 5 - num_again
    launched.settle(0, num_accepted)
    assert request.num_in_flight_tokens == request.num_pending_tokens == 0
    assert request.num_computed_tokens == computed
