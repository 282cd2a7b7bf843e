"""A request's answers: n to each prompt of a list, with one id, one bill and one lease."""

import pytest

from engine.steps.batch import BAD_LOGITS, StepTokens
from tests.engine.fakes import (
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    tokens_of,
    update,
)

PROMPTS = [list(range(1, length + 1)) for length in (40, 7, 33)]


def make_list(n=1, max_tokens=5, **options):
    """A request with a list of three prompts; the third begins with the first one's blocks."""
    more = tuple(map(tuple, PROMPTS[1:]))
    options = {"more_prompts": more, "token_lease": 3 * n * max_tokens, **options}
    return make_message("list", prompt=PROMPTS[0], n=n, max_tokens=max_tokens, **options)


def test_n_answers_count_as_n_in_the_queue_and_their_prompt_once(tmp_path):
    scheduler = make_scheduler(max_waiting=3)
    assert scheduler.add("gw", make_message("r1", n=4)) == "queue_full"
    core = make_core(tmp_path, scheduler)
    core.handle("gw", make_message("r2", prompt_len=20, max_tokens=5, n=3))
    final = run_until_idle(core)["r2"][-1]
    assert (final.num_prompt_tokens, final.num_completion_tokens) == (20, 15)
    assert final.is_last


@pytest.mark.parametrize("n", [1, 2])
def test_a_lease_is_shared_by_the_answers_to_all_prompts_in_equal_parts(tmp_path, n):
    core = make_core(tmp_path)
    core.handle("gw", make_list(n, max_tokens=9, token_lease=3 * n * 5 + 2))
    outputs = run_until_idle(core)["list"]
    answers = [tokens_of([o for o in outputs if o.index == i]) for i in range(3 * n)]
    assert [len(answer) for answer in answers] == [5] * 3 * n
    assert outputs[-1].stop_cause == "budget"


def test_one_answers_bad_logits_fail_its_request():
    scheduler = make_scheduler(prefix_caching=False)
    scheduler.add("gw", make_message("r1", n=2))
    batch = scheduler.schedule()
    result = update(scheduler, batch, StepTokens([7, BAD_LOGITS]))
    finals = [o for _, o in result.outputs if o.finish_reason]
    assert [o.finish_reason for o in finals] == ["error", "error"]
    assert (finals[-1].is_last, finals[-1].error) == (True, "the logits are not finite")
    (ended,) = result.ended
    assert (ended.decisive.finish_reason, len(ended.output_token_ids)) == ("error", 1)


def test_what_one_prompt_of_a_list_finds_of_another_is_cached(tmp_path):
    core = make_core(tmp_path, max_num_seqs=1, prefix_caching=True)
    core.handle("gw", make_list())
    assert run_until_idle(core)["list"][-1].num_cached_tokens == 32


def test_a_list_is_refused_whole():
    scheduler = make_scheduler(max_waiting=5)
    assert scheduler.add("gw", make_list(n=2)) == "queue_full"
    too_long = (1,) * 256
    assert scheduler.add("gw", make_list(more_prompts=((1,), too_long))) == "prompt_too_long"
    assert not scheduler.has_work


def test_one_seed_gives_each_prompt_of_a_list_the_answers_that_it_has_alone():
    scheduler = make_scheduler(prefix_caching=False, max_num_batched_tokens=256)
    scheduler.add("gw", make_list(n=2, seed=5))
    seeds = [row.seed for row in sorted(scheduler.schedule().rows, key=lambda row: row.index)]
    assert seeds[:2] == seeds[2:4] == seeds[4:]
    assert seeds[0] == 5 != seeds[1]
    scheduler = make_scheduler(prefix_caching=False, max_num_batched_tokens=256)
    scheduler.add("gw", make_list(n=2))
    assert len({row.seed for row in scheduler.schedule().rows}) == 6
