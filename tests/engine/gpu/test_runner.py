"""The device's runner alone; tests.engine.test_{runner,oracle} run it in engines."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from engine.build import _speculation
from engine.errors import UnsupportedModel
from engine.gpu import sampler
from engine.gpu.backend import check_capability, check_width, most_drafts
from engine.gpu.inputs import StepShape
from engine.gpu.profile import bytes_of_all, run_largest_steps
from engine.gpu.sampler import MOST_TOP_LOGPROBS
from engine.models.config import DecoderConfig
from engine.models.weights import StoredWeights, load_config
from engine.proofs.merged import scratch_bytes
from engine.steps.meter import TokenMeter
from engine.wire.messages import SamplingParams
from kernels.block import adapter_blocks
from lora.arena import Arena
from lora.layout import Layout
from lora.packed import PackedForm
from tests.engine.fakes import make_message, run_until_idle, tokens_of
from tests.engine.gpu.backends import fake_backend, make_config
from tests.engine.gpu.fake_device import TOTAL_BYTES, FakeDevice
from tests.engine.real_core import build_core
from tests.engine.replay_drafter import ReplayDrafter
from tests.soak import soak
from tests.tiny_models import save_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("runner") / "model")


def make_params(number):
    """Sampling parameters of every kind, alone and combined."""
    options = {
        "temperature": [0.0, 0.8, 1.3][number % 3],
        "top_k": [0, 5, 40][number // 2 % 3],
        "top_p": [1.0, 0.7][number % 2],
        "min_p": [0.0, 0.05][number // 3 % 2],
        "repetition_penalty": [1.0, 1.6][number // 2 % 2],
        "frequency_penalty": [0.0, 0.9][number // 4 % 2],
        "presence_penalty": [0.0, -0.5, 0.7][number % 3],
        "logit_bias": [(), ((5, 3.0), (9, -4.0), (10**6, 1.0))][number // 5 % 2],
        "logprobs": [None, 0, 4][number % 3],
    }
    return SamplingParams(max_tokens=14, seed=number, ignore_eos=True, **options)


def ask(core):
    """Run requests of all kinds; return the tokens and their logprobs by request id."""
    for number in range(24):
        grammar = ["", "quick", "slow"][number // 2 % 3]
        message = make_message(f"r{number}", prompt_len=5 + number, grammar=grammar)
        core.handle("gw", replace(message, sampling_params=make_params(number), token_lease=14))
    outputs = run_until_idle(core)
    logprobs = {
        name: [entry for output in own for entry in output.logprobs or ()]
        for name, own in outputs.items()
    }
    return {name: tokens_of(own) for name, own in outputs.items()}, logprobs


@pytest.fixture(scope="module")
def cpu(model_dir, tmp_path_factory):
    """Tokens and logprobs that the CPU chooses, and its counts."""
    folder = tmp_path_factory.mktemp("cpu")
    with pytest.MonkeyPatch.context() as patch:
        wait_for_masks(patch)
        return *ask(build_core(model_dir, folder, {}, lag=1)), counts(folder)


def counts(folder):
    """(prompt tokens, sampled tokens) that a core in this folder has counted."""
    return TokenMeter.read(folder / "meter")[:2]


def wait_for_masks(patch):
    """Have no row compute a token again, for want of its mask, which would be counted again."""
    patch.setattr("engine.scheduling.forced._LEAST_PATIENCE_S", 60.0)


@pytest.fixture
def patient(monkeypatch):
    wait_for_masks(monkeypatch)


def check(found, expected):
    """Check tokens and logprobs against those of the CPU."""
    (tokens, logprobs), (said, entries, _) = found, expected
    assert tokens == said
    for name, own in entries.items():
        for mine, theirs in zip(logprobs[name], own, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def note_shapes(runner):
    """Shapes of steps that may be graphs, and of those that are none, in lists that grow."""
    found, eager = [], []
    find, forward = runner.graphs.find, runner._forward
    runner.graphs.find = lambda shape: found.append(shape) or find(shape)
    runner._forward = lambda shape, *rest: eager.append(shape) or forward(shape, *rest)
    return found, eager


@pytest.mark.usefixtures("patient")
def test_graphs_choose_and_count_as_the_cpu_does_though_the_last_token_is_still_pending(
    tmp_path, model_dir, cpu
):
    core = build_core(model_dir, tmp_path, {}, make_backend=fake_backend)
    found, eager = note_shapes(core.runner)
    check(ask(core), cpu)
    assert counts(tmp_path) == cpu[2] != (0, 0)
    assert len({shape.num_rows for shape in found if not shape.num_prefill_items}) > 1
    assert any(shape.num_prefill_items for shape in found)
    assert eager == []
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    core.handle("gw", replace(make_message("scored", prompt_len=9), sampling_params=params))
    num_found = len(found)
    run_until_idle(core)
    assert eager == [StepShape(9, 1, num_prefill_items=1, has_decodes=False)], "without padding"
    assert len(found) == num_found + 1, "the second token is a decode"


@pytest.mark.usefixtures("patient")
def test_so_they_do_with_drafts_behind_known_tokens_and_pending_ones(tmp_path, model_dir, cpu):
    drafter = ReplayDrafter(cpu[0], key=lambda request: request.request_id)
    make_backend = partial(fake_backend, max_num_drafts=20)
    core = build_core(model_dir, tmp_path, {}, make_backend=make_backend, drafter=drafter)
    _, eager = note_shapes(core.runner)
    speculation, accepted = core.scheduler.speculation, Counter()
    take = speculation.note

    def note(request, num_drafts, num_accepted):
        is_guess = speculation._records[request].guess is not None
        accepted[is_guess, bool(request.constraint)] += num_accepted
        take(request, num_drafts, num_accepted)

    speculation.note = note
    check(ask(core), cpu)
    assert counts(tmp_path) == cpu[2]
    assert all(accepted[kind] for kind in product((False, True), repeat=2)), "of each kind"
    assert eager == []


def test_logits_that_overflow_fail_the_request_though_all_before_them_is_finite(tmp_path):
    model_dir = save_model(tmp_path / "model", tied=False)
    core = build_core(model_dir, tmp_path / "device", {}, make_backend=fake_backend)
    core.runner.model.lm_head.weight[7] = 3e38
    core.handle("gw", make_message("r"))
    (output,) = run_until_idle(core)["r"]
    assert (output.stop_cause, output.num_completion_tokens) == ("engine_failure", 0)


# ---- memory, and refusals ----


def make_backend(model_dir, device, **values):
    config = DecoderConfig.parse(load_config(model_dir))
    layout = Layout.of(config.shape, itemsize=4)
    form = PackedForm(layout, "float32", "base-1")
    weights = dict(StoredWeights(model_dir, torch.float32))
    return fake_backend(config, form, weights, device, **values), layout


def proof_bytes(model_dir):
    return scratch_bytes(DecoderConfig.parse(load_config(model_dir)))


@pytest.mark.parametrize(("pool_bytes", "graph_bytes"), [(0, 0), (30 << 20, (1 << 20) + 7)])
def test_the_arena_is_what_steps_graphs_and_a_proof_leave_of_a_share_of_the_memory(
    model_dir, pool_bytes, graph_bytes
):
    device = FakeDevice(eagerness=1.0)
    device.free_bytes = TOTAL_BYTES // 2
    device.pool_bytes, device.graph_bytes = pool_bytes, graph_bytes
    backend, layout = make_backend(model_dir, device, memory_utilization=0.7, max_num_seqs=40)
    runner = backend.make_runner(lambda key: None, None, 0)
    graphs = pool_bytes + len(list(runner.graphs.shapes())) * graph_bytes
    left = TOTAL_BYTES // 2 - 0.3 * TOTAL_BYTES - proof_bytes(model_dir)
    assert 0 <= left - graphs - backend.slabs.nbytes < layout.slab_bytes


@pytest.mark.parametrize(
    ("grown", "num_measured", "num_graphs", "expected"),
    [(8, 4, 10, 20), (7, 4, 10, 18), (0, 8, 70, 0), (-3, 8, 70, 0), (0, 0, 2, 0)],
)
def test_graphs_that_were_measured_stand_for_all(grown, num_measured, num_graphs, expected):
    assert bytes_of_all(grown, num_measured, num_graphs) == expected


def test_an_arena_that_has_no_room_is_refused_with_what_to_do(model_dir):
    device = FakeDevice(eagerness=1.0)
    device.free_bytes = TOTAL_BYTES // 10
    with pytest.raises(UnsupportedModel, match="larger memory_utilization"):
        make_backend(model_dir, device, memory_utilization=0.8)


def test_an_arena_that_was_asked_for_and_does_not_fit_is_refused(model_dir):
    device = FakeDevice(eagerness=1.0)
    device.free_bytes = (1 << 20) + proof_bytes(model_dir)
    backend, layout = make_backend(model_dir, device, arena_bytes=1 << 20)
    assert len(backend.slabs) == (1 << 20) // layout.slab_bytes
    with pytest.raises(UnsupportedModel, match="smaller max_num_batched_tokens or arena_bytes"):
        make_backend(model_dir, device, arena_bytes=2 << 20)


@pytest.mark.parametrize("max_num_drafts", [0, 7, *soak(40)])
def test_the_largest_steps_are_as_large_as_steps_may_be(model_dir, max_num_drafts, monkeypatch):
    seen, depths = [], set()
    device = FakeDevice(eagerness=1.0)
    limits = {"max_num_batched_tokens": 700, "max_num_drafts": max_num_drafts}
    backend, layout = make_backend(model_dir, device, **limits)
    runner = backend.make_runner(lambda key: None, None, 0)
    run = runner.model.run

    def note(inputs, *rest):
        seen.append(inputs)
        depths.update(int(block["depth"]) for block in adapter_blocks(inputs.lora))
        return run(inputs, *rest)

    runner.model.run, tell = note, sampler.tell
    told = []
    monkeypatch.setattr(sampler, "tell", lambda *given: told.append(given) or tell(*given))
    runner.device.capture = lambda work: work
    form = PackedForm(layout, "float32", "base-1")
    run_largest_steps(runner.model, form, torch.float32, runner.limits)
    most_choices = 16 + max_num_drafts
    assert [len(inputs.input_ids) for inputs in seen] == [700, most_choices]
    assert [len(inputs.logits_indices) for inputs in seen] == [3, most_choices]
    assert [len(inputs.attention.prefill_items) > 0 for inputs in seen] == [True, False]
    assert depths == {32}
    assert (sum(len(raw) for raw, *_ in told), told[-1][2]) == (3 + most_choices, MOST_TOP_LOGPROBS)


@pytest.mark.parametrize(
    ("max_num_seqs", "vocab_size", "values", "expected"),
    [
        (256, 128_000, {}, 0),  # drafts take the places of rows that a step does not have
        (128, 32_000, {}, 128),
        (64, 32_000, {}, 192),
        (8, 32_000, {}, 56),
        (64, 128_000, {}, 131),
        (64, 32_000, {"speculation": "off"}, 0),
    ],
)
def test_there_is_memory_for_as_many_drafts_as_may_pay(max_num_seqs, vocab_size, values, expected):
    assert most_drafts(make_config(max_num_seqs=max_num_seqs, **values), vocab_size) == expected


def test_a_device_drafts_by_its_own_steps_which_it_measures_as_graphs(model_dir, tmp_path):
    device, meter = FakeDevice(), TokenMeter(tmp_path / "meter")
    values = {"max_num_seqs": 3, "max_num_drafts": 10}
    backend, layout = make_backend(model_dir, device, arena_bytes=1 << 20, **values)
    runner, eager = backend.make_runner(lambda key: None, meter, 0), []
    runner._forward = lambda shape, *_: eager.append(shape)
    for speculation in ("auto", "off"):
        config = make_config(model_dir=str(model_dir), max_num_seqs=3, speculation=speculation)
        model_config = DecoderConfig.parse(load_config(model_dir))
        arena = Arena(len(backend.slabs))
        found = _speculation(config, model_config, runner, layout, backend, arena)
        if speculation == "off":
            assert found._most_choices == 0
        else:
            assert [tokens for tokens, _ in found.estimate.curve.points] == [1, 2, 4, 8]
            assert (found._lag, found._most_choices) == (1, 13)
    assert eager == []
    assert TokenMeter.read(tmp_path / "meter")[:2] == (0, 0)


@pytest.mark.parametrize(
    ("capability", "values", "refusal"),
    [
        (75, {}, "least that is served"),
        (86, {"kv_cache_dtype": "fp8"}, "FP8 wants"),
        (80, {"quantization": "fp8"}, "FP8 wants"),
    ],
)
def test_a_gpu_that_cannot_is_refused_by_what_it_lacks(capability, values, refusal):
    with pytest.raises(UnsupportedModel, match=refusal):
        check_capability(capability, make_config(**values))
    check_capability(90, make_config(**values))


def test_a_model_that_is_too_wide_for_the_kernels_is_refused(model_dir):
    config = DecoderConfig.parse(load_config(model_dir))
    hidden_size = config.shape.hidden_size
    with pytest.raises(UnsupportedModel, match=f"hidden_size {hidden_size}: .* take device cpu"):
        check_width(config, most=hidden_size - 1)
    check_width(config, most=hidden_size)
