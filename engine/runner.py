"""Runs batches on a device: inputs, forward, sampling, and its own count of what it did."""

from collections.abc import Callable, Sequence

import torch

from engine.batch import BAD_LOGITS, Batch, StepTokens
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
        logits, is_finite = self.model.forward(inputs.input_ids, inputs.positions, inputs)
        due = [i for i, row in enumerate(batch.rows) if row.sampling is not None]
        tokens, logprobs = choose(logits, [batch.rows[i] for i in due])
        sampled: list[int | None] = [None] * len(batch.rows)
        for i, token in zip(due, tokens, strict=True):
            sampled[i] = token
        token_ids = fail_rows(batch, is_finite.tolist(), sampled)
        prompt = sum(len(row.token_ids) for row in batch.rows if row.num_output_tokens == 0)
        num_sampled = sum(token is not None and token != BAD_LOGITS for token in token_ids)
        self.meter.count(prompt_tokens=prompt, sampled_tokens=num_sampled)
        return StepTokens(token_ids, {due[j]: named for j, named in logprobs.items()})


def fail_rows(
    batch: Batch, is_finite: Sequence[bool], tokens: Sequence[int | None]
) -> list[int | None]:
    """`tokens` of the rows, BAD_LOGITS for those with a token that is not finite, sampled or not.

    is_finite: [T].   The keys and values of such a token are not what the cache holds.
    """
    flags = iter(is_finite)
    return [
        token if all([next(flags) for _ in row.token_ids]) else BAD_LOGITS
        for row, token in zip(batch.rows, tokens, strict=True)
    ]
