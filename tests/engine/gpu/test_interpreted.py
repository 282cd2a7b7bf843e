"""The device's decoder with the GPU's kernels in Triton's interpreter equals the references."""

import random
from dataclasses import replace

import pytest
import torch

from engine.batch import Batch
from kernels import reference
from kernels.gpu import ops
from tests.engine.gpu.fake_device import FakeDevice
from tests.gpu.models import make_adapters, make_config, make_form, make_weights, pack_adapter
from tests.gpu.setting import MODELS_DRY
from tests.gpu.stage import eager_stage
from tests.soak import soak

SIZES = replace(MODELS_DRY, layers=2, max_model_len=48)
NUM_SLABS = 60
SPANS = [
    [(0, 9), (0, 1), (0, 5)],
    [(9, 10), (1, 2), (5, 6)],
    [(10, 11), (2, 20), (6, 7)],
    [(11, 14), (20, 28), (7, 8)],
    [(14, 16), (28, 32), (8, 17)],
]
"""Positions of three rows (base model, adapters of ranks 3 and 20) in steps of prefills, of
decodes, of both, of drafts, and of drafts beside a prefill."""
NUM_DRAFTS = [(0, 0, 0), (0, 0, 0), (0, 0, 0), (2, 7, 0), (1, 3, 0)]


@pytest.fixture(autouse=True)
def empty_memory_is_nan():
    """Empty memory is filled with NaN: padding is NaN in every layer, other tokens must not be."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", ["qwen3", *soak("llama")])
def test_every_step_gives_what_the_references_give(tmp_path, family):
    rng = torch.Generator().manual_seed(1)
    config = make_config(family, SIZES)
    weights = make_weights(config, torch.float32, rng)
    form = make_form(config, torch.float32)
    objects = make_adapters(SIZES, config, torch.float32, rng)[:2]
    limits = {"max_model_len": 48, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    stages = []
    for kernels in (ops, reference):
        folder = tmp_path / kernels.__name__
        folder.mkdir()
        own = config, form, weights, FakeDevice(), kernels, NUM_SLABS
        stages.append(eager_stage(folder, *own, max_num_drafts=9, **limits))
    chance = random.Random(1)
    free = chance.sample(range(NUM_SLABS), NUM_SLABS)
    for key, data in zip(("a", "b"), objects, strict=True):
        packed = pack_adapter(data, form, tmp_path)
        slabs = [free.pop() for _ in range(packed.num_slabs)]
        for stage in stages:
            stage.place(key, packed, slabs)
    blocks = [[free.pop() for _ in range(form.layout.num_blocks(48))] for _ in SPANS[0]]
    for step, spans in enumerate(SPANS, 1):
        tokens = [[chance.randrange(SIZES.vocab) for _ in range(a, b)] for a, b in spans]
        results = []
        for stage in stages:
            rows = (
                stage.row(f"r{i}", tokens[i], spans[i][0], blocks[i], key, num_drafts=num)
                for i, (key, num) in enumerate(
                    zip((None, "a", "b"), NUM_DRAFTS[step - 1], strict=True)
                )
            )
            results.append(stage.run(Batch(step, tuple(rows))))
        (chosen, logits), (expected_tokens, expected) = results
        assert chosen == expected_tokens
        assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
