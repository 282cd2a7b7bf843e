"""Whole models of every family on the device, compared with the plain torch decoder on the CPU."""

import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from engine.batch import Batch
from engine.cpu.inputs import InputBuilder
from engine.models.config import DecoderConfig
from kernels.gpu import ops
from kernels.quantized import Rounding, Weight, quantize
from lora.batch import DeviceTables
from lora.host import PackedAdapter
from lora.packed import PackedForm
from tests.cpu_decoder import make_decoder
from tests.gpu.agreement import empty_memory_is_nan
from tests.gpu.models import (
    FAMILIES,
    VARIANTS,
    make_adapters,
    make_config,
    make_form,
    make_weights,
    pack_adapter,
)
from tests.gpu.setting import Check, Setting
from tests.gpu.stage import Stage, eager_stage

_ROUNDING = 1e-5
"""Share of the largest logit that float32 itself may lose."""
_MOST_DRAFTS = 7


def whole_model_checks(kernels: Any = ops) -> dict[str, Check]:
    checks = {f"models.{family}": _check(family, None, kernels) for family in FAMILIES}
    for name, family in (("quantized", "llama"), ("quantized_experts", "qwen3_moe")):
        checks[f"models.{name}"] = _check(family, Rounding(4, 32), kernels)
    return checks


class TorchModel:
    """The decoder of `engine.models` with an arena of its own, in host memory."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: dict[str, torch.Tensor],
        dtype: torch.dtype,
        num_slabs: int,
        max_model_len: int,
    ) -> None:
        self.form: PackedForm = make_form(config, dtype)
        in_dtype = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.model = make_decoder(config, in_dtype, self.form, max_model_len)
        size = self.form.layout.slab_bytes
        self.arena = torch.zeros(num_slabs, size, dtype=torch.uint8)
        self.adapters: dict[str, tuple[int, DeviceTables]] = {}
        self.inputs = InputBuilder(self.arena, self.form, self.adapters.__getitem__)

    def place(self, key: str, packed: PackedAdapter, slabs: list[int]) -> None:
        packed.copy_to(self.arena, slabs)
        tables = DeviceTables.of(packed, self.form.layout, slabs, self.arena)
        self.adapters[key] = 1, tables  # generation 1, because adapters are placed only once

    def run(self, batch: Batch) -> torch.Tensor:
        inputs = self.inputs.build(batch)
        with torch.inference_mode():
            logits, _ = self.model.forward(inputs)
        return logits.float()


def _check(family: str, rounding: Rounding | None, kernels: Any) -> Check:
    """Make a check of a model. rounding: that of its projections, and of the head in 8 bits."""

    def check(setting: Setting) -> None:
        losses = Losses()
        if setting.is_dry and kernels is ops and family in VARIANTS:
            setting = _short(setting)
        with tempfile.TemporaryDirectory() as folder:
            stage, exact, same_dtype, batches = _build(
                setting, family, rounding, kernels, Path(folder)
            )
            for batch in batches:
                # Padding is NaN in every layer, which the other tokens must not notice.
                with empty_memory_is_nan() if setting.is_dry else nullcontext():
                    _, logits = stage.run(batch)
                losses.note(batch, logits, same_dtype.run(batch), exact.run(batch))
        losses.check()

    return check


def _short(setting: Setting) -> Setting:
    """A dry setting for a family that differs from the others in a layer's formulas only.

    In float32 one step is enough; the errors of 16 bits would have to be averaged over many.
    """
    return replace(setting, dtypes=(torch.float32,), models=replace(setting.models, steps=1))


@dataclass
class Losses:
    """Distances of rows of logits from those in float32: ours, and torch's in our dtype.

    ours: by a description of the row.   largest: the largest of the float32 logits.
    """

    ours: dict[str, float] = field(default_factory=dict)
    torchs: list[float] = field(default_factory=list)
    largest: float = 0.0

    def note(
        self, batch: Batch, ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor
    ) -> None:
        """Add all logits of a step, [rows, vocab] each."""
        self.largest = max(self.largest, float(exact.abs().max()))
        places = [
            f"in step {batch.step}, row {number} of {len(batch.rows)}, {len(row.token_ids)} tokens "
            f"from {row.start} on, {drafts} of them drafts behind this, adapter {row.adapter_key}"
            for number, row in enumerate(batch.rows)
            for drafts in range(row.num_drafts, -1, -1)
        ]
        self.ours |= zip(places, _errors(ours, exact), strict=True)
        self.torchs += _errors(torchs, exact)

    def check(self) -> None:
        """Raise AssertionError if one of ours is further away than twice the worst of torch's."""
        allowed = 2 * max(self.torchs) + _ROUNDING * self.largest
        wrong = {place: lost for place, lost in self.ours.items() if not lost <= allowed}
        first = next(iter(wrong), None)
        assert first is None, (
            f"{len(wrong)} of {len(self.ours)} rows lose more than {allowed:.3g}; the first one is "
            f"{first}: {wrong[first]:.3g}"
        )


def _errors(logits: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Root mean square error of each row, over the whole vocabulary."""
    errors: list[float] = (logits - expected).square().mean(dim=-1).sqrt().tolist()
    return errors


def _build(
    setting: Setting, family: str, rounding: Rounding | None, kernels: Any, folder: Path
) -> tuple[Stage, TorchModel, TorchModel, Iterator[Batch]]:
    """(ours, torch in float32, torch in our dtype, steps for all of them)"""
    sizes, rng = setting.models, setting.rng(f"models {family}")
    config = make_config(family, sizes)
    dense = make_weights(config, setting.dtype, rng)
    weights = _quantized(dense, rounding) if rounding else dense
    dense = {n: w if isinstance(w, torch.Tensor) else w.dequantize() for n, w in weights.items()}
    adapters = make_adapters(sizes, config, setting.dtype, rng)
    chance = random.Random(setting.seed)
    per_row = make_form(config, setting.dtype).layout.num_blocks(sizes.max_model_len)
    num_slabs = (len(adapters) + 1) * per_row + 400
    free = chance.sample(range(num_slabs), num_slabs)
    torchs = [
        TorchModel(config, dense, dtype, num_slabs, sizes.max_model_len)
        for dtype in (torch.float32, setting.dtype)
    ]
    stage = eager_stage(
        folder, config, make_form(config, setting.dtype), weights, setting.device, kernels,
        num_slabs, max_num_drafts=_MOST_DRAFTS * (len(adapters) + 1),
        max_model_len=sizes.max_model_len, max_num_seqs=len(adapters) + 1,
        max_num_batched_tokens=(len(adapters) + 1) * sizes.max_model_len,
    )  # fmt: skip
    for number, data in enumerate(adapters):
        packed = [pack_adapter(data, model.form, folder) for model in (stage, *torchs)]
        slabs = [free.pop() for _ in range(max(own.num_slabs for own in packed))]
        for model, own in zip((stage, *torchs), packed, strict=True):
            model.place(f"a{number}", own, slabs[: own.num_slabs])
    return stage, *torchs, _batches(setting, stage, free, chance)


def _quantized(weights: Mapping[str, torch.Tensor], rounding: Rounding) -> dict[str, Weight]:
    """Quantise the projections, and the head in 8 bits; the rest stays as it is."""
    roundings = {"proj.weight": rounding, "lm_head.weight": Rounding(8)}

    def of(name: str, weight: torch.Tensor) -> Weight:
        own = next((r for end, r in roundings.items() if name.endswith(end)), None)
        return quantize(weight, own) if own else weight

    return {name: of(name, weight) for name, weight in weights.items()}


def _batches(
    setting: Setting, stage: Stage, free: list[int], chance: random.Random
) -> Iterator[Batch]:
    """Steps of chunks of prompts, of decodes, some with drafts, and of both, with a sequence of
    every adapter and one of the base model. All drafts are taken to be right.
    """
    sizes = setting.models
    keys = [None, *stage.adapters]
    tokens = [[chance.randrange(sizes.vocab) for _ in range(sizes.max_model_len)] for _ in keys]
    per_row = stage.form.layout.num_blocks(sizes.max_model_len)
    blocks = [[free.pop() for _ in range(per_row)] for _ in keys]
    ends = [0] * len(keys)
    for step in range(1, sizes.steps + 1):
        rows = []
        for number, key in enumerate(keys):
            most = (sizes.max_model_len - ends[number]) // (2 if step == 1 else 8)
            is_decode = step % 3 == 2 or chance.random() < 0.3
            drafts = min(chance.randint(-3, _MOST_DRAFTS), most - 1) if is_decode else 0
            drafts = max(drafts, 0)
            count = 1 + drafts if is_decode else chance.randint(1, max(1, most))
            start, ends[number] = ends[number], ends[number] + count
            own = tokens[number][start : ends[number]]
            row = stage.row(f"s{number}", own, start, blocks[number], key, num_drafts=drafts)
            rows.append(row)
        yield Batch(step, tuple(rows))
