"""A model shared by several ranks gives the results of one rank: every family, with adapters, and
with values that are not finite on one rank only.
"""

import threading

import pytest
import torch

from engine.cpu.inputs import InputBuilder
from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.models.weights import ShardedWeights, StoredWeights, load_config
from engine.steps.batch import Batch, ScheduledRow
from engine.wire.messages import SamplingParams
from kernels.cpu.plain import CpuKernels
from lora.batch import DeviceTables
from lora.layout import PROJECTIONS, Layout
from lora.packed import PackedForm
from lora.shard import Shard
from registry.base.base_model import BaseModel
from tests.cpu_decoder import make_decoder
from tests.engine.cpu_kernels import kernels_of
from tests.engine.models import test_decoder
from tests.engine.thread_ranks import ThreadRanks, on_all
from tests.tiny_models import (
    MIXTRAL,
    PARTIAL_ROPE,
    canonical_bytes,
    packed_adapter,
    save_adapter,
    save_model,
)

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES = test_decoder.FAMILIES | {
    "mistral": {"sliding_window": 24, "tied": False},
    "phi3": {"rope": PARTIAL_ROPE},
}
del FAMILIES["olmo2"]
PROMPTS = [[(7 * i * i + 3 * k) % 250 for i in range(33 + k)] for k in range(4)]
ALL = (0, 1, 2, 3)
NUM_SLABS = 96


class World:
    """A model of a family, and the canonical objects of three adapters on it."""

    def __init__(self, folder, family, **config):
        self.folder = folder
        values = HEADS | FAMILIES[family] | config
        self.model_dir = save_model(folder / "model", family=family, **values)
        self.config = DecoderConfig.parse(load_config(self.model_dir))
        base = BaseModel.load(self.model_dir, "tiny", folder / "cache")
        cut_by_inputs = ["o_proj"] if any(self.config.experts) else ["o_proj", "down_proj"]
        kinds = [
            {"r": 4, "rank_pattern": {".*v_proj": 19, cut_by_inputs[-1]: 9}},
            {"r": 16, "use_rslora": True},
            {"r": 3, "target_modules": cut_by_inputs},
        ]
        dirs = [
            save_adapter(self.model_dir, folder / str(seed), seed=seed, **kind)
            for seed, kind in enumerate(kinds)
        ]
        self.objects = [canonical_bytes(directory, base) for directory in dirs]

    @torch.inference_mode()
    def logits(self, size, make_kernels=CpuKernels, asked=ALL):
        """Logits and finite flags of the first of `size` ranks, for mixed steps of the requests
        `asked`.
        """
        if size == 1:
            weights = StoredWeights(self.model_dir, torch.float32)
            return self._run(None, weights, make_kernels, asked)
        self.ranks = ThreadRanks.group(size)
        return on_all(self.ranks, lambda ranks: self._run_rank(ranks, make_kernels, asked))[0]

    def _run_rank(self, ranks, make_kernels, asked):
        weights = ShardedWeights(StoredWeights(self.model_dir, torch.float32), ranks.shard)
        with torch.inference_mode():  # the mode is per thread
            return self._run(ranks, weights, make_kernels, asked)

    def _run(self, ranks, weights, make_kernels, asked):
        shard = ranks.shard if ranks else Shard()
        layout = Layout.of(self.config.shape, 4, num_shards=shard.size)
        form = PackedForm(layout, "float32", "base-1")
        model = make_decoder(self.config, weights, form, 128, make_kernels, ranks)
        arena = torch.zeros(NUM_SLABS, layout.slab_bytes, dtype=torch.uint8)
        tables = self._place(arena, form, shard)
        builder = InputBuilder(arena, form, lambda key: (0, tables[key]))
        found = []
        for batch in batches([tables[key].digest for key in sorted(tables)], asked):
            x, finite = model.hidden(builder.build(batch))
            found.append((model.lm_head(x) if model.lm_head else None, finite))
        return found

    def _place(self, arena, form, shard):
        tables, free = {}, list(range(16, NUM_SLABS))
        for number, data in enumerate(self.objects):
            folder = self.folder / f"packed-{shard.size}-{threading.get_ident()}"
            packed = packed_adapter(data, form, folder, shard)
            slabs = [free.pop() for _ in range(packed.num_slabs)]
            packed.copy_to(arena, slabs)
            tables[str(number)] = DeviceTables.of(packed, form.layout, slabs, arena)
        return tables


def batches(digests, asked):
    """Two steps of one request on the base model and one on each adapter, or those of `asked`.

    The first step has 32 tokens of each prompt, the second the rest.
    """
    for number, (start, end) in enumerate([(0, 32), (32, None)]):
        rows = []
        for k in asked:
            tokens = tuple(PROMPTS[k][start:end])
            key, digest = (None, None) if k == 0 else (str(k - 1), digests[k - 1])
            blocks = tuple(range(4 * k, 4 * k + 4))
            sampling = SamplingParams(max_tokens=1) if number or k % 2 else None
            rows.append(
                ScheduledRow(f"r{k}", tokens, start, blocks, key, digest, 0, sampling, 0, 0)
            )
        yield Batch(number, tuple(rows))


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("sharded"), request.param)


def assert_alike(found, expected):
    for (ours, finite), (theirs, _) in zip(found, expected, strict=True):
        assert finite.all()
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_say_what_the_model_says_alone(world, size):
    assert_alike(world.logits(size), world.logits(1))


def test_so_do_three_though_they_divide_neither_a_tiles_rows_nor_the_hidden_size(tmp_path):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    world = World(tmp_path, "qwen3", intermediate_size=162, **heads)
    assert world.config.shape.hidden_size % 3
    assert_alike(world.logits(3), world.logits(1))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_so_do_compiled_kernels_and_a_tokens_bits_are_the_same_beside_any_others(tmp_path, family):
    world, kernels = World(tmp_path, family), kernels_of("native")
    together = world.logits(2, kernels)
    assert_alike(together, world.logits(1))
    for asked in ALL:
        alone = world.logits(2, kernels, (asked,))
        assert torch.equal(alone[-1][0][0], together[-1][0][asked])


@pytest.mark.parametrize("world", ["llama", "qwen3_moe"], indirect=True)
@pytest.mark.parametrize("asked", [(0,), ALL], ids=["base", "adapters"])
def test_a_step_has_two_sums_a_layer_and_its_flags_with_adapters_and_without(world, asked):
    world.logits(2, asked=asked)
    num_steps, num_layers = 2, 2
    assert [ranks.num_reduced for ranks in world.ranks] == [num_steps * (2 * num_layers + 1)] * 2


class NotFiniteOnOneRank(CpuKernels):
    """Kernels whose attention is NaN for one token, in the last layer and one rank's heads."""

    def attention(self, qkv, layer, work, norms=None, window=None, rope=0):
        out = super().attention(qkv, layer, work, norms, window, rope)
        if layer == 1 and threading.current_thread().name.endswith("rank 1"):
            out[3] = torch.nan
        return out


def test_a_token_that_is_not_finite_in_another_ranks_heads_is_told_by_the_first(tmp_path):
    world = World(tmp_path, "llama")
    found = world.logits(2, NotFiniteOnOneRank)
    for _, finite in found:
        assert finite.tolist() == [i != 3 for i in range(len(finite))]


def test_ranks_that_cannot_have_equal_parts_are_refused_by_name(tmp_path):
    config = DecoderConfig.parse(load_config(save_model(tmp_path / "model")))
    with pytest.raises(UnsupportedModel, match=r"4 does not divide .* num_key_value_heads of 2"):
        config.shard(4)
    assert config.shard(2).shape.num_kv_heads == 1
    mixture = save_model(
        tmp_path / "mixture", family="mixtral", **MIXTRAL | {"intermediate_size": 95}
    )
    with pytest.raises(UnsupportedModel, match=r"2 does not divide .* width of experts of 95"):
        DecoderConfig.parse(load_config(mixture)).shard(2)


def test_norms_over_all_heads_are_refused_by_name_where_ranks_would_have_parts_of_them(tmp_path):
    config = DecoderConfig.parse(load_config(save_model(tmp_path / "model", family="olmo2")))
    assert config.shard(1).shape == config.shape
    with pytest.raises(UnsupportedModel, match=r"tensor_parallel_size 2 .* norms of q and k"):
        config.shard(2)


def test_every_rank_reads_its_part_of_a_projection_and_one_of_them_the_bias_of_a_sum(tmp_path):
    model_dir = save_model(tmp_path / "model", attention_bias=True, **HEADS)
    stored = StoredWeights(model_dir, torch.float32)
    shards = [ShardedWeights(stored, Shard(i, 4)) for i in range(4)]
    assert set(shards[0]) == set(stored)
    for name in stored:
        parts = [weights[name] for weights in shards]
        module = name.rpartition(".")[0].rpartition(".")[2]
        if module not in PROJECTIONS:
            assert all(torch.equal(part, stored[name]) for part in parts)
        elif name.endswith("o_proj.bias"):
            assert torch.equal(sum(parts), stored[name])
            assert not parts[1].any()
        else:
            dim = 1 if module in ("o_proj", "down_proj") else 0
            assert torch.equal(torch.cat(parts, dim=dim), stored[name])
