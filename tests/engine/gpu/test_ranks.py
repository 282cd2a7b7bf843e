"""A device's model on several ranks gives the tokens of one rank; all ranks do the same work."""

from dataclasses import replace
from functools import cache, cached_property, partial

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.gpu.backend import assemble, check_count
from engine.models.config import DecoderConfig
from engine.models.weights import ShardedWeights, StoredWeights, load_config
from engine.proofs.merged import scratch_bytes
from engine.steps.batch import Batch, Transfer
from engine.steps.measurement import DEVICE_SIZES, measure_steps, steps_of
from engine.steps.meter import TokenMeter
from lora.layout import Layout
from lora.packed import PackedForm
from lora.shard import Shard
from tests.engine.fakes import make_message, run_until_idle, tokens_of
from tests.engine.gpu.backends import fake_backend, make_config
from tests.engine.gpu.device_team import DeviceTeam, recording
from tests.engine.gpu.fake_device import TOTAL_BYTES, FakeDevice
from tests.engine.gpu.recording import RecordingKernels
from tests.engine.gpu.test_runner import make_params
from tests.engine.real_core import add_adapter, build_core
from tests.engine.replay_drafter import ReplayDrafter
from tests.engine.thread_ranks import ThreadRanks, on_all
from tests.soak import soak
from tests.tiny_models import save_adapter, save_model

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tied": False},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}
KINDS = [
    {"r": 4, "rank_pattern": {"v_proj": 19, "down_proj": 9}},
    {"r": 16, "use_rslora": True},
    {"r": 3, "target_modules": ["o_proj", "down_proj"]},
]


class World:
    """A model of a family, and adapters for it as objects by digest and as refs."""

    def __init__(self, folder, family):
        self.folder = folder
        self.model_dir = save_model(folder / "model", family=family, **HEADS | FAMILIES[family])
        self.objects = {}
        self.refs = [
            add_adapter(
                self.objects,
                self.model_dir,
                save_adapter(self.model_dir, folder / f"a{seed}", seed=seed, **kind),
                folder,
            )
            for seed, kind in enumerate(KINDS)
        ]

    def ask(self, core, count=16):
        """Run requests of all kinds on the base model and all adapters; return tokens by id."""
        for number in range(count):
            ref = [None, *self.refs][number % 4]
            grammar = ["", "quick"][number // 2 % 2]
            message = make_message(
                f"r{number}", prompt_len=5 + number, adapter=ref, grammar=grammar
            )
            params = replace(make_params(number), logprobs=None)
            core.handle("gw", replace(message, sampling_params=params, token_lease=14))
        return {name: tokens_of(own) for name, own in run_until_idle(core).items()}

    @cached_property
    def said_by_one(self):
        """Tokens of a single device, with which those of several ranks are compared."""
        folder = self.folder / "one"
        core = build_core(self.model_dir, folder, self.objects, make_backend=fake_backend)
        return self.ask(core)


@pytest.fixture(scope="module")
def world_of(tmp_path_factory):
    """A function that returns the world of a family, made once."""
    return cache(lambda family: World(tmp_path_factory.mktemp("ranked"), family))


@pytest.fixture(scope="module")
def llama(world_of):
    return world_of("llama")


def build_team(
    world,
    folder,
    size,
    make_device_kernels=recording,
    quantization=None,
    max_num_drafts=0,
    **options,
):
    """(core, team) of an engine on `size` ranks."""
    teams = []

    def make_team(*given):
        kernels = {"make_device_kernels": make_device_kernels}
        values = {"quantization": quantization, "max_num_drafts": max_num_drafts}
        teams.append(DeviceTeam(*given, **kernels, **values))
        return teams[0]

    options |= {"num_ranks": size, "make_team": make_team}
    core = build_core(world.model_dir, folder, world.objects, **options)
    return core, teams[0]


def asked_of_ranks(world, folder, size, count=16, **options):
    """Run requests on `size` ranks; return (tokens, core, team)."""
    core, team = build_team(world, folder, size, **options)
    tokens = world.ask(core, count)
    team.stop()
    return tokens, core, team


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("llama", 2),
        ("qwen3", 2),
        *soak(("mistral", 2), ("qwen2", 2), *((family, 4) for family in FAMILIES)),
    ],
)
def test_ranks_together_choose_what_one_chooses_though_the_last_token_is_still_pending(
    family, size, world_of, tmp_path
):
    world = world_of(family)
    tokens, _, _ = asked_of_ranks(world, tmp_path / "ranks", size)
    assert len(tokens) == 16
    assert tokens == world.said_by_one


def test_ranks_together_measure_their_steps_and_verify_drafts(llama, tmp_path):
    """Rows with drafts that choose nothing have the same shape on all ranks."""
    drafter = ReplayDrafter(llama.said_by_one, key=lambda request: request.request_id)
    options = {"max_num_drafts": 56, "drafter": drafter}
    core, team = build_team(llama, tmp_path / "ranks", 2, **options)
    curve = measure_steps(steps_of(core.runner), 16, 96, 64, 256, DEVICE_SIZES)
    assert [tokens for tokens, _ in curve.points][-1] == 64
    tokens = llama.ask(core, 12)
    team.stop()
    assert tokens == {name: llama.said_by_one[name] for name in tokens}
    assert core.scheduler.speculation.figures().accepted_tokens > 0


def test_only_the_first_rank_counts_and_has_a_head_and_logits(llama, tmp_path):
    _, _, team = asked_of_ranks(llama, tmp_path / "ranks", 2, count=4)
    first, other = (TokenMeter.read(team.folder / name)[:2] for name in ("meter", "meter-1"))
    assert all(first)
    assert other == (0, 0)
    assert [runner.model.lm_head is not None for runner in team.runners] == [True, False]
    assert [len(runner.out.logits) for runner in team.runners] == [8, 0]


def test_four_ranks_make_the_same_exchanges_in_the_same_order_and_choose_what_one_chooses(
    llama, tmp_path, monkeypatch
):
    made = {}

    def recorded(name):
        exchange = getattr(ThreadRanks, name)

        def noted(ranks, value):
            what = (name, tuple(value.shape), value.dtype) if name != "least" else (name,)
            made.setdefault(ranks.shard.index, []).append(what)
            return exchange(ranks, value)

        return noted

    for name in ("all_reduce", "broadcast", "least"):
        monkeypatch.setattr(ThreadRanks, name, recorded(name))
    tokens, _, _ = asked_of_ranks(llama, tmp_path / "ranks", 4, count=8)
    assert tokens == {name: llama.said_by_one[name] for name in tokens}
    assert len(tokens) == 8
    assert len(made) == 4
    assert all(own == made[0] for own in made.values())
    kinds = [what[0] for what in made[0]]
    assert kinds.count("least") == 2
    assert kinds.count("broadcast") > 14


def one_token(core, ref):
    core.handle("gw", make_message("r", max_tokens=1, adapter=ref))
    run_until_idle(core)


@pytest.mark.parametrize("has_adapter", [True, False])
def test_a_step_exchanges_two_sums_a_layer_and_its_flags(llama, tmp_path, has_adapter):
    core, team = build_team(llama, tmp_path / "ranks", 2)
    before = team.ranks[0].num_reduced
    one_token(core, llama.refs[0] if has_adapter else None)
    assert team.ranks[0].num_reduced - before == 2 * 2 + 1
    team.stop()


def test_fp8_over_two_ranks_loses_no_more_than_on_one(llama, tmp_path):
    """Weights that are cut along their inputs get a scale for each output and rank."""
    logits = []
    for number, quantization in enumerate([None, "fp8"]):
        make_backend = partial(fake_backend, quantization=quantization)
        folder = tmp_path / f"one {number}"
        core = build_core(llama.model_dir, folder, llama.objects, make_backend=make_backend)
        one_token(core, llama.refs[0])
        logits.append(core.runner.out.logits[0])
    core, team = build_team(llama, tmp_path / "two", 2, quantization="fp8")
    one_token(core, llama.refs[0])
    team.stop()
    exact, *rounded = *logits, team.runners[0].out.logits[0]
    lost = [(own - exact).square().mean().sqrt() for own in rounded]
    assert 0 < lost[1] < 1.25 * lost[0] < exact.std() / 2


# ---- values that are not finite ----


class NotFinite(RecordingKernels):
    """Kernels that make a key of one token infinite, in the first head of the last rank."""

    def __init__(self, device, ranks, token):
        super().__init__(device)
        self.is_last, self.token = ranks.shard.index == ranks.shard.size - 1, token

    def rope_store_kv(self, qkv, kv, *rest):
        if self.is_last and len(qkv) > self.token:
            dim = kv.shape[-1]
            num_heads = qkv.shape[1] // dim - 2 * kv.shape[2]
            qkv[self.token, num_heads * dim] = torch.inf
        super().rope_store_kv(qkv, kv, *rest)


@pytest.mark.parametrize("has_adapter", [True, False])
def test_what_is_not_finite_on_another_rank_fails_its_request_and_spoils_nobody(
    llama, tmp_path, has_adapter
):
    spoilt, spoilt_kv = run_two(llama, tmp_path / "spoilt", has_adapter, token=3)
    clean, _ = run_two(llama, tmp_path / "clean", has_adapter, token=10**6)
    assert spoilt["a"][-1].stop_cause == "engine_failure"
    assert spoilt["a"][-1].num_completion_tokens == 0
    assert clean["a"][-1].stop_cause == "max_tokens"
    assert tokens_of(spoilt["b"]) == tokens_of(clean["b"])
    assert all(kv.isfinite().all() for kv in spoilt_kv)


def run_two(world, folder, has_adapter, token):
    """Outputs of two requests that share a step, and the KV of both ranks afterwards."""
    core, team = build_team(world, folder, 2, lambda *rank: NotFinite(*rank, token))
    ref = world.refs[0] if has_adapter else None
    for name, length in (("a", 9), ("b", 12)):
        core.handle("gw", make_message(name, length, adapter=ref))
    outputs = run_until_idle(core)
    team.stop()
    return outputs, [runner.kv for runner in team.runners]


# ---- memory, and refusals ----


def test_the_arena_has_as_many_slabs_on_all_ranks_as_fit_on_the_fullest(llama, tmp_path):
    config = DecoderConfig.parse(load_config(llama.model_dir))
    form = PackedForm(Layout.of(config.shape, 4, num_shards=2), "float32", "base-1")
    slab_bytes = form.layout.slab_bytes

    def build(ranks):
        torch.set_num_threads(1)
        device = FakeDevice(eagerness=1.0)
        device.free_bytes = TOTAL_BYTES // 2 + (20 - 7 * ranks.shard.index) * slab_bytes
        if ranks.shard.index == 0:
            device.free_bytes += scratch_bytes(config)  # proofs take memory of the first rank only
        weights = ShardedWeights(StoredWeights(llama.model_dir, torch.float32), ranks.shard)
        engine = make_config(tmp_path, memory_utilization=0.5)
        kernels = RecordingKernels(device)
        return assemble(engine, config, form, weights, device, kernels, ranks)

    backends = on_all(ThreadRanks.group(2), build)
    assert [len(backend.slabs) for backend in backends] == [13, 13]


def test_too_few_devices_are_refused_by_number():
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size 4 wants as many CUDA devices"):
        check_count(2, Shard(1, 4))
    check_count(4, Shard(3, 4))
    check_count(1, Shard())


def test_a_step_that_only_copies_ends_on_the_first_rank_when_all_have_copied(llama, tmp_path):
    core, team = build_team(llama, tmp_path / "team", 2, num_swap_slots=4)
    for runner in team.runners:
        runner.arena[5] = 7
    before = team.ranks[0].num_reduced
    core.runner.launch(Batch(1, (), (Transfer(block_id=5, slot=2, is_out=True),)))
    core.runner.collect()
    assert team.ranks[0].num_reduced == before + 1
    assert all((runner.swap[2] == 7).all() for runner in team.runners)
    team.stop()
