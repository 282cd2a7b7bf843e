"""Draft models on the CPU: what they draft, how many tokens a slab holds, and which are refused."""

import json
import random

import pytest

from engine.build import build_core as build_engine_core
from engine.cpu.draft_model import draft_layout
from engine.drafts.speculation import MOST_DRAFTS, NoDrafter
from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.models.weights import load_config
from lora.layout import Layout
from tests.engine.cpu_kernels import kernels_of
from tests.engine.fakes import make_message, run_until_idle, tokens_of
from tests.engine.models.test_config import LLAMA
from tests.engine.real_core import build_core
from tests.engine.test_build import make_config
from tests.engine.test_oracle import run
from tests.oracle import greedy, merged_model
from tests.tiny_models import save_model

NUM_TOKENS = 33


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder with the served model, prompts, and what transformers answers."""
    folder = save_model(tmp_path_factory.mktemp("served") / "model", num_key_value_heads=4)
    chance = random.Random(3)
    prompts = [[chance.randrange(1, 250) for _ in range(chance.randrange(1, 70))] for _ in range(6)]
    model = merged_model(folder, None)
    return folder, prompts, [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]


def check_answers(core, prompts, expected):
    """Run base-model requests; the final outputs."""
    messages = [
        make_message(f"r{i}", prompt=prompt, max_tokens=NUM_TOKENS)
        for i, prompt in enumerate(prompts)
    ]
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    core.scheduler.check_integrity()
    assert [tokens_of(outputs[message.request_id]) for message in messages] == expected
    return [outputs[message.request_id][-1] for message in messages]


@pytest.mark.parametrize(("kernels", "num_swap_slots"), [("torch", 0), ("native", 40)])
def test_a_model_foresees_all_of_its_own_answers_whatever_happens(
    served, tmp_path, kernels, num_swap_slots
):
    """A model of wrong keys or values would not."""
    folder, prompts, expected = served
    core = build_core(
        folder, tmp_path, {}, num_slabs=18, budget=40, num_swap_slots=num_swap_slots,
        draft_model_dir=folder, drafter=NoDrafter(), make_kernels=kernels_of(kernels),
    )  # fmt: skip
    messages = [
        make_message(f"r{i}", prompt=prompts[i % 6], max_tokens=NUM_TOKENS, n=1 + i % 2)
        for i in range(24)
    ]
    aborted = {message.request_id for message in messages[3::6]}
    outputs = run(core, messages, aborted, random.Random(6))
    for number, message in enumerate(messages):
        answers = [[], []]
        for output in outputs[message.request_id]:
            answers[output.index] += output.new_token_ids
        for tokens in answers[: message.sampling_params.n]:
            assert tokens == expected[number % 6][: len(tokens)]
            assert len(tokens) == len(expected[number % 6]) or message.request_id in aborted
    stats = core.take_stats()
    assert stats.preemptions > 0
    assert bool(stats.swapped) == bool(num_swap_slots)
    assert stats.drafts.accepted_tokens == stats.drafts.drafted_tokens > 50
    assert core.scheduler.speculation.num_slabs == 0


@pytest.mark.parametrize(
    ("kernels", "draft"),
    [
        ("torch", {"num_hidden_layers": 1, "num_key_value_heads": 1}),
        ("native", {"family": "qwen2"}),
    ],
)
def test_any_model_with_the_vocabulary_may_draft(served, tmp_path, kernels, draft):
    """A model of fewer layers has blocks of many more tokens."""
    folder, prompts, expected = served
    draft_dir = save_model(tmp_path / "draft", **draft)
    core = build_core(
        folder, tmp_path / "engine", {}, draft_model_dir=draft_dir, drafter=NoDrafter(),
        make_kernels=kernels_of(kernels),
    )  # fmt: skip
    finals = check_answers(core, prompts, expected)
    assert sum(final.num_rejected_tokens for final in finals) > 0


def test_a_slab_holds_as_many_tokens_as_fit():
    def shape(num_layers, num_kv_heads):
        sizes = {"num_hidden_layers": num_layers, "num_key_value_heads": num_kv_heads}
        return DecoderConfig.parse(LLAMA | sizes).shape

    slab_bytes = Layout(shape(12, 4), 4, 16, 4).slab_bytes
    assert draft_layout(shape(12, 4), 4, slab_bytes).block_size == 16
    assert draft_layout(shape(5, 4), 4, slab_bytes).block_size == 32
    assert draft_layout(shape(1, 1), 4, slab_bytes).block_size == 16 * 12 * 4
    assert draft_layout(shape(13, 4), 4, slab_bytes) is None


def engine_config(served, tmp_path, draft_dir, **values):
    eos = {"eos_token_ids": (0,), "device": "cpu", "max_model_len": 128, "arena_bytes": 4 << 20}
    return make_config(
        tmp_path, model_dir=str(served[0]), draft_model_dir=str(draft_dir), **eos, **values
    )


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_engine_is_built_with_a_draft_model(served, tmp_path, quantization):
    draft_dir = save_model(tmp_path / "draft", num_hidden_layers=1)
    config = engine_config(served, tmp_path, draft_dir, quantization=quantization)
    core, _ = build_engine_core(config, "eng-1", [])
    message = make_message(prompt=served[1][0], max_tokens=NUM_TOKENS)
    core.handle("gw", message)
    tokens = tokens_of(run_until_idle(core)["r1"])
    core.scheduler.check_integrity()
    assert quantization or tokens == served[2][0]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"device": "cuda"}, "device cuda"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2"),
        ({"speculation": "off"}, "speculation off"),
    ],
)
def test_settings_that_a_draft_model_does_not_go_with_are_refused(served, tmp_path, values, named):
    config = engine_config(served, tmp_path, served[0])
    config = make_config(tmp_path, **{**vars(config), **values})
    with pytest.raises(UnsupportedModel, match=f"draft_model .* does not go with {named}"):
        build_engine_core(config, "eng-1", [])


def test_a_model_with_another_vocabulary_is_refused(served, tmp_path):
    draft_dir = save_model(tmp_path / "draft", num_hidden_layers=1, vocab_size=400)
    config = engine_config(served, tmp_path, draft_dir)
    with pytest.raises(UnsupportedModel, match=rf"{draft_dir} .* 400 tokens, and {served[0]}"):
        build_engine_core(config, "eng-1", [])


@pytest.mark.parametrize("part", ["vocab", "added_tokens"])
def test_a_model_whose_tokens_mean_something_else_is_refused(served, tmp_path, part):
    draft_dir = save_model(tmp_path / "draft", num_hidden_layers=1)
    path = draft_dir / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    if part == "vocab":
        words = tokenizer["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]
    else:
        tokenizer["added_tokens"][1]["content"] = "<|customer|>"
    path.write_text(json.dumps(tokenizer))
    config = engine_config(served, tmp_path, draft_dir)
    with pytest.raises(UnsupportedModel, match=rf"{draft_dir} and of {served[0]} do not agree"):
        build_engine_core(config, "eng-1", [])


def test_a_model_whose_kv_is_too_large_for_slabs_is_refused(served, tmp_path):
    draft_dir = save_model(tmp_path / "draft", num_hidden_layers=5)
    assert load_config(draft_dir)["num_hidden_layers"] == 5
    config = engine_config(served, tmp_path, draft_dir)
    with pytest.raises(UnsupportedModel, match=f"16 tokens of {draft_dir} take more than a slab"):
        build_engine_core(config, "eng-1", [])


def test_no_answer_is_drafted_for_behind_the_positions_that_the_model_has(served, tmp_path):
    """Drafts end where a step of them might pass max_model_len, and the answer goes on."""
    folder, _, _ = served
    core = build_core(folder, tmp_path, {}, draft_model_dir=folder, drafter=NoDrafter())
    longest = core.scheduler.config.max_model_len
    message = make_message(prompt=list(range(1, longest - 30)), max_tokens=100)
    core.handle("gw", message)
    final = run_until_idle(core)["r1"][-1]
    assert final.num_completion_tokens == 31
    assert final.num_accepted_tokens >= 31 - 4 - 2 * MOST_DRAFTS
