"""Logprobs of the prompt are the model's own and are reported once, whatever happens."""

from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.steps.scoring import LOGITS_BYTES, ScoredTokens, score
from tests.engine.fakes import (
    FakeRunner,
    make_adapter,
    make_core,
    make_message,
    make_scheduler,
    prompt_logprobs_of,
    run_until_idle,
    tokens_of,
    update,
)
from tests.engine.real_core import add_adapter, build_core
from tests.engine.runners import RUNNERS
from tests.oracle import greedy, merged_model
from tests.tiny_models import GEMMA2, save_adapter, save_model

PROMPT = [(7 * i * i + 3) % 250 + 1 for i in range(61)]
INVOCATION = [17, 18, 19]
SPECS = {"plain": {"r": 4}, "activated": {"alora_invocation_tokens": INVOCATION}}
SWAPPING = ("cpu", "two devices")
"""Runners on which preempted requests are swapped; on the others they are computed again."""
CPU_AND_DEVICE = pytest.mark.parametrize("runner", ["cpu", "device"])


class World:
    """A model, adapters, and prompts with the expected logprobs and answers."""

    def __init__(self, folder):
        self.model_dir = save_model(folder / "model", tied=False)
        dirs = [
            save_adapter(self.model_dir, folder / name, seed=seed, **spec)
            for seed, (name, spec) in enumerate(SPECS.items(), 1)
        ]
        self.objects: dict[str, bytes] = {}
        self.refs = [None, *(add_adapter(self.objects, self.model_dir, d, folder) for d in dirs)]
        self.prompts = [[*PROMPT[: 40 + 7 * i], *INVOCATION, *PROMPT[i : i + 9]] for i in range(2)]
        models = [merged_model(self.model_dir, d) for d in (None, *dirs)]
        asked = [(a, p) for a in range(3) for p in range(2)]
        self.expected = {(a, p): logprobs(models[a], self.prompts[p]) for a, p in asked}
        self.answers = {(a, p): greedy(models[a], self.prompts[p], 6) for a, p in asked}

    def messages(self):
        """Three requests per adapter and prompt; the last has no logprobs and runs first."""
        for a, p in self.expected:
            options = {"prompt": self.prompts[p], "adapter": self.refs[a]}
            n = 2 if a == p else 1
            name, scored = f"{a}-{p}", options | {"prompt_logprobs": 3, "priority": 1}
            yield make_message(f"scored-{name}", max_tokens=6, n=n, **scored)
            yield make_message(f"none-{name}", max_tokens=0, **scored)
            yield make_message(f"plain-{name}", max_tokens=6, **options)


def run(core, messages):
    """Send one request with each step; return the outputs by request."""
    outputs, messages = defaultdict(list), list(messages)
    while messages or core.scheduler.has_work:
        if messages:
            core.handle("gw", messages.pop(0))
        for _, message in core.step():
            for output in message.outputs:
                outputs[output.request_id].append(output)
    return outputs


@torch.inference_mode()
def logprobs(model, prompt):
    return model(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("scored"))


@CPU_AND_DEVICE
def test_logits_with_a_bound_have_it_in_the_prompt_too(tmp_path, runner):
    model_dir = save_model(tmp_path / "model", family="gemma2", **GEMMA2)
    core = build_core(model_dir, tmp_path / "engine", {}, **RUNNERS[runner])
    outputs = run(core, [make_message("r", prompt=PROMPT, max_tokens=1, prompt_logprobs=3)])["r"]
    expected = logprobs(merged_model(model_dir, None), PROMPT)
    check_told(prompt_logprobs_of(outputs), PROMPT, expected)


@pytest.mark.parametrize("runner", RUNNERS)
def test_they_are_the_models_in_chunks_behind_a_warm_cache_and_under_preemption(
    world, tmp_path, runner
):
    num_swap_slots = 40 * (runner in SWAPPING)
    core = build_core(
        world.model_dir, tmp_path / "engine", world.objects,
        num_slabs=26, budget=24, num_seqs=3, num_swap_slots=num_swap_slots, **RUNNERS[runner],
    )  # fmt: skip
    for number, prompt in enumerate(world.prompts):  # fills the cache
        core.handle("gw", make_message(f"warm{number}", prompt=prompt, max_tokens=1))
        run_until_idle(core)
    outputs = run(core, world.messages())
    for (a, p), expected in world.expected.items():
        prompt, scored = world.prompts[p], outputs[f"scored-{a}-{p}"]
        check_told(prompt_logprobs_of(scored), prompt, expected)
        check_told(prompt_logprobs_of(outputs[f"none-{a}-{p}"]), prompt, expected)
        assert not prompt_logprobs_of([o for o in scored if o.index])
        assert not prompt_logprobs_of(outputs[f"plain-{a}-{p}"])
        for index in range(2 if a == p else 1):
            answer = tokens_of([o for o in scored if o.index == index])
            assert answer == tokens_of(outputs[f"plain-{a}-{p}"]) == world.answers[a, p]
        assert scored[-1].num_cached_tokens == 0
        last = outputs[f"none-{a}-{p}"][-1]
        assert (last.finish_reason, last.stop_cause) == ("length", "max_tokens")
        assert (last.num_prompt_tokens, last.num_completion_tokens) == (len(prompt), 0)
    stats = core.take_stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert bool(stats.swapped) == bool(num_swap_slots)


def check_told(told, prompt, expected):
    assert len(told) == len(prompt) - 1
    for entry, token, row in zip(told, prompt[1:], expected, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        values = [value for _, value in entry.top]
        assert values == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert values == pytest.approx([row[t].item() for t, _ in entry.top], abs=1e-4)
        assert dict(entry.top).get(token, entry.logprob) == entry.logprob, "not the identical float"
        most, least = (row > row[token] - 1e-4).sum(), (row > row[token] + 1e-4).sum() + 1
        assert least <= entry.rank <= most


@CPU_AND_DEVICE
def test_a_scored_position_whose_logits_overflow_fails_its_request(tmp_path, runner):
    model_dir = save_model(tmp_path / "model", tied=False)
    tensors = load_file(model_dir / "model.safetensors")
    tensors["lm_head.weight"][7] = 3e38
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    core = build_core(model_dir, tmp_path / "engine", {}, **RUNNERS[runner])
    for name, most in (("scored", 0), ("unscored", None)):
        core.handle("gw", make_message(name, max_tokens=0, prompt_logprobs=most))
    outputs = run_until_idle(core)
    (failed,) = outputs["scored"]
    assert (failed.stop_cause, failed.prompt_logprobs) == ("engine_failure", None)
    assert outputs["unscored"][-1].stop_cause == "max_tokens"


@pytest.mark.parametrize("vocab_size", [1 << 17, 50])
def test_the_head_never_gives_more_logits_at_once_than_its_limit(vocab_size):
    weight, largest = torch.linspace(0, 9, vocab_size)[None], 0

    def head(part):
        nonlocal largest
        rows = len(range(count)[part])
        largest = max(largest, 4 * rows * vocab_size)
        return weight.repeat(rows, 1)

    count = 130
    scored = ScoredTokens(range(count), [3] * count, [1] * count, {0: slice(0, count)})
    named, _ = score(head, scored, vocab_size)
    assert len(named) == count
    assert largest <= LOGITS_BYTES
    assert largest > LOGITS_BYTES / 2 or vocab_size == 50


# ---- the scheduler ----


def served(core, message):
    core.handle("gw", message)
    return run_until_idle(core)[message.request_id]


@pytest.mark.parametrize("adapter", [None, make_adapter()], ids=["base", "adapter"])
def test_what_is_scored_reads_no_cache_and_fills_it(tmp_path, adapter):
    core = make_core(tmp_path)
    scored = {"prompt": PROMPT, "adapter": adapter, "prompt_logprobs": 1}
    for name in ("r1", "r2"):
        assert served(core, make_message(name, **scored))[-1].num_cached_tokens == 0
    served(core, make_message("r3", prompt=PROMPT, adapter=adapter))
    records = core.journal.read(0, 99).records
    assert [end.num_cached_tokens for end in records] == [0, 0, 48]


def test_a_piece_comes_with_every_chunk_and_none_is_larger(tmp_path):
    core = make_core(tmp_path, max_num_batched_tokens=16)
    outputs = served(core, make_message("r", prompt=PROMPT, max_tokens=2, prompt_logprobs=0))
    assert [len(o.prompt_logprobs or ()) for o in outputs] == [16, 16, 16, 12, 0, 0]
    assert [len(o.new_token_ids) for o in outputs] == [0, 0, 0, 0, 1, 1]


def test_what_is_computed_again_is_not_scored_again_and_may_be_found():
    """The request is preempted when half of it has been scored, and when all of it has."""
    for num_steps, num_scored, start in ((1, 40, 32), (2, 60, 48)):
        scheduler, runner = make_scheduler(max_num_batched_tokens=40, max_num_seqs=1), FakeRunner()
        scheduler.add("gw", make_message("r", prompt=PROMPT, prompt_logprobs=0, priority=1))
        for _ in range(num_steps):
            batch = scheduler.schedule()
            update(scheduler, batch, runner.run(batch))
        scheduler.add("gw", make_message("urgent", max_tokens=1))
        batch = scheduler.schedule()
        update(scheduler, batch, runner.run(batch))
        assert [row.request_id for row in batch.rows] == ["urgent"]
        (row,) = scheduler.schedule().rows
        assert row.start == start
        scored = row.scoring.token_ids if row.scoring else ()
        assert scored == tuple(PROMPT[1:][num_scored:])


def test_without_tokens_a_request_is_its_prompt(tmp_path):
    core = make_core(tmp_path)
    message = make_message("r", prompt=PROMPT, n=2, max_tokens=0)
    outputs = served(core, message)
    assert [(o.index, o.stop_cause, o.new_token_ids) for o in outputs] == [
        (0, "max_tokens", ()),
        (1, "max_tokens", ()),
    ]
    (end,) = core.journal.read(0, 99).records
    assert (end.finish_reason, end.stop_cause) == ("length", "max_tokens")
    assert (end.num_prompt_tokens, end.num_completion_tokens) == (len(PROMPT), 0)
    assert end.first_token_at is None
