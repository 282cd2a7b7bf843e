"""A mixed batch gives each request the tokens of transformers and PEFT with a merged adapter."""

import hashlib
import io
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import Batch, ScheduledRow
from engine.cpu.inputs import InputBuilder
from engine.gpu.runner import GpuRunner
from lora.batch import DeviceTables
from lora.packed import PackedForm
from registry.peft_format import read_canonical
from tests.engine.fakes import LAYOUT, make_message, run_until_idle, tokens_of
from tests.engine.gpu.backends import fake_backend
from tests.engine.real_core import add_adapter, build_core
from tests.oracle import greedy, merged_model
from tests.tiny_models import LLAMA3_ROPE, save_adapter, save_model

RUNNERS = pytest.mark.parametrize(
    "runner", [{}, {"make_backend": fake_backend}], ids=["cpu", "device"]
)


def kv_of(runner):
    return runner.kv if isinstance(runner, GpuRunner) else runner.inputs.kv


LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 24}
MODELS: dict[str, dict[str, Any]] = {
    "old spelling, untied, biases, llama3 rope": {
        "rope": LLAMA3_ROPE, "old_spelling": True, "tied": False, **BIASES,
    },
    "mistral without a window, wide heads, linear rope": {
        "family": "mistral", "sliding_window": None, "head_dim": 32, "rope": LINEAR_ROPE,
    },
    "qwen2 with a window in one layer, old spelling": {
        "family": "qwen2", "old_spelling": True,
        "num_hidden_layers": 3, "max_window_layers": 2, **SLIDING,
    },
    "qwen3, untied, biases, yarn": {
        "family": "qwen3", "tied": False, "attention_bias": True, "rope": YARN_ROPE,
    },
}  # fmt: skip
"""Settings of models beside those in tests.engine.test_oracle, several of them in each model."""


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_a_mixed_batch_gives_each_request_what_it_gets_with_its_adapter_merged(tmp_path, options):
    """Run requests of the base model and an adapter per spec in one engine; compare with PEFT."""
    model_dir = save_model(tmp_path / "model", **options)
    specs = [
        {"r": 4, "lora_alpha": 16},
        {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
        {"r": 8, "lora_alpha": 16, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 5}},
    ]
    num_requests = 12
    dirs = [
        save_adapter(model_dir, tmp_path / f"a{i}", seed=10 + i, **spec)
        for i, spec in enumerate(specs)
    ]
    objects: dict[str, bytes] = {}
    adapters = [None, *(add_adapter(objects, model_dir, d, tmp_path) for d in dirs)]
    core = build_core(model_dir, tmp_path / "engine", objects, budget=40)
    chance = random.Random(3)
    messages = []
    for i in range(num_requests):
        message = make_message(f"r{i}", 1 + chance.randrange(70), 12, adapters[i % len(adapters)])
        messages.append(message)
        core.handle("gw", message)
    outputs = run_until_idle(core)
    oracles = [merged_model(model_dir, d) for d in (None, *dirs)]
    num_distinct = 0
    for i, message in enumerate(messages):
        prompt = list(message.prompt_token_ids)
        own = greedy(oracles[i % len(oracles)], prompt, 12)
        num_distinct += own != greedy(oracles[(i + 1) % len(oracles)], prompt, 12)
        assert tokens_of(outputs[message.request_id]) == own
    assert num_distinct >= 0.9 * num_requests, "adapters must change the answers"


@RUNNERS
def test_an_adapter_that_overflows_fails_alone_and_leaves_nothing_behind(tmp_path, runner):
    model_dir = save_model(tmp_path / "model")
    good = save_adapter(model_dir, tmp_path / "good", seed=1)
    objects: dict[str, bytes] = {}
    adapters = {
        "base": None,
        "good": add_adapter(objects, model_dir, good, tmp_path),
        # Only the keys overflow: the residual stream stays finite, so the KV store has to check.
        "bad": add_overflowing(objects, model_dir, good, tmp_path),
    }
    core = build_core(model_dir, tmp_path / "engine", objects, num_slabs=26, budget=40, **runner)
    messages = [make_message(f"{n}-{i}", 63, 8, adapters[n]) for i in range(4) for n in adapters]
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    oracles = {
        "base": merged_model(model_dir, None),
        "good": merged_model(model_dir, good),
    }
    for message in messages:
        name, last = message.request_id.split("-")[0], outputs[message.request_id][-1]
        if name == "bad":
            assert (last.stop_cause, last.num_completion_tokens) == ("engine_failure", 0)
        else:
            expected = greedy(oracles[name], list(message.prompt_token_ids), 8)
            assert tokens_of(outputs[message.request_id]) == expected
    first_bad = outputs["bad-0"][-1]
    assert first_bad.num_prompt_tokens < 63, "it fails before its prompt ends"
    assert kv_of(core.runner).isfinite().all()


def add_overflowing(objects, model_dir, adapter_dir, tmp_path):
    """Add an adapter as add_adapter does, with finite k_proj weights whose product overflows.

    Uploads of such adapters are refused, but the engine does not rely on it.
    """
    ref = add_adapter(objects, model_dir, adapter_dir, tmp_path)
    data = bytearray(objects[ref.digest])
    for name, tensor in read_canonical(io.BytesIO(data), len(data)).tensors.items():
        if "k_proj" in name:
            values = np.frombuffer(data, "<f4", tensor.size_bytes // 4, tensor.start)
            data[tensor.start : tensor.end] = (values * np.float32(1e25)).tobytes()
    digest = hashlib.sha256(data).hexdigest()
    objects[digest] = bytes(data)
    return replace(ref, digest=digest, object_key=f"k/{digest}")


@RUNNERS
def test_a_nan_in_the_weights_fails_the_requests_that_meet_it(tmp_path, runner):
    model_dir, poison = save_model(tmp_path / "model", tied=False), 7
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.embed_tokens.weight"][poison] = torch.nan
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    core = build_core(model_dir, tmp_path / "engine", {}, num_slabs=16, budget=40, **runner)
    clean = [t for t in make_message("x", 70).prompt_token_ids if t != poison]
    prompts = {"first": [poison, *clean], "clean": clean, "last": [*clean, poison]}
    prompts |= {"middle": [*clean[:20], poison, *clean[20:]], "later": clean[::-1]}
    for name, prompt in prompts.items():
        message = replace(make_message(name, max_tokens=8), prompt_token_ids=tuple(prompt))
        core.handle("gw", message)
    outputs = run_until_idle(core)
    oracle = merged_model(model_dir, None)
    for name, prompt in prompts.items():
        if poison in prompt:
            assert outputs[name][-1].stop_cause == "engine_failure"
        else:
            assert tokens_of(outputs[name]) == greedy(oracle, prompt, 8)
    assert kv_of(core.runner).isfinite().all()


def test_the_step_asserts_that_the_adapter_in_the_arena_is_the_one_asked_for(tmp_path):
    form = PackedForm(LAYOUT, "float32", "base-1")
    slabs = torch.zeros(8, LAYOUT.slab_bytes, dtype=torch.uint8)
    other = DeviceTables("other", "", torch.zeros(0), torch.zeros(0))
    row = ScheduledRow("r", (1,), 0, (0,), "k/mine", "mine", 1, None, 0, 0)
    builder = InputBuilder(slabs, form, lambda key: (1, other))
    with pytest.raises(AssertionError, match="another adapter"):
        builder.build(Batch(1, (row,)))
    mine = DeviceTables("mine", "base-1", torch.zeros(0), torch.zeros(0))
    builder = InputBuilder(slabs, form, lambda key: (2, mine))
    with pytest.raises(AssertionError, match="replaced since scheduling"):
        builder.build(Batch(1, (row,)))
    builder = InputBuilder(slabs, replace(form, base_revision="newer"), lambda key: (1, mine))
    with pytest.raises(AssertionError, match="another base model"):
        builder.build(Batch(1, (row,)))


@RUNNERS
def test_answers_of_a_least_length_and_of_some_tokens_only_are_those_of_transformers(
    tmp_path, runner
):
    model_dir = save_model(tmp_path / "model")
    core = build_core(model_dir, tmp_path / "engine", {}, **runner)
    model, prompt = merged_model(model_dir, None), [5, 9, 17]
    ending = greedy(model, prompt, 12)[1:6:2]
    limits = {"min_tokens": 7, "stop_token_ids": tuple(ending)}
    core.handle("gw", make_message("long", prompt=prompt, max_tokens=12, **limits))
    # No other tokens are allowed, so the answer may end before its minimum length.
    limits["allowed_token_ids"] = tuple(ending)
    core.handle("gw", make_message("short", prompt=prompt, max_tokens=12, **limits))
    allowed = {"ignore_eos": True, "allowed_token_ids": (250, 40, 7)}
    core.handle("gw", make_message("few", prompt=prompt, max_tokens=9, **allowed))
    outputs = run_until_idle(core)
    expected = greedy(model, prompt, 12, min_new_tokens=7, eos_token_id=[0, *ending])
    assert tokens_of(outputs["long"]) == expected != greedy(model, prompt, 12)
    assert len(tokens_of(outputs["short"])) == 1
    few = greedy(model, prompt, 9, prefix_allowed_tokens_fn=lambda *_: [7, 40, 250])
    assert tokens_of(outputs["few"]) == few


@RUNNERS
def test_logprobs_are_the_models_own_and_reach_who_asked_for_them(tmp_path, runner):
    model_dir = save_model(tmp_path / "model")
    # Prompts run in chunks beside decodes, so the index of a row that samples keeps changing.
    core = build_core(model_dir, tmp_path / "engine", {}, budget=20, **runner)
    messages = [
        make_message(f"r{i}", 5 + 13 * i, 9, logprobs=[None, 0, 3][i % 3], repetition_penalty=1.4)
        for i in range(7)
    ]
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    model = merged_model(model_dir, None)
    for message in messages:
        prompt, ids = list(message.prompt_token_ids), tokens_of(outputs[message.request_id])
        count = message.sampling_params.logprobs
        if count is None:
            assert all(output.logprobs is None for output in outputs[message.request_id])
            continue
        named = [entry for output in outputs[message.request_id] for entry in output.logprobs]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        for entry, row, token in zip(named, expected, ids, strict=True):
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
            values, tokens = row.topk(count)
            assert [t for t, _ in entry.top] == tokens.tolist()
            assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
