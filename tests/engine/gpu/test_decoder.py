"""The device's decoder on the torch reference kernels gives the CPU decoder's results."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from engine.batch import Batch, ScheduledRow
from engine.cpu.inputs import InputBuilder
from engine.gpu import graphs
from engine.gpu.decoder import GpuDecoder, StepOutputs
from engine.gpu.graphs import StepGraphs
from engine.gpu.inputs import StepBuilder, StepLimits, StepShape
from engine.messages import SamplingParams
from engine.models.config import DecoderConfig
from engine.request import PENDING_TOKEN
from engine.weights import StoredWeights, load_config
from kernels import reference
from kernels.quantized import Rounding, quantize
from lora.batch import DeviceTables
from lora.layout import Layout
from lora.packed import PackedForm
from registry.base_model import BaseModel
from tests.cpu_decoder import make_decoder
from tests.engine.gpu.fake_device import FakeDevice
from tests.tiny_models import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    OLMO2,
    PHI3,
    canonical_bytes,
    packed_adapter,
    save_adapter,
    save_model,
)

CPU = torch.device("cpu")
NUM_SLABS = 64
LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, prefill_queries=8)
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tied": False},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "granite": GRANITE,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo2": OLMO2,
}


class World:
    """A tiny model on the device and on the CPU, each with an arena; adapters lie in both."""

    def __init__(
        self,
        folder,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        kernels=reference,
        limits=LIMITS,
        roundings=None,
        kv_scales=(),
        **options,
    ):
        model_dir = save_model(folder / "model", dtype=dtype, **options)
        self.config = DecoderConfig.parse(load_config(model_dir))
        self.layout = Layout.of(self.config.shape, dtype.itemsize, 32, kv_dtype.itemsize)
        self.form = PackedForm(self.layout, str(dtype).removeprefix("torch."), "base-1")
        self.arenas = torch.zeros(2, NUM_SLABS, self.layout.slab_bytes, dtype=torch.uint8)
        self.tables = {}
        self.free = list(range(NUM_SLABS))
        random.Random(1).shuffle(self.free)
        self._place(model_dir, folder, r=4, lora_alpha=16)
        self._place(model_dir, folder, r=20, use_rslora=True, target_modules=["v_proj", "o_proj"])
        self._place(model_dir, folder, rank_pattern={"layers.1.*up_proj": 17}, lora_alpha=16)
        weights = rounded(dict(StoredWeights(model_dir, dtype)), roundings or {})
        for layer, scales in enumerate(kv_scales):
            for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
                weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
        dense = {
            n: w if isinstance(w, torch.Tensor) else w.dequantize() for n, w in weights.items()
        }
        self.torch_model = make_decoder(self.config, dense, self.form, LIMITS.max_model_len)
        if kv_dtype == dtype:
            self.torch_inputs = InputBuilder(
                self.arenas[0], self.form, lambda key: (0, self.tables[key][0])
            )
        self.device = FakeDevice()
        self.model = GpuDecoder(self.config, weights, LIMITS.max_model_len, self.device, kernels)
        window = replace(limits, sliding_window=self.config.sliding_window)
        self.graphs = StepGraphs(limits)
        self.builder = StepBuilder(
            window, self.form, self.arenas[1], lambda key: (0, self.tables[key][1]),
            self.graphs.fit,
        )  # fmt: skip
        kv = self.arenas[1].view(kv_dtype)[:, : self.layout.kv_block_elems]
        self.kv = kv.unflatten(1, self.layout.kv_shape)
        self.ints = torch.full((self.builder.most_ints,), 10**6, dtype=torch.int32)
        self.out = StepOutputs(
            torch.zeros(limits.max_num_seqs, dtype=torch.int32),
            torch.zeros(limits.max_num_batched_tokens, dtype=torch.int32),
            torch.full((limits.max_num_seqs, self.config.vocab_size), torch.nan),
        )

    def _place(self, model_dir, folder, **spec):
        name = f"a{len(self.tables)}"
        adapter_dir = save_adapter(model_dir, folder / name, seed=len(self.tables), **spec)
        base = BaseModel.load(model_dir, "tiny", folder / "cache")
        packed = packed_adapter(canonical_bytes(adapter_dir, base), self.form, folder / "packed")
        slabs = [self.free.pop() for _ in range(packed.num_slabs)]
        tables = []
        for arena in self.arenas:
            packed.copy_to(arena, slabs)
            tables.append(DeviceTables.of(packed, self.layout, slabs, arena))
        self.tables[name] = tables

    def row(self, name, tokens, start, blocks, adapter=None, **fields):
        digest = self.tables[adapter][0].digest if adapter else None
        sampling = SamplingParams(max_tokens=1)
        return ScheduledRow(
            name, tuple(tokens), start, tuple(blocks), adapter, digest, 0, sampling, 0, 0, **fields
        )

    def torch_step(self, batch):
        inputs = self.torch_inputs.build(batch)
        return self.torch_model.forward(inputs)

    def step(self, batch, previous=None):
        """Run a step on the device: (logits of its rows, finite flags of its tokens, its plan)."""
        plan = self.builder.build(batch, self.ints.numpy(), previous or {})
        inputs = self.builder.views(plan.shape, self.ints)
        self.out.logits.fill_(torch.nan)
        self.device.submit(self.device.compute, lambda: self.model.run(inputs, self.kv, self.out))
        self.device.synchronize(self.device.record(self.device.compute))
        return self.out.logits[: len(plan.choosing)], self.out.finite[: batch.num_tokens], plan


def rounded(weights, roundings):
    """Quantise the weights whose names end with a key of `roundings`; that is how to round them."""
    forms = {n: r for end, r in roundings.items() for n in weights if n.endswith(end + ".weight")}
    return {n: quantize(w, forms[n]) if n in forms else w for n, w in weights.items()}


@pytest.fixture(autouse=True)
def inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def make_batches(world, chance):
    """Steps of four sequences on scattered blocks: prefills in chunks, decodes and both."""
    size, sequences = world.layout.block_size, []
    for number, adapter in enumerate([None, *world.tables]):
        blocks = [world.free.pop() for _ in range(-(-100 // size))]
        tokens = [chance.randrange(250) for _ in range(100)]
        sequences.append((f"s{number}", tokens, blocks, adapter))
    chunks = [[(0, 7), (0, 1), (0, 30), (0, 2)], [(7, 8), (1, 40), (30, 31), (2, 9)]]
    ends = [8, 40, 31, 9]
    for _ in range(10):
        lengths = [chance.choice([1, 1, 1, 3]) for _ in ends]
        chunks.append([(end, end + n) for end, n in zip(ends, lengths, strict=True)])
        ends = [end + n for end, n in zip(ends, lengths, strict=True)]
    for step, spans in enumerate(chunks, 1):
        rows = [
            world.row(name, tokens[a:b], a, blocks, adapter)
            for (name, tokens, blocks, adapter), (a, b) in zip(sequences, spans, strict=True)
        ]
        yield Batch(step, tuple(rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_gives_what_the_cpu_gives(tmp_path, family):
    world = World(tmp_path, family=family, **FAMILIES[family])
    shapes = set()
    for batch in make_batches(world, random.Random(2)):
        expected, _ = world.torch_step(batch)
        logits, finite, plan = world.step(batch)
        shapes.add(plan.shape)
        assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
        assert finite.all()
    kinds = {shape.num_prefill_items > 0 for shape in shapes}
    assert len(kinds) == 2, "some steps had prefills and some had not"


QUANTIZED = {
    "4 bits": dict.fromkeys(("proj",), Rounding(4, 32)),
    "8 bits and the head": dict.fromkeys(("proj", "lm_head"), Rounding(8)),
    "some projections": {"q_proj": Rounding(4, 32), "v_proj": Rounding(8), "up_proj": Rounding(8)},
}
"""Roundings by the ends of the names of weights; the other weights stay in float."""


@pytest.mark.parametrize("roundings", QUANTIZED.values(), ids=QUANTIZED)
def test_a_quantised_model_gives_what_its_dequantised_weights_give(tmp_path, roundings):
    world = World(tmp_path, roundings=roundings, **FAMILIES["llama"])
    for batch in make_batches(world, random.Random(2)):
        expected, _ = world.torch_step(batch)
        logits, finite, _ = world.step(batch)
        assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
        assert finite.all()


# ---- steps in the shape of a graph ----

COUNTS = {
    "a full graph": ([1, 15], 16),
    "one token over": ([1, 16], 32),
    "as many items as there is room for": ([2, 2, 8], 16),
    "one item over": ([2, 2, 2, 8], 32),
    "a token over the largest": ([1, 64], None),
    "an item over the largest": ([2] * 8 + [9, 9, 9], None),
    "prefills alone": ([7, 20], 32),
    "the largest": ([1] * 4 + [60], 64),
}
"""Tokens of each row, and tokens of the graph that fits the step or None. See `graph_world`."""


@pytest.fixture(scope="module")
def graph_world(tmp_path_factory):
    """Graphs of 16, 32, 48 and 64 tokens with room for 3, 5, 7 and 9 prefill items."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(graphs, "_MIXED_TOKENS", 16)
        patch.setattr(graphs, "_SPARE_PREFILL_ITEMS", 1)
        patch.setattr(graphs, "_MOST_MIXED_TOKENS", 64)
        limits = replace(LIMITS, max_num_seqs=12, max_num_batched_tokens=96)
        world = World(tmp_path_factory.mktemp("graphs"), limits=limits)
        captured = {s: world.builder.views(s, world.ints) for s in world.graphs.shapes()}
        yield world, captured


def make_mixed(world, counts):
    """A row of each count of tokens, at position 3; rows use no adapter or one of all adapters."""
    keys = sorted(n % 4 for n in range(len(counts)))
    rows, free = [], list(world.free)
    for number, (count, key) in enumerate(zip(counts, keys, strict=True)):
        adapter = f"a{key - 1}" if key else None
        tokens = [(7 * number + i) % 250 for i in range(count)]
        blocks = [free.pop() for _ in range(world.layout.num_blocks(3 + count))]
        rows.append(world.row(f"r{number}", tokens, 3, blocks, adapter))
    return Batch(1, tuple(rows))


class RowByRow(TorchFunctionMode):
    """Computes products row by row, since torch's order of sums depends on the number of rows."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.matmul, linear):
            return torch.cat([func(row, *args[1:]) for row in args[0].split(1)])
        return func(*args, **(kwargs or {}))


def run_with(world, batch, fit, captured):
    """Run a step padded by `fit` on fixed KV: (logits of its rows, KV, shape).

    captured: views by shape, made while the ints had other values.
    """
    rng = torch.Generator().manual_seed(1)
    world.kv[world.free] = torch.randn(len(world.free), *world.kv.shape[1:], generator=rng)
    world.ints.fill_(10**6)
    world.builder.fit = fit
    plan = world.builder.build(batch, world.ints.numpy(), {})
    inputs = captured.get(plan.shape) or world.builder.views(plan.shape, world.ints)
    work = partial(world.model.run, inputs, world.kv, world.out)
    with RowByRow():
        world.device.submit(world.device.compute, work)
        world.device.synchronize(world.device.record(world.device.compute))
    return world.out.logits[: len(batch.rows)].clone(), world.kv.clone(), plan.shape


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
    world, captured = graph_world
    batch = make_mixed(world, counts)
    expected, kv, own = run_with(world, batch, lambda shape: shape, {})
    logits, graph_kv, shape = run_with(world, batch, world.graphs.fit, captured)
    if tokens != "any":
        assert (shape in captured) == (tokens is not None)
        assert shape == own if tokens is None else shape.num_tokens == tokens
    assert torch.equal(logits, expected)
    assert torch.equal(graph_kv, kv)


def test_a_row_has_the_same_bits_in_a_graph_whoever_is_beside_it(graph_world):
    world, captured = graph_world
    batch = make_mixed(world, [1, 1, 9, 2, 16, 1, 8])
    together, _, shape = run_with(world, batch, world.graphs.fit, captured)
    for number, row in enumerate(batch.rows):
        alone, _, _ = run_with(world, Batch(1, (row,)), lambda _, to=shape: to, captured)
        assert torch.equal(alone[0], together[number]), number


def test_a_pending_token_is_read_where_the_step_before_chose_it(tmp_path):
    world = World(tmp_path)
    blocks = [world.free.pop() for _ in range(3)]
    world.step(Batch(1, (world.row("a", [1, 2, 3], 0, blocks, "a0"),)))
    known, _, _ = world.step(Batch(2, (world.row("a", [77], 3, blocks, "a0"),)))
    known = known.clone()
    world.out.tokens[:4] = torch.tensor([5, 6, 77, 8])
    row = world.row("a", [PENDING_TOKEN], 3, blocks, "a0")
    pending, _, _ = world.step(Batch(2, (row,)), {("a", 0): 2})
    assert torch.equal(pending, known)
    world.out.tokens[2] = -1
    _, finite, _ = world.step(Batch(2, (row,)), {("a", 0): 2})
    assert finite.all(), "a failed row's -1 does not make the next step fail"


def test_a_row_that_is_not_finite_says_so_and_spoils_nobody(tmp_path):
    world = World(tmp_path, tied=False)
    world.model.embedding[13] = torch.inf
    mine, other = ([world.free.pop() for _ in range(2)] for _ in range(2))
    rows = (world.row("a", [1, 13, 2], 0, mine), world.row("b", [5, 6], 0, other, "a1"))
    logits, finite, _ = world.step(Batch(1, rows))
    assert finite.tolist() == [1, 0, 1, 1, 1] or finite.tolist() == [1, 0, 0, 1, 1]
    assert logits[1].isfinite().all()
    assert world.kv.isfinite().all()


def test_what_is_not_finite_only_after_the_last_layer_is_told_too(tmp_path):
    world = World(tmp_path)
    world.model.layers[-1].down.weight[3] = torch.inf
    _, finite, _ = world.step(Batch(1, (world.row("a", [1, 2, 5], 0, [world.free.pop()]),)))
    assert finite.tolist() == [0, 0, 0]


def test_padding_rows_write_nothing_and_change_nothing(tmp_path):
    world = World(tmp_path)
    blocks = [[world.free.pop() for _ in range(2)] for _ in range(3)]
    for number, own in enumerate(blocks):
        world.step(Batch(1, (world.row(f"s{number}", [3, 1, 4, 1, 5], 0, own, "a2"),)))
    before = world.arenas[1].clone()
    rows = tuple(world.row(f"s{n}", [9], 5, own, "a2") for n, own in enumerate(blocks))
    logits, _, plan = world.step(Batch(2, rows))
    assert plan.shape == StepShape.of_decodes(4, has_lora=True), "one row is padding"
    changed = (world.arenas[1] != before).any(dim=1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted({own[5 // world.layout.block_size] for own in blocks})
    assert (logits - logits[0]).abs().max() < 1e-5


def test_an_empty_step_of_a_shape_touches_no_slab(tmp_path):
    world = World(tmp_path)
    before = world.arenas[1].clone()
    for has_lora in (True, False):
        shape = StepShape.of_decodes(4, has_lora)
        world.builder.build_empty(shape, world.ints.numpy())
        world.model.run(world.builder.views(shape, world.ints), world.kv, world.out)
    assert torch.equal(world.arenas[1], before)


@pytest.mark.parametrize(("adapter_start", "applied"), [(0, True), (4, True), (9, False)])
def test_an_activated_lora_applies_from_its_start(tmp_path, adapter_start, applied):
    world = World(tmp_path)
    blocks = [world.free.pop() for _ in range(2)]
    tokens = [9, 8, 7, 6, 5, 4, 3]
    batch = Batch(
        1,
        (
            world.row("b", [1, 2], 0, [world.free.pop()]),
            world.row("a", tokens, 0, blocks, "a0", adapter_start=adapter_start),
        ),
    )
    expected, _ = world.torch_step(batch)
    logits, _, plan = world.step(batch)
    assert bool(plan.adapter_digests) == applied
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()


def test_another_adapter_in_the_arena_is_refused(tmp_path):
    world = World(tmp_path)
    row = world.row("a", [1], 0, [0], "a0")._replace(adapter_digest="other")
    with pytest.raises(AssertionError, match="another adapter lies in the arena"):
        world.step(Batch(1, (row,)))


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
    rounded = World(tmp_path / "rounded", kernels=Rounding(scales))
    narrow = World(tmp_path / "narrow", kv_dtype=reference.FP8, kv_scales=scales)
    assert narrow.layout.kv_bytes_per_token < rounded.layout.kv_bytes_per_token
    batches = zip(
        make_batches(rounded, random.Random(2)), make_batches(narrow, random.Random(2)), strict=True
    )
    for wide_batch, narrow_batch in batches:
        expected, _, _ = rounded.step(wide_batch)
        logits, finite, _ = narrow.step(narrow_batch)
        assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
        assert finite.all()
