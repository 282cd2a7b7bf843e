"""A proof's reference equals transformers and PEFT, and judges adapters on real kernels."""

import math
import threading
from functools import partial
from itertools import accumulate, count
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.variants import calculate_alora_offsets
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.models.config import DecoderConfig
from engine.models.rounding import NO_ROUNDING, WeightRounding
from engine.models.weights import ServedNumbers, load_config
from engine.proofs import beside, merged
from engine.proofs.beside import Beside
from engine.proofs.merged import MergedModel
from engine.proofs.proof import TokenSequence
from engine.wire.messages import ProveAdapter
from tests.engine import real_core
from tests.engine.cpu_kernels import kernels_of
from tests.engine.fakes import make_message
from tests.engine.gpu.backends import fake_backend
from tests.engine.gpu.fake_device import FakeDevice
from tests.engine.real_core import add_adapter, build_core
from tests.engine.test_oracle import FAMILIES, INVOCATION
from tests.oracle import merged_model
from tests.tiny_models import LLAMA3_ROPE, QWEN3_MOE, save_adapter, save_model

ONE_FAMILY = pytest.mark.parametrize("world", ["llama"], indirect=True)
"""Tests of claims that no family's formulas can change run on one family."""
PROMPTS = ((5, 6, 7, 17, 18, 19, 80), tuple(17 + i % 9 for i in range(40)))


@pytest.fixture(scope="module", params=[*FAMILIES, "untied, with a scaled rope"])
def world(request, tmp_path_factory):
    """A model, and an ordinary and an activated adapter for it."""
    folder = tmp_path_factory.mktemp("merged")
    other = {"tied": False, "rope": LLAMA3_ROPE, "max_shard_size": "100KB"}
    model = save_model(folder / "model", **FAMILIES.get(request.param, other))
    lora = save_adapter(
        model, folder / "lora", seed=3, rank_pattern={".*v_proj": 3}, use_rslora=True
    )
    alora = save_adapter(
        model, folder / "alora", seed=4, alora_invocation_tokens=INVOCATION, r=4, lora_alpha=8
    )
    return model, {"lora": lora, "alora": alora}


@pytest.fixture
def prove(world, tmp_path):
    """A function that runs a proof on a real core; `change` alters the file but not the adapter."""

    def prove(kind="lora", change=lambda data: data, **options):
        model, adapters = world
        objects, ref, path = added(model, adapters[kind], tmp_path)
        path.write_bytes(change(path.read_bytes()))
        core = build_core(model, tmp_path / "engine", objects, **options)
        return real_core.prove(core, ref, path)

    return prove


def added(model, adapter, tmp_path):
    """Objects with an adapter's, its ref, and the object's file."""
    objects, path = {}, tmp_path / "object"
    ref = add_adapter(objects, model, adapter, tmp_path)
    path.write_bytes(objects[ref.digest])
    return objects, ref, path


def drain(generator):
    """A generator's return value, and how often it yielded before."""
    for units in count():
        try:
            next(generator)
        except StopIteration as done:
            return done.value, units
    raise AssertionError


class Watched(ServedNumbers):
    """Weights that note which of them were read, one name for each unit."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.names = []

    def rows(self, name, start, end):
        self.names.append(name)
        return super().rows(name, start, end)


def reference(model, device=None, quantization=None):
    """A model, and its weights where the device is."""
    config = DecoderConfig.parse(load_config(model))
    there = device.torch_device if device else torch.device("cpu")
    numbers = Watched(model, WeightRounding.of(quantization), there=there)
    return MergedModel(numbers, config, device=device), numbers


def compare(model, path, sequences):
    return drain(reference(model)[0].compare(sequences, path))[0]


@torch.inference_mode()
def logprobs(model, prompt):
    """Logprobs [tokens, vocab] of a model of transformers or PEFT."""
    ids, options = torch.tensor([prompt]), {}
    if isinstance(model, PeftModel):  # an activated LoRA, which is not merged
        active = model.active_adapter
        options["alora_offsets"] = calculate_alora_offsets(model.peft_config, active, ids)
    return model(ids, **options).logits[0].log_softmax(-1).numpy()


@pytest.mark.parametrize("kind", ["lora", "alora"])
def test_both_streams_are_transformers_and_peft(world, tmp_path, kind):
    model, adapters = world
    *_, path = added(model, adapters[kind], tmp_path)
    starts = [3, 36] if kind == "alora" else [0, 0]
    prompts = [PROMPTS[0], (*PROMPTS[1][:36], *INVOCATION, 40)]
    sequences = [TokenSequence(p, s) for p, s in zip(prompts, starts, strict=True)]
    found = compare(model, path, sequences)
    for stream, adapter in ((found.base, None), (found.merged, adapters[kind])):
        peft = merged_model(model, adapter)
        expected = [logprobs(peft, prompt) for prompt in prompts]
        np.testing.assert_allclose(stream, np.concatenate(expected), atol=2e-4, rtol=5e-5)
    assert np.abs(found.base - found.merged).max() > 0.1


def test_neither_the_size_of_a_unit_nor_a_device_changes_anything(world, tmp_path, monkeypatch):
    model, adapters = world
    *_, path = added(model, adapters["lora"], tmp_path)
    sequences = [TokenSequence(PROMPTS[0], 0)]
    whole = compare(model, path, sequences)
    beside, _ = drain(reference(model, FakeDevice())[0].compare(sequences, path))
    monkeypatch.setattr(merged, "_UNIT_ELEMENTS", 64 * 7)
    pieces, units = drain(reference(model)[0].compare(sequences, path))
    assert units > 100
    for other in (beside, pieces):
        np.testing.assert_allclose(other.merged, whole.merged, atol=2e-4, rtol=5e-5)


class OneDevice(TorchDispatchMode):
    """Refuses operators that mix tensors of two devices, except for copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        devices = {x.device for x in leaves if isinstance(x, torch.Tensor) and x.dim()}
        assert len(devices) < 2 or func is torch.ops.aten.copy_.default, f"{func} of {devices}"
        return func(*args, **(kwargs or {}))


class Elsewhere(FakeDevice):
    """A device whose tensors have no values."""

    torch_device = torch.device("meta")

    def submit(self, stream, work):
        def checked():
            with OneDevice():
                work()

        super().submit(stream, checked)


# Which experts run depends on values.
@pytest.mark.parametrize("world", sorted({*FAMILIES} - {"qwen3_moe", "mixtral"}), indirect=True)
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_all_but_logits_is_on_the_device(world, tmp_path, quantization):
    model, adapters = world
    config = DecoderConfig.parse(load_config(model))
    *_, path = added(model, adapters["alora"], tmp_path)
    elsewhere, weights = reference(model, Elsewhere(eagerness=0.0), quantization)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        drain(elsewhere.compare([TokenSequence(PROMPTS[0], 0)], path))
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    assert weights.names[-1] == f"{head}.weight"


def peak_bytes(work, but):
    """Most memory that tensors take while this thread works; mappings of `but` bytes do not count.

    Returns the result of the work, too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return result, max(accumulate(size for size in sizes if abs(size) != but))


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden_size": 256, "intermediate_size": 2048},
        {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 8},
    ],
)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_run_takes_no_more_memory_than_is_kept_for_it(tmp_path, shape, quantization):
    model = save_model(tmp_path / "model", tied=False, dtype=torch.bfloat16, **shape)
    *_, path = added(model, save_adapter(model, tmp_path / "lora", seed=1), tmp_path)
    file_bytes = (model / "model.safetensors").stat().st_size
    for num_tokens in (2, 100):
        sequences = [TokenSequence((3,) * num_tokens, 0)]
        runs, _ = reference(model, quantization=quantization)
        work = partial(drain, runs.compare(sequences, path))
        (compared, _), taken = peak_bytes(work, but=file_bytes)
        on_host = 3 * (compared.base.nbytes + compared.merged.nbytes)
        kept = merged.scratch_bytes(runs.config, num_tokens) - merged._LIBRARY_BYTES
        assert 0.4 * kept < taken - on_host <= kept


class Shut(ServedNumbers):
    """Weights that nobody can read until a gate is opened."""

    def __init__(self, *args):
        super().__init__(*args)
        self.is_asked, self.gate = threading.Event(), threading.Event()

    def rows(self, name, start, end):
        self.is_asked.set()
        assert self.gate.wait(60)
        return super().rows(name, start, end)


@ONE_FAMILY
def test_steps_do_not_wait_for_merged_weights_on_a_device(world, tmp_path):
    model, adapters = world
    objects, ref, path = added(model, adapters["lora"], tmp_path)
    core = build_core(model, tmp_path / "engine", objects)
    weights = Shut(model, NO_ROUNDING)
    core.proofs.reference = MergedModel(weights, core.proofs.reference.config, device=FakeDevice())
    core.handle("gw", ProveAdapter(proof_id="p", adapter=ref, object_path=str(path)))
    while not weights.is_asked.is_set():
        assert core.step() == []
    core.handle("gw", make_message("r", max_tokens=20))
    outputs = []
    while not outputs or not outputs[-1].is_last:
        outputs += [output for _, answer in core.step() for output in answer.outputs]
    weights.gate.set()
    answers = []
    while not answers:
        answers = core.step()
    assert answers[0][1].proof.verdict == "passed"


def test_a_thread_beside_the_steps_does_many_short_units_before_it_waits_for_the_loop():
    work, units = Beside(FakeDevice()), iter([None] * 200 + ["done"])
    turns = work._thread.submit = Mock(wraps=work._thread.submit)
    assert drain(work.run(lambda: next(units)))[0] == "done"
    assert turns.call_count < 200


@ONE_FAMILY
@pytest.mark.parametrize("fault", ["silence", "memory"])
def test_a_device_that_does_not_answer_or_has_no_room_leaves_the_adapter_unproved(
    world, tmp_path, monkeypatch, fault
):
    model, adapters = world
    objects, ref, path = added(model, adapters["lora"], tmp_path)
    core = build_core(model, tmp_path / "engine", objects)
    weights = Shut(model, NO_ROUNDING)
    core.proofs.reference = MergedModel(weights, core.proofs.reference.config, device=FakeDevice())
    if fault == "silence":
        monkeypatch.setattr(beside, "SILENCE_S", 0.1)
    else:
        monkeypatch.setattr(weights, "rows", Mock(side_effect=torch.OutOfMemoryError("none")))
    proof = real_core.prove(core, ref, path)
    weights.gate.set()
    assert proof.verdict == "unavailable"
    reason = {"silence": "has not answered for 0.1 s", "memory": "no memory left"}[fault]
    assert reason in proof.message
    core.handle("gw", make_message("r", max_tokens=20))
    while not any(output.is_last for _, answer in core.step() for output in answer.outputs):
        pass


def test_only_experts_that_a_token_has_are_read(tmp_path):
    options = {**QWEN3_MOE, "num_experts": 64, "mlp_only_layers": []}
    model = save_model(tmp_path / "model", family="qwen3_moe", **options)
    *_, path = added(model, save_adapter(model, tmp_path / "lora", seed=1), tmp_path)
    watched, weights = reference(model)
    sequence = TokenSequence(PROMPTS[0][:3], 0)
    drain(watched.compare([sequence], path))
    gates = {name for name in weights.names if name.endswith("gate_proj.weight")}
    read = {name for name in gates if ".experts." in name}
    num_layers, most = 2, 2 * len(sequence.token_ids) * options["num_experts_per_tok"]
    assert num_layers < len(read) <= num_layers * most < num_layers * 64


@pytest.mark.parametrize("kind", ["lora", "alora"])
def test_real_adapters_pass(prove, kind):
    proof = prove(kind)
    assert (proof.verdict, proof.message, proof.warnings) == ("passed", "", ())
    assert proof.max_difference < proof.tolerance < 0.2 * proof.max_effect


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_on_a_rounded_base_a_proof_tells_how_far_that_moves_its_answers(tmp_path, quantization):
    model = save_model(tmp_path / "model", intermediate_size=192, tied=False)
    adapter = save_adapter(model, tmp_path / "adapter", seed=3)
    objects, ref, path = added(model, adapter, tmp_path)
    core = build_core(
        model, tmp_path / "engine", objects,
        make_kernels=kernels_of("native"), quantization=quantization,
    )  # fmt: skip
    proof = real_core.prove(core, ref, path)
    assert proof.verdict == "passed"
    assert proof.base_shift > 0.001
    assert proof.base_agreement in [n / 8 for n in range(9)]
    reference = core.proofs.reference
    found = drain(reference.compare([TokenSequence(PROMPTS[0], 0)], path))[0]
    expected = logprobs(merged_model(model, adapter), PROMPTS[0])
    np.testing.assert_allclose(found.unrounded, expected, atol=2e-4, rtol=5e-5)
    assert np.abs(found.unrounded - found.merged).max() > 0.001


def test_they_pass_on_the_kernels_in_c(prove):
    assert prove(make_kernels=kernels_of("native")).verdict == "passed"


@ONE_FAMILY
@pytest.mark.parametrize("options", [{"lag": 1}, {"make_backend": fake_backend}])
def test_they_pass_a_step_late_and_on_a_device(prove, options):
    assert prove(**options).verdict == "passed"


def scaled(factor):
    """A change that scales one module in the object's header and keeps the header's length."""

    def change(data):
        at = data.index(b'\\"scale\\":') + len(b'\\"scale\\":')
        end = min(
            data.index(b"}", at), data.index(b",", at) if b"," in data[at : at + 40] else 1 << 60
        )
        old = data[at:end]
        new = repr(float(old) * factor).encode()[: len(old)].ljust(len(old), b"0")
        assert math.isfinite(float(new))
        return data[:at] + new + data[end:]

    return change


@ONE_FAMILY
@pytest.mark.parametrize("options", [{}, {"make_backend": fake_backend}])
def test_one_module_with_another_scale_is_a_mismatch(prove, options):
    """One of 14 modules is off, which is the effect of a tile that is not applied."""
    proof = prove(change=scaled(0.5), **options)
    assert proof.verdict == "mismatch"
    assert proof.max_difference > proof.tolerance


@ONE_FAMILY
def test_a_file_that_is_no_canonical_object_is_not_served(prove):
    assert prove(change=lambda data: data[:-1]).verdict == "not_served"
