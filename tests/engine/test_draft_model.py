"""A draft model has steps choose more tokens, and changes no answer, whatever becomes of its KV."""

import random

import pytest

from engine.drafts.model import MOST_CATCH_UP
from engine.drafts.speculation import MOST_DRAFTS, NoDrafter
from engine.steps.curve import StepCurve
from tests.engine.fake_draft_model import CHEAP, FakeDraftModel, speculating
from tests.engine.fakes import (
    FLAT,
    FakeLoader,
    expected_tokens,
    make_adapter,
    make_core,
    make_message,
    run_until_idle,
    tokens_of,
)


def make(tmp_path, model_curve=None, curve=FLAT, block_size=48, idle_share=0.0, **limits):
    """A core whose only drafts are a model's; its model, and its ModelDrafter."""
    model = FakeDraftModel(block_size, model_curve or CHEAP)
    speculate = speculating(model, curve, NoDrafter(), idle_share)
    core = make_core(tmp_path, speculate=speculate, **limits)
    core.runner.slabs = model.slabs
    return core, model, core.scheduler.speculation._model


def answer(core, *messages, look=lambda: None):
    """Run requests; their outputs, and what `look` returned after each step."""
    for message in messages:
        core.handle("gw", message)
    steps = []
    outputs = run_until_idle(core, look=lambda: steps.append(look()))
    for message in messages:
        assert tokens_of(outputs[message.request_id]) == expected_tokens(message)
    return outputs, steps


def test_a_model_that_is_always_right_makes_all_drafts_count(tmp_path):
    core, model, drafts = make(tmp_path)
    outputs, steps = answer(core, make_message(max_tokens=41))
    final = outputs["r1"][-1]
    assert final.num_rejected_tokens == 0
    assert len(steps) == 1 + 40 / (1 + MOST_DRAFTS)
    assert final.num_accepted_tokens == 40 - 40 / (1 + MOST_DRAFTS)
    assert drafts.num_slabs == 0


def test_it_is_asked_for_less_of_an_answer_that_it_does_not_foresee(tmp_path):
    core, _, _ = make(tmp_path, curve=StepCurve(((1, 1.0), (8, 1.4))))
    message = make_message(adapter=make_adapter(), max_tokens=60)
    core.handle("gw", message)
    drafted = []
    while core.scheduler.has_work:
        core.step()
        drafted.append(core.take_stats().drafts.drafted_tokens)
    assert drafted[5] > 5
    assert drafted[-1] - drafted[29] < 20


@pytest.mark.parametrize(
    ("step_s", "most"), [(0.001, MOST_DRAFTS), (0.1, 3), (0.4, 1), (0.7, 0), (2.0, 0)]
)
def test_as_many_tokens_are_drafted_as_pay_for_their_time(tmp_path, step_s, most):
    """A draft is worth 0.6 tokens, the next one 0.36; a step of the model costs `step_s`."""
    core, model, _ = make(tmp_path, model_curve=StepCurve(((1, step_s), (2, step_s))))
    core.handle("gw", make_message(max_tokens=40))
    core.step()
    core.step()
    assert len(model.sizes) == most


def test_requests_that_want_no_drafts_are_not_read(tmp_path):
    core, model, _ = make(tmp_path)
    answer(core, make_message("with"), make_message("without", drafts=False))
    assert model.seen == {"with"}


def test_answers_that_are_short_for_their_prompts_are_not_read(tmp_path):
    core, model, _ = make(tmp_path)
    answer(core, make_message("short", prompt_len=100, max_tokens=4), make_message("longer"))
    assert model.seen == {"longer"}


def test_prompts_are_read_a_part_in_each_step_in_the_order_of_the_plan(tmp_path):
    core, model, drafts = make(tmp_path, max_num_batched_tokens=256)
    messages = [make_message(f"r{i}", prompt_len=90, max_tokens=60) for i in range(2)]
    outputs, _ = answer(core, *messages)
    assert max(model.sizes) <= MOST_CATCH_UP + len(messages)
    read = model.sizes.index(MOST_CATCH_UP + 1)
    assert model.sizes[0] == MOST_CATCH_UP  # no answer's last token yet
    assert read > 0
    assert all(o[-1].num_accepted_tokens > 20 for o in outputs.values())


def test_its_slabs_are_only_those_that_nobody_needs(tmp_path):
    """Answers fill the arena: no draft takes a block from them, and none makes them wait."""
    core, model, drafts = make(tmp_path, num_slabs=18, block_size=16, max_num_seqs=4)
    messages = [make_message(f"r{i}", prompt_len=20, max_tokens=40) for i in range(4)]
    _, held = answer(core, *messages, look=lambda: drafts.num_slabs)
    assert max(held) > 0
    assert drafts.num_slabs == 0


def test_evicted_slabs_are_read_again(tmp_path):
    core, model, drafts = make(tmp_path, num_slabs=16, block_size=16)
    core.handle("gw", make_message(prompt_len=40, max_tokens=100))
    chance, arena, num_evicted = random.Random(1), core.scheduler.arena, 0

    def evict():
        nonlocal num_evicted
        if drafts.num_slabs and chance.random() < 0.5:
            num_before = drafts.num_slabs
            assert arena.make_room(arena.num_free + 1)
            assert drafts.num_slabs == num_before - 1
            num_evicted += 1

    [outputs] = run_until_idle(core, look=evict).values()
    assert num_evicted > 3
    assert tokens_of(outputs) == expected_tokens(make_message(prompt_len=40, max_tokens=100))
    assert outputs[-1].num_rejected_tokens == 0


def test_draft_kv_goes_before_prefixes_and_adapters(tmp_path):
    loader = FakeLoader()
    core, model, drafts = make(tmp_path, num_slabs=32, block_size=16, loader=loader)
    answer(core, make_message("before", adapter=make_adapter(), prompt_len=40))
    core.handle("gw", make_message(prompt_len=40, max_tokens=100))
    while not drafts.num_slabs:
        core.step()
    stats = core.take_stats()
    arena = core.scheduler.arena
    assert stats.free_slabs == arena.num_free + drafts.num_slabs
    assert arena.make_room(arena.num_free + drafts.num_slabs)
    assert drafts.num_slabs == 0
    core.scheduler.check_integrity()
    after = core.take_stats()
    assert after.adapter_evictions == stats.adapter_evictions
    assert after.prefix_evictions == stats.prefix_evictions


@pytest.mark.parametrize(("idle_share", "least", "most"), [(0.0, 0, 20), (0.25, 95, 106)])
def test_where_prefixes_fill_the_arena_drafts_need_some_of_their_slabs(
    tmp_path, idle_share, least, most
):
    """Prefixes stay until their slabs are needed, so that after a while no slab is free."""
    core, _, drafts = make(tmp_path, num_slabs=40, block_size=16, idle_share=idle_share)
    for number in range(10):
        answer(core, make_message(f"before {number}", prompt_len=80, max_tokens=5))
    assert core.scheduler.arena.num_free < 3
    outputs, _ = answer(core, make_message(prompt_len=20, max_tokens=121))
    assert least <= outputs["r1"][-1].num_accepted_tokens <= most
    assert drafts.num_slabs == 0


def test_idle_items_give_up_no_more_slabs_than_a_share(tmp_path):
    core, _, drafts = make(tmp_path, num_slabs=40, block_size=16, idle_share=0.1)
    for number in range(10):
        answer(core, make_message(f"before {number}", prompt_len=80, max_tokens=5))
    num_free = core.scheduler.arena.num_free
    for number in range(4):
        core.handle("gw", make_message(f"r{number}", prompt_len=20, max_tokens=60))
    seen = set()
    run_until_idle(core, look=lambda: seen.add(drafts.num_slabs))
    assert 4 <= max(seen) <= 4 + num_free
