"""Whole models of every family on the device, compared with the plain torch decoder on the CPU."""

import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.cpu.inputs import InputBuilder
from engine.models.config import DecoderConfig
from engine.models.ranks import Ranks
from engine.steps.batch import Batch
from kernels.gpu import ops
from kernels.quantized import Rounding, Weight, as_numbers, quantize
from lora.batch import DeviceTables
from lora.host import PackedAdapter
from lora.packed import PackedForm
from lora.shard import WHOLE, Shard
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
from tests.gpu.stage import Stage, eager_stage, make_row

_ROUNDING = 1e-5
"""Share of the largest logit that float32 itself may lose."""
_MOST_DRAFTS = 7
_ADAPTER_SLABS = 40
"""Slabs for each adapter, more than any of them takes, however it is packed."""


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
        if setting.is_dry and kernels is ops and family in VARIANTS:
            setting = _short(setting)
        with tempfile.TemporaryDirectory() as name:
            folder, script = Path(name), Script(setting, family, rounding)
            form = make_form(script.config, setting.dtype)
            stage = script.stage(folder, form, script.weights, kernels)
            script.compare(lambda batch: _run(setting, stage, batch), folder)

    return check


def _run(setting: Setting, stage: Stage, batch: Batch) -> torch.Tensor:
    """Logits of a step, whose tokens must be the likeliest ones behind the drafts that are so."""
    # Padding is NaN in every layer, which the other tokens must not notice.
    with empty_memory_is_nan() if setting.is_dry else nullcontext():
        tokens, logits = stage.run(batch)
    likeliest = iter(logits.argmax(dim=-1).tolist())
    for number, row in enumerate(batch.rows):
        own = [next(likeliest) for _ in range(1 + row.num_drafts)]
        is_right = [draft == one for draft, one in zip(row.draft_token_ids, own, strict=False)]
        accepted = [*is_right, False].index(False)
        found = tokens.token_ids[number], tokens.num_accepted.get(number, 0)
        assert found == (own[accepted], accepted), f"row {number} of step {batch.step}"
    return logits


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
        """Raise AssertionError if one of ours is further away than twice the worst of torch's, or
        the median of ours than twice the median of torch's.

        In a mixture rounding may choose another expert, so that the worst of torch's says little.
        """
        ours, torchs = median(self.ours.values()), median(self.torchs)
        assert ours <= 2 * torchs + _ROUNDING * self.largest, (
            f"half of all rows lose {ours:.3g} and more, and {torchs:.3g} of torch's"
        )
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


class Script:
    """A model, its adapters, and steps for them, which depend on the setting and its seed only.

    rounding: see _check.   slabs: for each adapter, enough however it is packed.   blocks: for each
    sequence, the base model's first.
    """

    def __init__(self, setting: Setting, family: str, rounding: Rounding | None = None) -> None:
        self.setting, self.sizes = setting, setting.models
        rng, dtype = setting.rng(f"models {family}"), setting.dtype
        self.config = make_config(family, self.sizes)
        self.weights: dict[str, Weight] = dict(make_weights(self.config, dtype, rng))
        if rounding:
            self.weights = _quantized(self.weights, rounding)
        self.adapters = make_adapters(self.sizes, self.config, dtype, rng)
        per_row = make_form(self.config, dtype).layout.num_blocks(self.sizes.max_model_len)
        num_rows = len(self.adapters) + 1
        self.num_slabs = num_rows * per_row + len(self.adapters) * _ADAPTER_SLABS
        slabs = iter(random.Random(setting.seed).sample(range(self.num_slabs), self.num_slabs))
        self.slabs = [[next(slabs) for _ in range(_ADAPTER_SLABS)] for _ in self.adapters]
        self.blocks = [[next(slabs) for _ in range(per_row)] for _ in range(num_rows)]

    def stage(
        self,
        folder: Path,
        form: PackedForm,
        weights: Mapping[str, Weight],
        kernels: Any = ops,
        ranks: Ranks | None = None,
    ) -> Stage:
        """Make the model on the setting's device, with its adapters."""
        longest, num_rows = self.sizes.max_model_len, len(self.blocks)
        stage = eager_stage(
            folder, self.config, form, weights, self.setting.device, kernels, self.num_slabs,
            ranks, max_num_drafts=_MOST_DRAFTS * num_rows, max_model_len=longest,
            max_num_seqs=num_rows, max_num_batched_tokens=num_rows * longest,
        )  # fmt: skip
        self.place(stage, folder, ranks.shard if ranks else WHOLE)
        return stage

    def torch_model(self, dtype: torch.dtype, folder: Path) -> "TorchModel":
        """Make the model of torch, with its adapters."""
        numbers = {name: as_numbers(weight) for name, weight in self.weights.items()}
        longest = self.sizes.max_model_len
        model = TorchModel(self.config, numbers, dtype, self.num_slabs, longest)
        self.place(model, folder)
        return model

    def compare(self, run: Callable[[Batch], torch.Tensor], folder: Path) -> None:
        """Compare all steps' logits with torch's in float32, and in the same dtype.

        run: returns the logits of a step.
        """
        losses = Losses()
        dtypes = torch.float32, self.setting.dtype
        models = [self.torch_model(dtype, folder) for dtype in dtypes]
        for batch in self.batches():
            exact, same_dtype = (model.run(batch) for model in models)
            losses.note(batch, run(batch), same_dtype, exact)
        losses.check()

    def batches(self) -> Iterator[Batch]:
        """Steps of chunks of prompts, of decodes, some with drafts, and of both, with a sequence of
        every adapter and one of the base model. All drafts are taken to be right.
        """
        sizes, chance = self.sizes, random.Random(self.setting.seed + 1)
        digests = [None, *(hashlib.sha256(data).hexdigest() for data in self.adapters)]
        longest = sizes.max_model_len
        tokens = [[chance.randrange(sizes.vocab) for _ in range(longest)] for _ in digests]
        ends = [0] * len(digests)
        for step in range(1, sizes.steps + 1):
            rows = []
            for number, digest in enumerate(digests):
                most = (longest - ends[number]) // (2 if step == 1 else 8)
                is_decode = step % 3 == 2 or chance.random() < 0.3
                drafts = min(chance.randint(-3, _MOST_DRAFTS), most - 1) if is_decode else 0
                drafts = max(drafts, 0)
                count = 1 + drafts if is_decode else chance.randint(1, max(1, most))
                start, ends[number] = ends[number], ends[number] + count
                own, key = tokens[number][start : ends[number]], digest and f"a{number - 1}"
                found = key, digest, int(digest is not None)
                row = make_row(f"s{number}", own, start, self.blocks[number], found)
                rows.append(row._replace(num_drafts=drafts))
            yield Batch(step, tuple(rows))

    def place(self, model: "Stage | TorchModel", folder: Path, shard: Shard = WHOLE) -> None:
        for number, data in enumerate(self.adapters):
            packed = pack_adapter(data, model.form, folder, shard)
            model.place(f"a{number}", packed, self.slabs[number][: packed.num_slabs])


def _quantized(weights: Mapping[str, torch.Tensor], rounding: Rounding) -> dict[str, Weight]:
    """Quantise the projections, and the head in 8 bits; the rest stays as it is."""
    roundings = {"proj.weight": rounding, "lm_head.weight": Rounding(8)}

    def of(name: str, weight: torch.Tensor) -> Weight:
        own = next((r for end, r in roundings.items() if name.endswith(end)), None)
        return quantize(weight, own) if own else weight

    return {name: of(name, weight) for name, weight in weights.items()}
