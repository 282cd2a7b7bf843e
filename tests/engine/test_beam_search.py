"""Beam search: the answers are vLLM's, in shared blocks, and are counted when they leave."""

import hashlib

import pytest
from hypothesis import Phase, given, settings
from hypothesis.strategies import booleans, composite, floats, integers, sampled_from, sets

from engine.journal.journal import Journal
from engine.journal.state import output_sha256
from engine.scheduling.beam_search import BeamSearch
from engine.scheduling.outputs import Ending
from engine.steps.batch import BAD_LOGITS, StepTokens
from engine.wire.messages import ExtendLease, LeaseLow, SamplingParams, TokenLogprobs
from tests.engine.beams import expected_beams, vllm_beams
from tests.engine.fakes import (
    EOS,
    FakeClock,
    make_adapter,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    tokens_of,
    update,
)

NUM_TOKENS = 9


@composite
def searches(draw):
    """A search over nine tokens, and a seed of what is likely after which tokens."""
    params = SamplingParams(
        max_tokens=draw(integers(1, 12)),
        n=draw(integers(1, 4)),
        logprobs=draw(sampled_from([None, 0, 2])),
        length_penalty=draw(floats(-2, 3)),
    )
    return params, draw(integers(1, 30)), draw(sets(integers(0, 8), max_size=4)), draw(integers())


def told_after(seed, sharpness, tokens, most):
    """The likeliest of nine tokens; the sharper, the less likely are the others."""
    digest = hashlib.blake2b(f"{seed} {tokens}".encode()).digest()
    logprobs = [-sharpness * byte / 64 for byte in digest[:NUM_TOKENS]]
    top = sorted(enumerate(logprobs), key=lambda pair: -pair[1])[:most]
    return TokenLogprobs(logprob=0.0, top=tuple(top))


def search_through(params, num_prompt_tokens, ends, told):
    """Run a search to its end. Returns it, and the number of its steps."""
    search = BeamSearch(params, num_prompt_tokens, params.max_tokens)

    def ending_of(token_id, count):
        if token_id in ends:
            return Ending("stop", "stop_token")
        return Ending("length", "max_tokens") if count == params.max_tokens else None

    num_steps = 0
    while search.beams:
        num_steps += 1
        places = [beam.place for beam in search.beams]
        assert len(set(places)) == len(places) <= params.n
        before = {beam.place: beam for beam in search.beams}
        are_known = [search.take(b.place, told(b.token_ids)) for b in search.beams]
        assert are_known == [False] * (len(places) - 1) + [True]
        forks = dict((other, place) for place, other in search.advance(ending_of))
        for beam in search.beams:
            origin = before[forks.get(beam.place, beam.place)]
            assert beam.token_ids[:-1] == origin.token_ids, "it does not go on from there"
    return search, num_steps


@given(search=searches(), sharpness=sampled_from([0.0, 0.1, 3.0]))
@settings(max_examples=300, deadline=None)
def test_the_best_beams_are_those_of_vllms_algorithm(search, sharpness):
    params, num_prompt_tokens, ends, seed = search

    def told(tokens):
        return told_after(seed, sharpness, list(tokens), 2 * params.n)

    expected = vllm_beams(
        lambda tokens: told(tokens).top,
        num_prompt_tokens, params.n, params.max_tokens, ends, params.length_penalty,
    )  # fmt: skip
    found = search_through(params, num_prompt_tokens, ends, told)[0].best()
    assert [(list(b.token_ids), b.total, b.ending.reason) for b in found] == expected
    for beam in found:
        if params.logprobs is None:
            assert beam.logprobs == ()
            continue
        assert sum(each.logprob for each in beam.logprobs) == pytest.approx(beam.total)
        assert {len(each.top) for each in beam.logprobs} == {min(params.logprobs, 2 * params.n)}


@pytest.mark.parametrize(
    ("length_penalty", "num_steps"), [(0.0, 2), (1.0, 7), (-1.0, 2), (2.0, 35), (3.0, 50)]
)
def test_a_search_ends_when_nothing_can_become_better(length_penalty, num_steps):
    """The second best of all ends in the second step, with -0.8 / 11 ** length_penalty. After k
    steps, none that goes on gets more than -0.7 * k / 60 ** length_penalty, or / (10 + k) ** ...
    """
    params = SamplingParams(max_tokens=50, n=2, length_penalty=length_penalty)
    told = TokenLogprobs(logprob=0.0, top=((0, -0.1), (1, -0.7), (2, -0.7), (3, -9.0)))
    _, found = search_through(params, 10, {0}, lambda tokens: told)
    assert found == num_steps


def beams_message(request_id="r1", n=4, **settings):
    return make_message(request_id, n=n, beam_search=True, ignore_eos=True, **settings)


def answers_of(outputs, n):
    return [tokens_of([o for o in outputs if o.index == index]) for index in range(n)]


@pytest.mark.parametrize("lag", [0, 1])
def test_beams_share_blocks_and_copy_those_that_they_write(tmp_path, lag):
    """Four beams have the 4 full blocks of a prompt of 72 tokens once, though no cache finds them,
    and at most 2 blocks each of their own.
    """
    core = make_core(tmp_path, lag=lag, prefix_caching=False)
    message = beams_message(prompt_len=72, max_tokens=12)
    core.handle("gw", message)
    pool, held, copies = core.scheduler.kv.pool, [], []

    def look():
        held.append(core.scheduler.arena.owned_by("kv") - pool.num_idle)
        copies.extend(core.runner.newest.copies)

    outputs = run_until_idle(core, look=look)["r1"]
    assert answers_of(outputs, 4) == [tokens for tokens, _ in expected_beams(message, 12)]
    assert max(held) <= 4 + 4 * 2
    assert len(copies) >= 3


def test_the_bill_is_the_tokens_of_the_answers(tmp_path):
    """All four answers are counted in full, with the beginnings that they have in common."""
    core = make_core(tmp_path)
    message = beams_message(max_tokens=7, adapter=make_adapter())
    core.handle("gw", message)
    outputs = run_until_idle(core)["r1"]
    (end,) = core.journal.read(0, 10).records
    tokens = [token for answer in answers_of(outputs, 4) for token in answer]
    assert len(tokens) == end.num_completion_tokens == outputs[-1].num_completion_tokens == 28
    assert end.output_sha256 == output_sha256(tokens)
    assert core.runner.meter.sampled_tokens >= 28, "more is counted than the meter has"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_search_that_is_cut_off_ends_with_the_best_beams_so_far(tmp_path, lag):
    core = make_core(tmp_path, lag=lag)
    message = beams_message(max_tokens=40)
    core.handle("gw", message)
    for _ in range(6 * (1 + lag)):
        core.step()
    core.scheduler.abort(["r1"])
    outputs = run_until_idle(core)["r1"]
    (end,) = core.journal.read(0, 10).records
    assert {o.finish_reason for o in outputs} == {"abort"}
    answers = answers_of(outputs, 4)
    num_tokens = len(answers[0])
    assert answers == [tokens for tokens, _ in expected_beams(message, num_tokens)]
    assert end.num_completion_tokens == 4 * num_tokens >= 4 * 5


def test_at_its_deadline_a_search_ends_with_whole_answers_and_the_best_beams(tmp_path):
    clock = FakeClock()
    core = make_core(tmp_path, clock=clock)
    ends = tuple(token for token in range(1, 250) if token % 10 == 3)
    message = beams_message(max_tokens=40, stop_token_ids=ends, length_penalty=3.0)
    core.handle("gw", message)
    for _ in range(9):
        core.step()
    clock.now += message.deadline_s
    outputs = [o for o in run_until_idle(core)["r1"] if o.finish_reason]
    causes = {(o.finish_reason, o.stop_cause, o.new_token_ids[-1] in ends) for o in outputs}
    assert causes == {("stop", "stop_token", True), ("length", "deadline", False)}


def test_a_search_fails_as_a_whole_where_a_beams_logits_are_not_finite():
    """The best answer is known by then, but is not given."""
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(n=2, beam_search=True))
    told = TokenLogprobs(logprob=-0.1, top=((EOS, -0.1), (7, -2.0), (8, -3.0)))
    update(scheduler, first := scheduler.schedule(), StepTokens([7], {0: [told]}))
    assert len(first.rows) == 1
    second = scheduler.schedule()
    result = update(scheduler, second, StepTokens([7, BAD_LOGITS], {0: [told]}))
    assert [(o.index, o.finish_reason) for _, o in result.outputs] == [(0, "error"), (1, "error")]
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_a_search_that_is_aborted_before_its_first_token_has_empty_answers(tmp_path):
    core = make_core(tmp_path)
    core.handle("gw", beams_message())
    core.scheduler.abort(["r1"])
    outputs = run_until_idle(core)["r1"]
    assert [o.index for o in outputs] == [0, 1, 2, 3]
    assert outputs[-1].num_completion_tokens == 0


def test_an_engine_that_dies_in_a_search_has_counted_no_token(tmp_path):
    core = make_core(tmp_path)
    core.handle("gw", beams_message(max_tokens=40))
    for _ in range(6):
        core.step()
    core.journal.close()
    (end,) = Journal(tmp_path / "journal", "eng-1", "base-1").read(0, 10).records
    assert (end.stop_cause, end.num_completion_tokens) == ("engine_failure", 0)


def test_the_gateway_hears_of_the_first_token_at_once(tmp_path):
    core = make_core(tmp_path)
    core.handle("gw", beams_message())
    ((_, answer),) = core.step()
    assert [(o.index, o.new_token_ids, o.is_of_prompt) for o in answer.outputs] == [
        (index, (), False) for index in range(4)
    ]


def test_a_search_ends_where_its_lease_does(tmp_path):
    core = make_core(tmp_path)
    core.handle("gw", beams_message(n=2, max_tokens=200, token_lease=2 * 80))
    low = []
    while not low:
        low = [m for _, m in core.step() if isinstance(m, LeaseLow)]
    assert low[0].num_completion_tokens == 2 * 16
    core.handle("gw", ExtendLease(request_id="r1", token_lease=2 * 90))
    outputs = run_until_idle(core)["r1"]
    assert [len(answer) for answer in answers_of(outputs, 2)] == [90, 90]
    assert {o.stop_cause for o in outputs if o.finish_reason} == {"budget"}


@given(n=integers(2, 5), num_seqs=integers(1, 3), lag=integers(0, 1), caches=booleans())
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_searches_go_on_where_their_beams_fit_neither_the_arena_nor_the_seats(
    tmp_path_factory, n, num_seqs, lag, caches
):
    """Two searches whose beams all wait for each other share room for one sequence."""
    scheduler = make_scheduler(
        num_slabs=8, max_num_seqs=num_seqs, prefix_caching=caches, max_model_len=120
    )
    core = make_core(tmp_path_factory.mktemp("engine"), scheduler, lag)
    messages = [beams_message(f"r{i}", n, prompt_len=60, max_tokens=59) for i in range(2)]
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core, max_steps=4_000)
    for message in messages:
        expected = [tokens for tokens, _ in expected_beams(message, 59)]
        assert answers_of(outputs[message.request_id], n) == expected
    assert scheduler.queues.num_preemptions


def test_a_row_of_a_search_is_greedy_and_tells_enough_tokens():
    scheduler = make_scheduler()
    scheduler.add("gw", beams_message(n=5, logprobs=3))
    (row,) = scheduler.schedule().rows
    assert (row.sampling.temperature, row.sampling.logprobs) == (0.0, 10)
    assert EOS not in row.banned_token_ids


def test_a_copy_keeps_both_blocks_until_its_step_has_finished(tmp_path):
    """The answer that was to write to the copy gives it back before the step is launched."""
    core = make_core(tmp_path)
    core.handle("gw", beams_message(n=2, prompt_len=20))
    core.step()
    scheduler = core.scheduler
    child = scheduler.queues.waiting[0]
    assert scheduler.kv.num_missing(child, 1) == 1
    scheduler.kv.allocate(child, 1)
    ((_, copied_to),) = scheduler.kv.copies
    num_free = scheduler.arena.num_free
    scheduler.kv.give_back(child)
    assert (scheduler.arena.num_free, scheduler.arena.num_coming) == (num_free, 1)
    batch = scheduler.schedule()
    assert copied_to not in {block for row in batch.rows for block in row.block_ids}
