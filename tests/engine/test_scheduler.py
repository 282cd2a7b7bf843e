"""The scheduler: requests get the tokens that they get alone, none is lost, nothing leaks."""

import random
import time
from dataclasses import replace
from itertools import dropwhile

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, composite, integers, sampled_from

from engine.requests.request import PENDING_TOKEN
from engine.steps.batch import StepTokens
from tests.engine.beams import expected_beams
from tests.engine.fake_draft_model import FakeDraftModel, speculating
from tests.engine.fakes import (
    FakeDrafter,
    FakeLoader,
    expected_prompt_logprobs,
    expected_tokens,
    make_adapter,
    make_core,
    make_message,
    make_scheduler,
    prompt_logprobs_of,
    run_until_idle,
    step,
    tokens_for,
    tokens_of,
    update,
)

ADAPTERS = [None, *(make_adapter(f"a{i}", rank=8 * (i + 1)) for i in range(4))]
MAX_SUM_RANKS = 48
# The last two adapters are activated LoRAs; not every prompt holds their tokens.
INVOCATIONS = {ADAPTERS[3].object_key: (1, 2), ADAPTERS[4].object_key: (3,)}


@composite
def requests(draw):
    """Requests of two tenants with shared prefixes, and with the same or different salts."""
    stem = [draw(integers(1, 3)) for _ in range(draw(sampled_from([0, 17, 40, 40])))]
    messages = []
    for i in range(draw(integers(1, 10))):
        prompts = [
            tuple(stem[: draw(integers(0, len(stem)))])
            + tuple(draw(integers(1, 3)) for _ in range(draw(integers(1, 50))))
            for _ in range(draw(sampled_from([1, 1, 1, 2, 3])))
        ]
        message = make_message(
            f"r{i}",
            prompt=prompts[0],
            max_tokens=draw(integers(0, 40)),
            adapter=ADAPTERS[draw(integers(0, 4))],
            tenant_id=draw(sampled_from(["t1", "t2"])),
            cache_salt=draw(sampled_from(["s1", "s1", "s2"])),
            priority=draw(integers(0, 1)),
            n=draw(sampled_from([1, 1, 1, 3])),
            prompt_logprobs=draw(sampled_from([None, None, 0, 2])),
            logprobs=draw(sampled_from([None, None, 1])),
            grammar=draw(sampled_from(["", "", "quick", "quick 2", "slow"])),
        )
        lease = message.token_lease * len(prompts)
        if message.sampling_params.n > 1 and draw(booleans()):
            message = replace(message, grammar="", sampling_params=draw(beams_of(message)))
        messages.append(replace(message, more_prompts=tuple(prompts[1:]), token_lease=lease))
    return messages


@composite
def beams_of(draw, message):
    """Parameters of a beam search for as many answers."""
    return replace(
        message.sampling_params,
        beam_search=True,
        ignore_eos=draw(booleans()),
        length_penalty=draw(sampled_from([1.0, 0.0, -1.0, 2.5])),
    )


ANY_MIX = given(
    messages=requests(),
    lag=integers(0, 1),
    policy=sampled_from(["fcfs", "sjf", "vtc"]),
    num_slabs=integers(16, 40),
    num_swap_slots=sampled_from([0, 6, 40]),
    budget=integers(5, 64),
    num_seqs=integers(1, 6),
    prefix_caching=booleans(),
    max_skips=sampled_from([0, 2, 64]),
    window=sampled_from([None, None, 20, 33]),
    share_wrong=sampled_from([None, 0.0, 0.3, 1.0]),
    draft_block_size=sampled_from([None, 16, 48]),
    idle_share=sampled_from([0.0, 0.3]),
    seed=integers(0, 2**16),
)


@ANY_MIX
@settings(max_examples=40, deadline=None)
def test_any_mix_gives_each_request_what_it_gets_alone(tmp_path_factory, **mix):
    check_mix(tmp_path_factory.mktemp("engine"), **mix)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@ANY_MIX
@settings(max_examples=3000, deadline=None)
def test_many_mixes_give_each_request_what_it_gets_alone(tmp_path_factory, **mix):
    check_mix(tmp_path_factory.mktemp("engine"), **mix)


def check_mix(
    folder, messages, lag, policy, num_slabs, num_swap_slots, budget, num_seqs, prefix_caching,
    max_skips, window, share_wrong, draft_block_size, idle_share, seed,
):  # fmt: skip
    """Run a mix with small arenas, chunks, preemption, swap, shared prefixes, changing adapters,
    drafts and aborts; check after every step that budgets hold, blocks are shared correctly and
    none is lost.
    """
    loader = FakeLoader(at_once=False)
    loader.slabs = {a.object_key: i + 1 for i, a in enumerate(ADAPTERS) if a}
    loader.invocation_tokens = INVOCATIONS
    drafter = None
    if share_wrong is not None:
        drafter = FakeDrafter(seed, share_wrong, window)
    model = speculate = None
    if draft_block_size and not lag:
        model = FakeDraftModel(draft_block_size, window=window)
        speculate = speculating(model, drafter=drafter, idle_share=idle_share)
    scheduler = make_scheduler(
        num_slabs,
        loader,
        num_swap_slots=num_swap_slots,
        drafter=drafter,
        speculate=speculate,
        max_num_batched_tokens=budget,
        max_num_seqs=num_seqs,
        max_sum_ranks_per_step=MAX_SUM_RANKS,
        scheduling_policy=policy,
        prefix_caching=prefix_caching,
        max_skips=max_skips,
        sliding_window=window,
    )
    scheduler.kv.swap.costs.note_prefill(1, 1.0)
    core = make_core(folder, scheduler, lag)
    if model:
        core.runner.slabs = model.slabs
    chance = random.Random(seed)
    outputs: dict[str, list] = {}
    pending = list(messages)
    for _ in range(8000):
        if pending and chance.random() < 0.5:
            assert core.handle("gw", pending.pop(0)) == []
        if chance.random() < 0.01:
            scheduler.abort([chance.choice(messages).request_id])
        if chance.random() < 0.7:
            loader.finish()
        for _, message in core.step():
            for output in message.outputs:
                outputs.setdefault(output.request_id, []).append(output)
        scheduler.check_integrity()
        check_sharing(scheduler)
        check_budgets(core.runner.newest, scheduler.queues.running, budget, num_seqs)
        if not pending and not scheduler.has_work:
            break
        if core.runner.newest.is_empty:
            time.sleep(1e-3)  # as the engine's process does, while a grammar is being compiled
    assert not scheduler.has_work, "a request never ended"
    assert not (drafter and drafter.drafting), "a draft outlived its answer"
    counted, metered = core.num_completion_tokens, core.runner.meter.sampled_tokens
    has_beams = any(message.sampling_params.beam_search for message in messages)
    assert counted == metered or (lag or has_beams) and counted < metered
    for message in messages:
        check_answers(message, outputs[message.request_id], window, scheduler.config.max_model_len)
    arena = scheduler.arena
    used = scheduler.adapters.machine.num_slabs + scheduler.kv.pool.num_idle
    assert arena.num_free + used == num_slabs


def check_answers(message, outputs, window, max_model_len):
    """Check that every answer has its tokens and one end, and that the last ends the request."""
    assert [o.seq for o in outputs] == list(range(len(outputs)))
    assert [o.is_last for o in outputs] == [False] * (len(outputs) - 1) + [True]
    n, total = message.sampling_params.n, 0
    each = [replace(message, prompt_token_ids=p, more_prompts=()) for p in message.prompts]
    is_invoked = all(expected_answer(alone, window) is not None for alone in each)
    for number, alone in enumerate(each):
        own = [o._replace(index=o.index % n) for o in outputs if o.index // n == number]
        check_prompt_logprobs(alone, own, window)
        beams = expected_answers(alone, window, max_model_len) if is_invoked else None
        for index in range(n):
            answer = [o for o in own if o.index == index]
            finals = [o.finish_reason is not None for o in answer]
            assert finals == [False] * (len(answer) - 1) + [True]
            tokens, expected = tokens_of(answer), expected_answer(alone, window)
            total += len(tokens)
            if beams and answer[-1].finish_reason != "abort":
                assert (tokens, answer[-1].finish_reason) == beams[index]
                continue
            if beams:
                continue
            if not is_invoked and answer[-1].finish_reason != "length":
                # One prompt without the invocation ends the answers to all prompts.
                assert answer[-1].stop_cause in ("adapter_not_invoked", "aborted")
                assert tokens == (expected or [])[: len(tokens)]
            elif answer[-1].finish_reason == "abort":
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
    if is_invoked and all(o.finish_reason in (None, "length", "stop") for o in outputs):
        assert outputs[-1].num_prompt_tokens == message.num_prompt_tokens
    assert outputs[-1].num_completion_tokens == total
    assert outputs[-1].num_cached_tokens <= outputs[-1].num_prompt_tokens


def check_prompt_logprobs(message, outputs, window):
    """Check that prompt logprobs come once, in order, with the first answer, before new tokens."""
    told = prompt_logprobs_of(outputs)
    is_whole = {o.finish_reason for o in outputs} <= {None, "length", "stop"}
    if told or is_whole:
        expected = expected_prompt_logprobs(message, window, invocation_of(message))
        assert told == (expected if is_whole else expected[: len(told)])
    behind = dropwhile(lambda output: not output.new_token_ids, outputs)
    assert not prompt_logprobs_of(list(behind)[1:])
    assert not prompt_logprobs_of([o for o in outputs if o.index])


def invocation_of(message):
    return INVOCATIONS.get(message.adapter.object_key, ()) if message.adapter else ()


def expected_answer(message, window):
    """Tokens of a request that runs alone; None if its prompt does not invoke its adapter."""
    invocation = invocation_of(message)
    prompt, length = message.prompt_token_ids, len(invocation)
    if not any(prompt[i : i + length] == invocation for i in range(len(prompt))):
        return None
    return expected_tokens(message, window, invocation)


def expected_answers(message, window, max_model_len):
    """Tokens and finish reasons of the answers of a beam search; None if it is none."""
    params = message.sampling_params
    if not params.beam_search or not params.max_tokens:
        return None
    longest = min(params.max_tokens, max_model_len - len(message.prompt_token_ids))
    return expected_beams(message, longest, window, invocation_of(message))


def check_sharing(scheduler):
    """Check that requests share a block only if their salt, their computed tokens up to the end of
    the block, and the adapter applied in it are the same.
    """
    holders: dict[int, list] = {}
    for request in (*scheduler.queues.running, *scheduler.queues.waiting):
        first = request.num_dead_blocks
        for number, block_id in enumerate(request.block_ids[first:], first):
            holders.setdefault(block_id, []).append((request, number))
    size = scheduler.layout.block_size
    for shared in holders.values():
        contents = {
            (applied_before(r, end), r.message.cache_salt, r.tokens(0, end))
            for r, end in ((r, end_of(r, number, size)) for r, number in shared)
        }
        assert len(shared) == 1 or len(contents) == 1


def end_of(request, number, block_size):
    """Position behind the last computed token in a block; beams share their last one."""
    return min((number + 1) * block_size, request.num_computed_tokens)


def applied_before(request, end):
    """(digest, start) of the adapter; None if only the base model applies before `end`."""
    is_base = request.adapter is None or end <= request.adapter_start
    return None if is_base else (request.group.digest, request.adapter_start)


def check_budgets(batch, running, budget, num_seqs):
    assert batch.num_tokens <= budget
    assert len(batch.rows) <= num_seqs
    ranks = {r.adapter_key: r.adapter.rank for r in running if r.adapter}
    assert len(ranks) == 1 or sum(ranks.values()) <= MAX_SUM_RANKS


def test_a_long_prefill_does_not_stop_decodes():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add("gw", make_message("short", prompt_len=4, max_tokens=30))
    step(scheduler)
    scheduler.add("gw", make_message("long", prompt_len=200))
    for _ in range(8):
        batch = scheduler.schedule()
        assert "short" in {row.request_id for row in batch.rows}
        assert batch.num_tokens == 16
        update(scheduler, batch, tokens_for(batch))


def test_the_digest_that_is_reported_is_the_steps_not_the_requests(tmp_path):
    """The second runner applies no adapter, and its outputs have no digest."""
    core = make_core(tmp_path)
    core.handle("gw", make_message("r1", adapter=make_adapter(), max_tokens=2))
    digests = {o.adapter_digest for o in run_until_idle(core)["r1"]}
    assert digests == {make_adapter().digest}
    scheduler = make_scheduler()
    scheduler.add("gw", make_message("r2", adapter=make_adapter(), max_tokens=2))
    outputs = []
    while scheduler.has_work:
        scheduler.adapters.poll()
        batch = scheduler.schedule()
        outputs += update(scheduler, batch, tokens_for(batch)).outputs
    assert {output.adapter_digest for _, output in outputs} == {None}


def test_an_arena_too_small_for_one_request_is_refused_at_start():
    with pytest.raises(ValueError, match="arena_bytes of at least"):
        make_scheduler(num_slabs=4, max_model_len=256)


def test_a_row_knows_the_history_only_where_penalties_need_it():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message("plain", prompt_len=3))
    scheduler.add("gw", make_message("tired", prompt_len=3, frequency_penalty=0.5))
    for _ in range(2):
        batch = step(scheduler)
    rows = {row.request_id: row for row in batch.rows}
    assert rows["plain"].prompt_token_ids == rows["plain"].output_token_ids == ()
    assert set(rows["tired"].prompt_token_ids) == set(make_message("tired", 3).prompt_token_ids)
    assert rows["tired"].output_token_ids == (7,)


def test_a_step_may_be_scheduled_before_the_last_ones_tokens_are_known():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(max_tokens=2, frequency_penalty=1.0))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.rows[0].token_ids == second.rows[0].output_token_ids == (PENDING_TOKEN,)
    assert scheduler.schedule().is_empty, "the pending token is the last one"
    update(scheduler, first, tokens_for(first))
    (ended,) = update(scheduler, second, tokens_for(second)).ended
    assert ended.output_token_ids == [7, 7]


def test_what_was_scheduled_past_an_end_is_dropped():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(max_tokens=50))
    first, second = scheduler.schedule(), scheduler.schedule()
    (ended,) = update(scheduler, first, StepTokens([0])).ended
    assert ended.decisive.stop_cause == "eos"
    assert scheduler.arena.num_free < scheduler.arena.num_slabs, "a running step writes the blocks"
    result = update(scheduler, second, tokens_for(second))
    assert not result.outputs
    assert not result.progress
    assert scheduler.arena.num_free == scheduler.arena.num_slabs


def test_blocks_behind_the_sliding_window_are_given_back(tmp_path):
    core = make_core(tmp_path, num_slabs=16, sliding_window=20, max_num_batched_tokens=32)
    message = make_message(prompt_len=150, max_tokens=90)
    core.handle("gw", message)
    arena, pool, held = core.scheduler.arena, core.scheduler.kv.pool, []
    outputs = run_until_idle(core, look=lambda: held.append(arena.owned_by("kv") - pool.num_idle))[
        "r1"
    ]
    assert tokens_of(outputs) == expected_tokens(message, 20)
    # Blocks for a chunk of 32 tokens and the 19 before it, plus one since neither is aligned.
    assert max(held) <= 5


@pytest.mark.parametrize("num_swap_slots", [0, 12])
def test_a_preempted_request_waits_for_its_step_and_no_more_than_needed_give_way(
    tmp_path, num_swap_slots
):
    """Six requests need 6 of the 8 free blocks in the tenth step, while the ninth still runs, and
    an urgent prompt needs 4 for its second chunk. Preempting one request is enough.
    """
    scheduler = make_scheduler(18, num_swap_slots=num_swap_slots, prefix_caching=False)
    scheduler.kv.swap.costs.note_prefill(1, 1.0)
    core = make_core(tmp_path, scheduler, lag=1)
    others = [make_message(f"r{i}", 8, 20, priority=1) for i in range(6)]
    urgent = make_message("urgent", 186, 4)
    for message in others:
        core.handle("gw", message)
    received = [core.step() for _ in range(8)]
    core.handle("gw", urgent)
    received += [core.step() for _ in range(2)]
    assert scheduler.queues.num_preemptions == 1
    outputs = run_until_idle(core)
    early = [o for answers in received for _, answer in answers for o in answer.outputs]
    for message in (*others, urgent):
        name = message.request_id
        got = [output for output in early if output.request_id == name] + outputs[name]
        assert tokens_of(got) == expected_tokens(message)
