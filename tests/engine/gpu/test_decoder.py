"""The device's decoder on the torch reference kernels gives the CPU decoder's results."""

import random
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from engine.gpu import graphs
from engine.steps.batch import Batch
from kernels import reference
from lora.layout import Layout
from lora.packed import PackedForm
from tests.engine.gpu.fake_device import FakeDevice
from tests.gpu.models import BASE_REVISION
from tests.gpu.setting import MODELS_DRY, dry
from tests.gpu.stage import eager_stage
from tests.gpu.whole_model import Losses, Script, whole_model_checks

SIZES = replace(MODELS_DRY, layers=2, steps=12, max_model_len=128)
SETTING = replace(dry(seed=0), dtypes=(torch.float32,), models=SIZES)
CHECKS = whole_model_checks(reference)
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": SIZES.max_model_len}


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", CHECKS)
def test_every_step_gives_what_the_cpu_gives(name):
    CHECKS[name](SETTING)


def test_a_model_that_is_wrong_everywhere_is_not_excused_by_one_bad_row_of_torchs():
    losses = Losses({str(row): 1.0 for row in range(9)}, [*8 * [0.1], 1.0], largest=1.0)
    with pytest.raises(AssertionError, match=r"half of all rows lose 1 and more, and 0\.1 of"):
        losses.check()


class World:
    """A tiny model on a device with adapters a0, a1, .. in its arena.   free: slabs of rows.

    weights: of the model, where they are not the usual ones.
    """

    def __init__(self, folder, kernels=reference, weights=None, kv_dtype=torch.float32, **limits):
        self.script = script = Script(SETTING, "llama")
        self.layout = Layout.of(script.config.shape, 4, 32, kv_dtype.itemsize)
        form = PackedForm(self.layout, "float32", BASE_REVISION)
        self.stage = eager_stage(
            folder, script.config, form, script.weights | (weights or {}), FakeDevice(), kernels,
            script.num_slabs, kv_dtype=kv_dtype, **LIMITS | limits,
        )  # fmt: skip
        script.place(self.stage, folder)
        self.runner = self.stage.runner
        self.free = [slab for own in script.blocks for slab in own]

    def take(self, count):
        return [self.free.pop() for _ in range(count)]

    def row(self, name, tokens, start, blocks, key=None, **fields):
        return self.stage.row(name, tokens, start, blocks, key, **fields)

    def step(self, *rows):
        """Run a step: (logits of its rows, finite flags of its tokens)."""
        batch = Batch(1, rows)
        _, logits = self.stage.run(batch)
        return logits, self.runner.out.finite[: batch.num_tokens].tolist()


# ---- steps in the shape of a graph ----

COUNTS = {
    "a full graph": ([1, 15], 16),
    "one token over": ([1, 16], 32),
    "as many items as there is room for": ([2, 8], 16),
    "one item over": ([2, 2, 8], 32),
    "a token over the largest": ([1, 64], None),
    "an item over the largest": ([2] * 5 + [9], None),
    "prefills alone": ([7, 20], 32),
    "the largest": ([1] * 4 + [60], 64),
}
"""Tokens of each row, and tokens of the graph that fits the step or None. See `graph_world`."""


@pytest.fixture(scope="module")
def graph_world(tmp_path_factory):
    """Graphs of 16, 32, 48 and 64 tokens with room for 2, 3, 4 and 5 prefill items."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(graphs, "_MIXED_TOKENS", 16)
        patch.setattr(graphs, "_SPARE_PREFILL_ITEMS", 1)
        patch.setattr(graphs, "_MOST_MIXED_TOKENS", 64)
        folder = tmp_path_factory.mktemp("graphs")
        world = World(folder, max_num_seqs=12, max_num_batched_tokens=96)
        world.runner.capture_graphs()
        yield world


def make_mixed(world, counts):
    """A row of each count of tokens, at position 3; rows use no adapter or one of all adapters."""
    keys = sorted(n % 4 for n in range(len(counts)))
    rows, free = [], list(world.free)
    for number, (count, key) in enumerate(zip(counts, keys, strict=True)):
        adapter = f"a{key - 1}" if key else None
        tokens = [(7 * number + i) % SIZES.vocab for i in range(count)]
        blocks = [free.pop() for _ in range(world.layout.num_blocks(3 + count))]
        rows.append(world.row(f"r{number}", tokens, 3, blocks, adapter))
    return Batch(1, tuple(rows))


class RowByRow(TorchFunctionMode):
    """Computes products row by row, since torch's order of sums depends on the number of rows."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.matmul, linear):
            return torch.cat([func(row, *args[1:]) for row in args[0].split(1)])
        return func(*args, **(kwargs or {}))


def run_with(world, batch, fit=None):
    """Run a step on fixed KV in the shape to which it is padded by `fit`, or by the runner: (logits
    of its rows, KV, shape).
    """
    runner = world.runner
    rng = torch.Generator().manual_seed(1)
    runner.kv[world.free] = torch.randn(len(world.free), *runner.kv.shape[1:], generator=rng)
    runner.builder.fit = fit or runner.graphs.fit
    ints = torch.zeros(runner.builder.most_ints, dtype=torch.int32)
    shape = runner.builder.build(batch, ints.numpy(), {}).shape
    with RowByRow():
        _, logits = world.stage.run(batch)
    return logits, runner.kv.clone(), shape


def random_counts(seed):
    chance = random.Random(seed)
    return [chance.choice([1, 1, 1, 2, 5, 8, 9, 20]) for _ in range(chance.randrange(2, 9))]


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [*COUNTS.values(), *((random_counts(seed), "any") for seed in range(8))],
    ids=[*COUNTS, *map(str, range(8))],
)
def test_a_step_has_in_the_shape_of_a_graph_the_bits_that_it_has_in_its_own(
    graph_world, counts, tokens
):
    find = graph_world.runner.graphs.find
    batch = make_mixed(graph_world, counts)
    expected, kv, own = run_with(graph_world, batch, lambda shape: shape)
    logits, graph_kv, shape = run_with(graph_world, batch)
    assert find(own) is None, "it was launched kernel by kernel"
    if tokens != "any":
        assert (find(shape) is not None) == (tokens is not None)
        assert shape == own if tokens is None else shape.num_tokens == tokens
    assert torch.equal(logits, expected)
    assert torch.equal(graph_kv, kv)


def test_a_row_has_the_same_bits_in_a_graph_whoever_is_beside_it(graph_world):
    batch = make_mixed(graph_world, [1, 1, 9, 2, 16, 1, 8])
    together, _, shape = run_with(graph_world, batch)
    assert graph_world.runner.graphs.find(shape)
    for number, row in enumerate(batch.rows):
        alone, _, _ = run_with(graph_world, Batch(1, (row,)), lambda _: shape)
        assert torch.equal(alone[0], together[number]), number


# ---- special rows ----


def test_a_row_that_is_not_finite_says_so_and_spoils_nobody(tmp_path):
    embedding = Script(SETTING, "llama").weights["model.embed_tokens.weight"]
    embedding[13] = torch.inf
    world = World(tmp_path, weights={"model.embed_tokens.weight": embedding})
    mine, other = world.take(2), world.take(2)
    rows = world.row("a", [1, 13, 2], 0, mine), world.row("b", [5, 6], 0, other, "a1")
    logits, finite = world.step(*rows)
    assert finite in ([1, 0, 1, 1, 1], [1, 0, 0, 1, 1])
    assert logits[1].isfinite().all()
    assert world.runner.kv.isfinite().all()


def test_what_is_not_finite_only_after_the_last_layer_is_told_too(tmp_path):
    down = torch.ones(SIZES.hidden, SIZES.intermediate)
    down[3] = torch.inf
    world = World(tmp_path, weights={"model.layers.1.mlp.down_proj.weight": down})
    assert world.step(world.row("a", [1, 2, 5], 0, world.take(1)))[1] == [0, 0, 0]


def test_steps_of_padding_which_graphs_are_captured_with_touch_no_slab(tmp_path):
    world = World(tmp_path)
    before = world.stage.arena.clone()
    world.runner.capture_graphs()
    assert torch.equal(world.stage.arena, before)


@pytest.mark.parametrize(("start", "applied"), [(0, True), (4, True), (9, False)])
def test_an_activated_lora_applies_from_its_start(tmp_path, start, applied):
    world = World(tmp_path)
    batch = Batch(
        1,
        (
            world.row("b", [1, 2], 0, world.take(1)),
            world.row("a", [9, 8, 7, 6, 5, 4, 3], 0, world.take(2), "a0", adapter_start=start),
        ),
    )
    found, logits = world.stage.run(batch)
    assert bool(found.adapter_digests) == applied
    expected = world.script.torch_model(torch.float32, tmp_path).run(batch)
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()


def test_another_adapter_in_the_arena_is_refused(tmp_path):
    world = World(tmp_path)
    row = world.row("a", [1], 0, [0], "a0")._replace(adapter_digest="other")
    with pytest.raises(AssertionError, match="another adapter lies in the arena"):
        world.step(row)


class Rounding:
    """The reference kernels with a float32 cache whose values are rounded to e4m3.

    scales: what 1 in e4m3 stands for by layer, of k and of v.
    """

    def __init__(self, scales):
        self.scales = scales
        self.calls = 0

    def __getattr__(self, name):
        return getattr(reference, name)

    def rope_store_kv(self, qkv, kv, cos, sin, positions, slots, *rest):
        reference.rope_store_kv(qkv, kv, cos, sin, positions, slots, *rest)
        scales = torch.tensor(self.scales[self.calls % len(self.scales)]).view(2, 1, 1, 1)
        self.calls += 1
        stored = slots[slots >= 0]
        blocks, offsets = stored // kv.shape[3], stored % kv.shape[3]
        written = kv.permute(0, 3, 1, 2, 4)
        new = written[blocks, offsets] / scales[..., 0]
        written[blocks, offsets] = new.clamp(-448, 448).to(reference.FP8).float() * scales[..., 0]


@pytest.mark.parametrize("scales", [[(1.0, 1.0)] * 2, [(0.013, 0.4), (0.3, 1.0)]])
def test_kv_in_fp8_is_kv_rounded_to_it_by_the_scales_of_its_layer(tmp_path, scales):
    weights = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([scale])
        for layer, own in enumerate(scales)
        for name, scale in zip(("k_scale", "v_scale"), own, strict=True)
    }
    worlds = []
    for name, options in {
        "rounded": {"kernels": Rounding(scales)},
        "narrow": {"kv_dtype": reference.FP8, "weights": weights},
    }.items():
        (tmp_path / name).mkdir()
        worlds.append(World(tmp_path / name, **options))
    blocks = [[world.take(4) for _ in range(2)] for world in worlds]
    ends, tokens = [0, 0], [[(7 * i + n) % SIZES.vocab for i in range(60)] for n in range(2)]
    for counts in [(9, 1), (1, 20), (1, 1), (3, 1)]:
        results = []
        for world, own in zip(worlds, blocks, strict=True):
            rows = (
                world.row(f"s{n}", tokens[n][ends[n] :][:count], ends[n], own[n], (None, "a1")[n])
                for n, count in enumerate(counts)
            )
            results.append(world.step(*rows))
        (expected, _), (logits, finite) = results
        assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
        assert all(finite)
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
