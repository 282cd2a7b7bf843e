"""An aborted request gives back its seat, blocks and place in the queue with the next step."""

import pytest

from engine.wire.messages import AbortRequests, StepOutputs
from tests.engine.fakes import make_adapter, make_core, make_message


def is_empty(core) -> bool:
    arena, pool = core.scheduler.arena, core.scheduler.kv.pool
    kept = core.adapters.machine.num_slabs + pool.num_idle
    return not core.scheduler.groups and arena.num_free + kept == arena.num_slabs


def outputs_of(messages) -> list:
    steps = [message for _, message in messages if isinstance(message, StepOutputs)]
    return [output for step in steps for output in step.outputs]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_answers", [1, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 9])
def test_everything_is_free_one_step_after_the_abort(tmp_path, lag, num_answers, num_steps):
    """The abort is tested with and without a step under way.

    lag: 1 means that a step is under way when the abort comes and must be collected first.
    """
    core = make_core(tmp_path, lag=lag)
    message = make_message("r1", prompt_len=40, max_tokens=100, n=num_answers,
                           adapter=make_adapter("a"))  # fmt: skip
    core.handle("gw", message)
    for _ in range(num_steps):
        core.step()
    core.handle("gw", AbortRequests(request_ids=("r1",)))
    outputs = outputs_of(core.step())
    if lag:
        outputs += outputs_of(core.step())
    core.scheduler.check_integrity()
    assert is_empty(core)
    *_, last = outputs
    assert (last.is_last, last.stop_cause) == (True, "aborted")


def test_who_waits_gets_the_seat_in_the_next_step(tmp_path):
    core = make_core(tmp_path, max_num_seqs=1)
    for request_id in ("r1", "r2"):
        core.handle("gw", make_message(request_id, max_tokens=50))
    core.step()
    core.handle("gw", AbortRequests(request_ids=("r1",)))
    assert {output.request_id for output in outputs_of(core.step())} == {"r1", "r2"}
