"""The largest steps leave room for the arena: every slab of it can be used beside them."""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.gpu.backend import assemble
from engine.steps.batch import Batch
from engine.steps.meter import TokenMeter
from kernels.gpu import ops
from lora.host import PackedAdapter
from tests.gpu.models import (
    make_adapter,
    make_config,
    make_form,
    make_weights,
    pack_adapter,
)
from tests.gpu.setting import Check, Setting
from tests.gpu.stage import Stage, make_engine_config
from tests.gpu.trials.trial import is_same

_KEY = "the largest"


def memory_checks() -> dict[str, Check]:
    return {"memory.arena": _check}


def _check(setting: Setting) -> None:
    sizes, rng = setting.models, setting.rng("memory")
    config = make_config("llama", sizes)
    form = make_form(config, setting.dtype)
    weights = make_weights(config, setting.dtype, rng)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine_config = make_engine_config(
            folder, config, form, max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.most_rows, max_num_batched_tokens=sizes.most_tokens,
        )  # fmt: skip
        backend = assemble(engine_config, config, form, weights, setting.device, ops)
        meter = TokenMeter(folder / "meter")
        stage = Stage(form, backend.slabs, lambda tables: backend.make_runner(tables, meter, 0))
        data = make_adapter(config.shape, sizes.most_rank, setting.dtype, rng)
        packed = pack_adapter(data, form, folder)
        num_slabs = len(backend.slabs)
        assert num_slabs >= 2 * packed.num_slabs, f"only {num_slabs} slabs are left"
        order = list(range(num_slabs))
        first = _run(setting, stage, packed, order)
        last = _run(setting, stage, packed, order[::-1])
    for near, far in zip(first, last, strict=True):
        assert near.isfinite().all(), "logits are not finite"
        assert is_same(near, far), "the arena's last slabs give other bits than its first ones"


def _run(
    setting: Setting, stage: Stage, packed: PackedAdapter, slabs: Sequence[int]
) -> list[torch.Tensor]:
    """Logits of a step with the most tokens and of a step with the most rows, all with the adapter;
    everything lies in the first of `slabs`.
    """
    sizes, chance = setting.models, random.Random(setting.seed)
    layout = stage.form.layout
    stage.place(_KEY, packed, list(slabs[: packed.num_slabs]))
    free = iter(slabs[packed.num_slabs :])
    prompts = sizes.most_tokens // sizes.max_model_len
    shapes = [[sizes.max_model_len] * prompts, [1] * sizes.most_rows]
    logits = []
    for step, lengths in enumerate(shapes, 1):
        rows = []
        for number, length in enumerate(lengths):
            tokens = [chance.randrange(sizes.vocab) for _ in range(length)]
            blocks = [next(free) for _ in range(layout.num_blocks(length))]
            rows.append(stage.row(f"{step}.{number}", tokens, 0, blocks, _KEY))
        logits.append(stage.run(Batch(step, tuple(rows)))[1])
    return logits
