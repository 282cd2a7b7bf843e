"""Runs batches on a device: inputs, forward, sampling, and its own count of what it did."""

from collections.abc import Callable

import torch

from engine.batch import Batch, StepTokens
from engine.inputs import InputBuilder
from engine.meter import TokenMeter
from engine.models.llama import Llama
from engine.sampler import choose
from lora.batch import DeviceTables
from lora.layout import Layout


class ModelRunner:
    """arena: [slabs, slab_bytes] uint8.   tables: key -> (generation, tables) while resident."""

    def __init__(
        self,
        model: Llama,
        arena: torch.Tensor,
        layout: Layout,
        dtype: torch.dtype,
        tables: Callable[[str], tuple[int, DeviceTables]],
        meter: TokenMeter,
    ) -> None:
        self.model = model
        self.inputs = InputBuilder(arena, layout, dtype, tables)
        self.meter = meter

    def run(self, batch: Batch) -> list[int | None]:
        """See engine.core.Runner."""
        return list(self.run_step(batch).token_ids)

    @torch.inference_mode()
    def run_step(self, batch: Batch) -> StepTokens:
        """Tokens and logprobs of a step."""
        inputs = self.inputs.build(batch)
        logits = self.model.forward(inputs.input_ids, inputs.positions, inputs)
        due = [i for i, row in enumerate(batch.rows) if row.sampling is not None]
        tokens, logprobs = choose(logits, [batch.rows[i] for i in due])
        prompt = sum(len(row.token_ids) for row in batch.rows if row.num_output_tokens == 0)
        self.meter.count(prompt_tokens=prompt, sampled_tokens=sum(t >= 0 for t in tokens))
        token_ids: list[int | None] = [None] * len(batch.rows)
        for i, token in zip(due, tokens, strict=True):
            token_ids[i] = token
        return StepTokens(token_ids, {due[j]: named for j, named in logprobs.items()})
