"""Bad words: no answer has one, however it is computed, and transformers bans the same tokens."""

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from engine.requests.bad_words import BadWords
from engine.steps.sampler import choose
from tests.engine.fakes import (
    FakeDrafter,
    expected_tokens,
    fake_token,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    tokens_of,
    unbanned_token,
)
from tests.engine.real_core import build_core
from tests.engine.replay_drafter import ReplayDrafter
from tests.engine.runners import RUNNERS
from tests.engine.test_sampler import make_mask, make_row
from tests.oracle import greedy, merged_model
from tests.tiny_models import save_model

VOCAB = 16
PROMPT = [(7 * i * i + 3) % 250 + 1 for i in range(21)]


def banned_behind(words, said):
    return set(BadWords(words).completing(said))


def test_the_banned_tokens_are_those_of_transformers():
    """Transformers looks at the prompt as well, so it ends with nothing that a word begins with."""
    chance = torch.Generator().manual_seed(3)
    draw = lambda *size: torch.randint(0, 4, size, generator=chance).tolist()  # noqa: E731
    banned_some = 0
    for _ in range(200):
        words = [tuple(draw(1 + n % 4)) for n in range(5)]
        said = draw(8)
        theirs = NoBadWordsLogitsProcessor([list(word) for word in words])
        scores = theirs(torch.tensor([[9, 9, 9, *said]]), torch.zeros(1, VOCAB))
        banned = banned_behind(words, said)
        assert banned == set(scores[0].isinf().nonzero().flatten().tolist())
        banned_some += len(banned) > len({word for word in words if len(word) == 1})
    assert banned_some > 20


def expected(message):
    """The tokens of an answer that is computed alone, one by one."""
    words, said = message.sampling_params.bad_words, []
    for _ in range(message.sampling_params.max_tokens):
        wanted = fake_token([*message.prompt_token_ids, *said], None)
        said.append(unbanned_token(banned_behind(words, said), wanted))
    return said


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("limits", [{}, {"drafter": FakeDrafter(2, 0.2)}, {"num_slabs": 9}])
def test_no_answer_has_a_bad_word_and_all_else_is_as_it_was(tmp_path, lag, limits):
    """Tokens may be pending or drafted, and answers preempted."""
    free = [make_message(f"r{i}", max_tokens=40) for i in range(4)]
    messages = []
    for number, message in enumerate(free):
        said = expected_tokens(message)
        words = (tuple(said[3:8]), tuple(said[9:11]), (said[20],), tuple(said[30:35]))
        options = {"bad_words": words[2:3] if number == 3 else words[: 1 + number]}
        options |= {"logprobs": 1 if number == 2 else None}
        messages.append(make_message(f"r{number}", max_tokens=40, **options))
    core = make_core(tmp_path, make_scheduler(**limits), lag)
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    for message in messages:
        said = tokens_of(outputs[message.request_id])
        assert said == expected(message)
        assert said != expected_tokens(message)
        assert outputs[message.request_id][-1].num_completion_tokens == 40
    if "num_slabs" in limits:
        assert core.scheduler.queues.num_preemptions > 0
    if "drafter" in limits:
        assert core.take_stats().drafts.accepted_tokens > 20


@torch.inference_mode()
@pytest.mark.parametrize("runner", ["cpu", "cpu, late", "device", "two ranks"])
def test_a_model_says_what_it_says_in_transformers_without_these_words(tmp_path, runner):
    model_dir = save_model(tmp_path / "model", tied=False)
    model = merged_model(model_dir, None)

    free = greedy(model, PROMPT, 30, eos_token_id=None)
    words = (tuple(free[2:5]), (free[9],), tuple(free[14:16]))
    theirs = greedy(model, PROMPT, 30, eos_token_id=None, bad_words_ids=list(map(list, words)))
    message = make_message(prompt=PROMPT, max_tokens=30, ignore_eos=True, bad_words=words)
    drafter = ReplayDrafter({"r1": theirs}, lambda request: request.request_id)
    core = build_core(model_dir, tmp_path / "core", {}, drafter=drafter, **RUNNERS[runner])
    core.handle("gw", message)
    assert tokens_of(run_until_idle(core)["r1"]) == theirs != free
    assert core.take_stats().drafts.accepted_tokens > 0


def test_a_mask_without_a_grammar_has_room_for_every_token_of_the_model():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(bad_words=((7, 8), (9,))))
    scheduler.schedule()
    (request,) = scheduler.queues.running
    request.output_token_ids.append(7)
    first, second = scheduler.outputs.masks(request, (5,), None)
    assert first.tolist() == make_mask(set(range(256)) - {8, 9}, 256).tolist()
    assert second.tolist() == make_mask(set(range(256)) - {9}, 256).tolist()
    logits = torch.zeros(1, 256)
    logits[0, 8] = 3.0
    assert choose(logits.clone(), [make_row(temperature=0.0)], {0: first})[0] != [8]
    assert choose(logits.clone(), [make_row(temperature=0.0)], {0: second})[0] == [8]
