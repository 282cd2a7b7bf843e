"""Runs batches on the CPU: inputs, forward pass, sampling, and a count of what was computed."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from engine.cpu.decoder import Decoder
from engine.cpu.inputs import ForwardInputs, InputBuilder
from engine.grammar.matcher import Mask
from engine.steps.batch import Batch, StepTokens
from engine.steps.meter import TokenMeter
from engine.steps.sampler import choose
from engine.steps.scoring import score
from engine.steps.segments import Tables
from engine.steps.verification import Choices
from engine.wire.messages import TokenLogprobs
from lora.packed import PackedForm

_MEASURED_SLABS = 64


class ModelRunner:
    """Runs batches on the CPU; see engine.core.Runner.

    arena: [slabs, slab_bytes] uint8.   form: of the adapters in it, and of its KV.
    num_swap_slots: KV blocks that preemption may keep in host memory.
    """

    lag = 0

    def __init__(
        self,
        model: Decoder,
        arena: torch.Tensor,
        form: PackedForm,
        tables: Tables,
        meter: TokenMeter,
        num_swap_slots: int = 0,
    ) -> None:
        self.arena = arena
        self.model = model
        self.inputs = InputBuilder(arena, form, tables)
        self.meter = meter
        # The host provides this memory only once it is written to.
        self.swap = torch.empty(num_swap_slots, arena.shape[1], dtype=torch.uint8)
        self.copy_bytes_per_s = self._measure_copies() if num_swap_slots else 0.0
        self._forward: _Forward | None = None
        self._finished: deque[StepTokens] = deque()

    def _measure_copies(self) -> float:
        """Measure bytes a second between arena and swap space, there and back, over so many slabs
        that no CPU cache holds them.
        """
        num_slabs = min(_MEASURED_SLABS, len(self.swap), len(self.arena))
        slots, slabs = self.swap[:num_slabs], self.arena[:num_slabs]
        slabs.copy_(slots.zero_())  # the first touch of fresh memory costs more than a copy
        start = time.perf_counter()
        slots.copy_(slabs)
        slabs.copy_(slots)
        return 2 * slabs.nbytes / (time.perf_counter() - start)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> None:
        """See engine.core.Runner."""
        for block_id, other_id in batch.copies:
            self.arena[other_id].copy_(self.arena[block_id])
        for transfer in batch.transfers:
            slab, slot = self.arena[transfer.block_id], self.swap[transfer.slot]
            source, target = (slab, slot) if transfer.is_out else (slot, slab)
            target.copy_(source)
        if not batch.rows:
            self._finished.append(self._only_copied())
            return
        self._forward = self._compute(batch)
        if not batch.is_constrained:
            self.choose({})

    @torch.inference_mode()
    def choose(self, masks: Mapping[int, Sequence[Mask]]) -> None:
        """See engine.core.Runner."""
        assert self._forward is not None, "no step was launched"
        self._finished.append(self._choose(self._forward, masks))
        self._forward = None

    def collect(self) -> StepTokens:
        """See engine.core.Runner."""
        return self._finished.popleft()

    def _only_copied(self) -> StepTokens:
        if self.model.ranks is not None:
            # The step ends only when every rank has copied, since its slabs are used again then.
            self.model.ranks.all_reduce(torch.zeros(1))
        return StepTokens(())

    def _compute(self, batch: Batch) -> "_Forward":
        inputs = self.inputs.build(batch)
        return _Forward(batch, inputs, *self.model.hidden(inputs))

    def _choose(self, forward: "_Forward", masks: Mapping[int, Sequence[Mask]]) -> StepTokens:
        batch, inputs, _, is_finite = forward
        scored = inputs.scored
        if self.model.lm_head is None:
            return StepTokens(())  # the first rank chooses
        choices = Choices.of(batch.rows, masks)
        tokens, logprobs = self._choose_tokens(forward, choices)
        places = inputs.scored_places
        added = inputs.head_adapters.num_added(places.tolist())
        named, is_sane = score(
            lambda part: forward.logits(self.model, places[part], added[part.start]),
            scored,
            self.model.config.vocab_size,
            [i for i, (a, b) in enumerate(pairwise(added), start=1) if a != b],
        )
        is_finite[scored.indices] &= is_sane
        verdict = choices.judge(batch.rows, tokens, is_finite.tolist())
        prompt = sum(len(row.token_ids) for row in batch.rows if row.num_output_tokens == 0)
        self.meter.count(prompt_tokens=prompt, sampled_tokens=verdict.num_chosen)
        return StepTokens(
            verdict.token_ids,
            {n: [logprobs[i] for i in k] for n, k in verdict.kept.items() if k[0] in logprobs},
            inputs.adapter_digests,
            scored.by_row(named),
            verdict.num_accepted,
        )

    def _choose_tokens(
        self, forward: "_Forward", choices: Choices
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """A token and logprobs by choice. Those of one vocabulary are made at once, so that a row's
        bits do not depend on what the adapters of others add.
        """
        places = forward.inputs.sampled_places[list(choices.places)]
        added = forward.inputs.head_adapters.num_added(places.tolist())
        token_ids = [0] * len(places)
        logprobs: dict[int, TokenLogprobs] = {}
        for num_added in dict.fromkeys(added):
            own = [n for n, count in enumerate(added) if count == num_added]
            logits = forward.logits(self.model, places[own], num_added)
            masks = {i: choices.masks[n] for i, n in enumerate(own) if n in choices.masks}
            found, told = choose(logits, [choices.rows[n] for n in own], masks)
            for n, token_id in zip(own, found, strict=True):
                token_ids[n] = token_id
            logprobs |= {own[i]: logprob for i, logprob in told.items()}
        return token_ids, logprobs


class _Forward(NamedTuple):
    """A step whose tokens are not chosen yet.   x: inputs of the head.   is_finite: [T]."""

    batch: Batch
    inputs: ForwardInputs
    x: torch.Tensor
    is_finite: torch.Tensor

    def logits(self, model: Decoder, places: torch.Tensor, num_added: int) -> torch.Tensor:
        """Logits of some of the tokens whose logits are wanted, by their places among those.

        num_added: how many tokens the adapter of each adds to the vocabulary.
        """
        runs = self.inputs.head_adapters.among(places.tolist())
        return model.logits(self.x[places], runs, num_added)
