"""Requests fail alone whose values are not finite; a step has the adapter that was asked for."""

import hashlib
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cpu.inputs import InputBuilder
from engine.gpu.runner import GpuRunner
from engine.steps.batch import Batch, ScheduledRow
from lora.batch import DeviceTables
from lora.packed import PackedForm
from registry.formats.peft_format import read_canonical
from tests.engine.fakes import LAYOUT, make_message, run_until_idle, tokens_of
from tests.engine.gpu.backends import fake_backend
from tests.engine.real_core import add_adapter, build_core
from tests.oracle import greedy, merged_model
from tests.tiny_models import save_adapter, save_model

RUNNERS = pytest.mark.parametrize(
    "runner", [{}, {"make_backend": fake_backend}], ids=["cpu", "device"]
)


def kv_of(runner):
    return runner.kv if isinstance(runner, GpuRunner) else runner.inputs.kv


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
        core.handle("gw", make_message(name, max_tokens=8, prompt=prompt))
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
