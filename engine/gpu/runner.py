"""Runs steps on a device, one behind the scheduler: while a step runs, the next one is planned.

Only `collect` waits for the device. A step is one copy of plain ints to the device, a captured
graph if there is one for its shape, the choice of tokens, and one copy back; a token that the
previous step is still choosing is read on the device. Host memory of a step is used again when the
step has been collected.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch

from engine.gpu.decoder import GpuDecoder, StepOutputs
from engine.gpu.graphs import StepGraphs
from engine.gpu.inputs import Ints, StepBuilder, StepLimits, StepPlan, StepShape, aligned
from engine.gpu.sampler import (
    MOST_GIVEN_LOGPROBS,
    Logprobs,
    SamplingInputs,
    Told,
    choose,
    pack_mask,
)
from engine.gpu.scoring import ScoringInputs, score
from engine.grammar.matcher import Mask, mask_bytes
from engine.steps.batch import BAD_LOGITS, Batch, ScheduledRow, StepTokens
from engine.steps.meter import TokenMeter
from engine.steps.scoring import ScoredTokens
from engine.steps.segments import Tables
from engine.steps.verification import Choices
from engine.wire.messages import TokenLogprobs
from lora.device import Event
from lora.packed import PackedForm

logger = logging.getLogger(__name__)

_MEASURED_SLABS = 64
_INTS_PER_SAMPLED_ROW = 16 + 2 * 1024 + 1024 + 128 + MOST_GIVEN_LOGPROBS
"""Ints reserved for a row that samples: its parameters, its biases and allowed tokens (at most 1024
of each, a limit of server/api/openai.py), its stop tokens (64 and the model's own), and those whose
logprobs it asks for. Ints whose number grows with the row's tokens are not included.
"""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory of one step, on the device, or on the host for a step in flight.

    ints: copied to the device.   results: tokens and finite flags, copied back.
    logprobs, prompt_logprobs: of chosen tokens, and of prompt tokens, copied back.
    masks: of constrained rows, copied to the device.
    """

    ints: torch.Tensor
    results: torch.Tensor
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    masks: torch.Tensor

    @classmethod
    def of(
        cls, make: Callable[..., torch.Tensor], limits: StepLimits, num_ints: int, vocab: int
    ) -> "_Buffers":
        """make: takes sizes and a dtype, as `torch.zeros` does."""
        return cls(
            make(num_ints, dtype=torch.int32),
            make(limits.most_choices + limits.most_tokens, dtype=torch.int32),
            Logprobs.empty(limits.most_choices, make, MOST_GIVEN_LOGPROBS),
            Logprobs.empty(limits.max_num_batched_tokens, make),
            make(limits.most_choices, 8 + mask_bytes(vocab), dtype=torch.uint8),
        )

    @property
    def memory(self) -> Ints:
        view: Ints = self.ints.numpy()
        return view


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight.

    sampling, scoring: without rows on ranks other than the first.
    ints: of the sampling, on the device.
    choices: what the tokens that are being chosen are for; None until then. Their `places` are
    those of the tokens, and those of rows without a mask are left out.
    event: passes once all results are on the host.
    """

    batch: Batch
    plan: StepPlan
    sampling: SamplingInputs
    scoring: ScoringInputs
    slot: _Buffers
    ints: torch.Tensor
    choices: Choices | None = None
    event: Event = None


class GpuRunner:
    """Runs steps on a device; see engine.core.Runner.

    arena: [slabs, slab_bytes] uint8 on the model's device.   form: of the adapters in it.
    kv_dtype: of the KV in it.   num_swap_slots: KV blocks that preemption may keep on the host.
    Each rank of a model has a runner, which is given the same steps. The first rank chooses tokens
    and counts them; they are sent to the other ranks' devices, whose `collect` only waits.
    """

    lag = 1

    def __init__(
        self,
        model: GpuDecoder,
        arena: torch.Tensor,
        form: PackedForm,
        kv_dtype: torch.dtype,
        tables: Tables,
        meter: TokenMeter,
        limits: StepLimits,
        num_swap_slots: int = 0,
    ) -> None:
        self.model, self.device, self.kernels = model, model.device, model.kernels
        self.arena, self.meter, self.limits = arena, meter, limits
        self.graphs = StepGraphs(limits)
        self.builder = StepBuilder(limits, form, arena, tables, self.graphs.fit)
        layout = form.layout
        self.kv = arena.view(kv_dtype)[:, : layout.kv_block_elems].unflatten(1, layout.kv_shape)
        self.swap = self.device.pinned(num_swap_slots, arena.shape[1], dtype=torch.uint8)
        there = self.device.torch_device
        vocab, most_choices = model.config.vocab_size, limits.most_choices
        sizes = limits, self._most_ints(vocab, num_swap_slots), vocab
        self._there = _Buffers.of(partial(torch.zeros, device=there), *sizes)
        self._slots = deque(_Buffers.of(self.device.pinned, *sizes) for _ in range(self.lag + 1))
        self.out = StepOutputs(
            tokens=self._there.results[:most_choices],
            finite=self._there.results[most_choices:],
            logits=torch.zeros(most_choices if model.is_first else 0, vocab, device=there),
        )
        self._copied = torch.zeros(1, dtype=torch.int32, device=there)
        self._launched: deque[_Step] = deque()
        # (request_id, index) -> place of its token among those that the newest step chooses. Rows
        # with drafts are left out: only the host will know which token is their last one.
        self._chosen_at: dict[tuple[str, int], int] = {}
        self.copy_bytes_per_s = self._measure_copies() if num_swap_slots else 0.0

    def _most_ints(self, vocab: int, num_swap_slots: int) -> int:
        """Most ints that a step sends to the device; a token that penalties have seen takes two."""
        per_row = _INTS_PER_SAMPLED_ROW + 2 * min(self.limits.max_model_len, vocab)
        sampling = self.limits.most_choices * per_row
        scoring = aligned(2 * self.limits.max_num_batched_tokens)
        # Running beams may copy a block each and be preempted, and started ones then as well.
        copies = aligned(2 * 2 * self.limits.max_num_seqs)
        return self.builder.most_ints + copies + 4 * num_swap_slots + scoring + sampling

    def _measure_copies(self) -> float:
        """Measure bytes a second between arena and swap space, there and back."""
        num_slabs = min(_MEASURED_SLABS, len(self.swap), len(self.arena))
        ids = torch.arange(num_slabs, dtype=torch.int32, device=self.device.torch_device)
        seconds = 0.0
        for _ in range(2):  # the first touch of fresh memory costs more than a copy
            start = time.perf_counter()
            self._copy_slabs(self.swap, ids, self.arena, ids)
            self._copy_slabs(self.arena, ids, self.swap, ids)
            self.device.synchronize(self.device.record(self.device.compute))
            seconds = time.perf_counter() - start
        return 2 * num_slabs * self.arena.shape[1] / seconds

    # ---- graphs ----

    @torch.inference_mode()
    def capture_graphs(self, shapes: Sequence[StepShape] | None = None) -> None:
        """Capture graphs for these shapes, or for all that are to have one, before the first step.

        If that fails, steps of the shape are launched kernel by kernel, and the log says why.
        """
        wanted, errors = list(self.graphs.shapes()) if shapes is None else shapes, []
        for shape in wanted:
            try:
                self.graphs.keep(shape, self._capture(shape))
            except RuntimeError as error:  # raised by CUDA and by torch's allocator
                errors.append(error)
        if errors:
            logger.warning(
                "%d of %d graphs could not be captured, and their steps are launched kernel by "
                "kernel; the first error: %s", len(errors), len(wanted), errors[0],
            )  # fmt: skip

    def _capture(self, shape: StepShape) -> Callable[[], None]:
        """Capture a graph of a shape, with a step that is padding only."""
        self.builder.build(Batch(0, ()), self._slots[0].memory, {}, shape)
        self.device.copy(self.device.compute, self._there.ints, self._slots[0].ints)
        self.device.synchronize(self.device.record(self.device.compute))
        return self.device.capture(self._forward(shape))

    def _forward(
        self, shape: StepShape, take: Callable[[torch.Tensor], None] = lambda _: None
    ) -> Callable[[], None]:
        """A step's computation as a function.   take: is given the head's inputs of all tokens."""
        inputs = self.builder.views(shape, self._there.ints)
        return lambda: take(self.model.run(inputs, self.kv, self.out))

    # ---- steps ----

    @torch.inference_mode()
    def launch(self, batch: Batch) -> None:
        """See engine.core.Runner."""
        assert self._slots, "more steps are under way than there is memory for"
        assert not _names(batch.rows) & self._unverified(), "nobody knows yet where they go on"
        slot = self._slots.popleft()
        plan = self.builder.build(batch, slot.memory, self._chosen_at)
        sampling, scoring = self._wanted(plan)
        moves = list(_moves(batch, self.arena, self.swap))
        packed = [*(ids for *_, ids in moves), scoring.tokens]
        packed += [sampling.pack()] if sampling.num_rows else []
        places = _append(slot.memory, plan.num_ints, packed)
        compute, end = self.device.compute, places[-1].stop
        self.device.copy(compute, self._there.ints[:end], slot.ints[:end])
        for (target, source, _), place in zip(moves, places, strict=False):
            target_ids, source_ids = self._there.ints[place].view(2, -1)
            self._copy_slabs(target, target_ids, source, source_ids)
        if batch.rows:
            # A graph keeps nothing but the logits of the rows' last tokens.
            graph = None if plan.scored.indices else self.graphs.find(plan.shape)
            take = partial(self._score, scoring, self._there.ints[places[len(moves)]])
            step = graph or self._forward(plan.shape, take)
            self.device.submit(compute, step)
            self._tell(scoring.told, slot.prompt_logprobs, self._there.prompt_logprobs)
        drafting = _names(row for row in batch.rows if row.num_drafts)
        self._chosen_at = {
            name: place
            for place, row in enumerate(plan.choosing)
            if (name := _name(row)) not in drafting
        }
        ints = self._there.ints[places[-1]]
        self._launched.append(_Step(batch, plan, sampling, scoring, slot, ints))
        if not batch.is_constrained:
            self.choose({})

    @torch.inference_mode()
    def choose(self, masks: Mapping[int, Sequence[Mask]]) -> None:
        """See engine.core.Runner."""
        step = self._launched.pop()
        rows, slot, compute = step.batch.rows, step.slot, self.device.compute
        choices = Choices.of(rows, masks)
        if step.sampling.num_rows:
            by_place = {choices.places[i]: mask for i, mask in choices.masks.items()}
            self._choose(step, self._send_masks(slot, by_place))
        self._meet(step.batch, len(step.plan.choosing))
        if rows and self.model.is_first:
            num_results = self.limits.most_choices + step.plan.shape.num_tokens
            self.device.copy(compute, slot.results[:num_results], self._there.results[:num_results])
        event = self.device.record(compute)
        self._launched.append(replace(step, choices=choices, event=event))

    def _send_masks(self, slot: _Buffers, masks: Mapping[int, Mask]) -> torch.Tensor:
        """Copy masks to the device, packed.   masks: by place among the tokens to choose."""
        count = len(masks)
        for (place, mask), target in zip(masks.items(), slot.masks, strict=False):
            pack_mask(place, mask, target)
        if count:
            self.device.copy(self.device.compute, self._there.masks[:count], slot.masks[:count])
        return self._there.masks[:count]

    def _meet(self, batch: Batch, num_chosen: int) -> None:
        """Send chosen tokens to all ranks, and let no rank end a step before all have run it."""
        if (ranks := self.model.ranks) is None:
            return
        compute = self.device.compute
        if num_chosen:
            self.device.submit(compute, partial(ranks.broadcast, self.out.tokens[:num_chosen]))
        if not batch.rows:
            # A step with rows ends with a sum over the ranks. Without a sum, slabs and swap slots
            # that another rank is still copying would be used again.
            self.device.submit(compute, partial(ranks.all_reduce, self._copied))

    def _unverified(self) -> set[tuple[str, int]]:
        """(request_id, index) of the rows in flight that have drafts and will choose a token."""
        if not self.model.is_first:
            return set()  # other ranks collect a step only once they have launched the next one
        numbers = ((s, n) for s in self._launched if s.choices for n in s.choices.numbers)
        rows = (step.batch.rows[number] for step, number in numbers)
        return _names(row for row in rows if row.num_drafts)

    def _wanted(self, plan: StepPlan) -> tuple[SamplingInputs, ScoringInputs]:
        """The inputs of a step's sampling and scoring, which are empty on ranks but the first."""
        vocab_size = self.model.config.vocab_size
        if self.model.is_first:
            sampling = SamplingInputs.of(plan.choosing, plan.sources, vocab_size)
            return sampling, ScoringInputs.of(plan.scored, vocab_size)
        nothing = ScoredTokens.of((), ())
        return SamplingInputs.of((), (), vocab_size), ScoringInputs.of(nothing, vocab_size)

    def _score(self, scoring: ScoringInputs, ints: torch.Tensor, x: torch.Tensor) -> None:
        if (head := self.model.lm_head) is not None:
            there, finite = self._there.prompt_logprobs, self.out.finite
            vocab_size, softcap = self.model.config.vocab_size, self.model.config.soft_caps.logits
            score(x, head, vocab_size, ints, scoring.told.depth, there, finite, softcap)

    def _copy_slabs(self, *work: torch.Tensor) -> None:
        self.device.submit(self.device.compute, partial(self.kernels.copy_slabs, *work))

    def _choose(self, step: _Step, masks: torch.Tensor) -> None:
        sampling, logits = step.sampling, self.out.logits[: step.sampling.num_rows]
        given = logits, sampling, step.ints, self.out.tokens, self._there.logprobs, masks
        self.device.submit(self.device.compute, partial(choose, self.kernels, *given))
        self._tell(sampling.told, step.slot.logprobs, self._there.logprobs)

    def _tell(self, told: Told, target: Logprobs, source: Logprobs) -> None:
        for here, there in zip(target.used(told), source.used(told), strict=True):
            self.device.copy(self.device.compute, here, there)

    def collect(self) -> StepTokens:
        """See engine.core.Runner."""
        step = self._launched.popleft()
        with torch.inference_mode():
            assert step.choices is not None, "its tokens have not been chosen yet"
            self.device.synchronize(step.event)
            tokens = self._read(step, step.choices) if self.model.is_first else StepTokens(())
        self._slots.append(step.slot)
        return tokens

    def _read(self, step: _Step, choices: Choices) -> StepTokens:
        rows, most_choices = step.batch.rows, self.limits.most_choices
        results = step.slot.results[: most_choices + step.plan.shape.num_tokens].tolist()
        tokens = [max(results[place], BAD_LOGITS) for place in choices.places]
        verdict = choices.judge(rows, tokens, results[most_choices:])
        prompt = sum(len(row.token_ids) for row in rows if row.num_output_tokens == 0)
        self.meter.count(prompt_tokens=prompt, sampled_tokens=verdict.num_chosen)
        scored = step.slot.prompt_logprobs.read(step.scoring.told)
        return StepTokens(
            verdict.token_ids,
            _logprobs(step, choices, verdict.kept),
            step.plan.adapter_digests,
            step.scoring.scored.by_row(scored),
            verdict.num_accepted,
        )


def _logprobs(
    step: _Step, choices: Choices, kept: Mapping[int, Sequence[int]]
) -> dict[int, list[TokenLogprobs]]:
    """Logprobs by row number, of rows that asked for them.   kept: see Choices.verify."""
    sampling = step.sampling
    named = step.slot.logprobs.read(sampling.told)
    by_place = dict(zip(sampling.told_rows.tolist(), named, strict=True))
    return {
        number: [by_place[choices.places[i]] for i in own]
        for number, own in kept.items()
        if choices.places[own[0]] in by_place
    }


def _moves(
    batch: Batch, arena: torch.Tensor, swap: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Ints]]:
    """Yield (target, source, [2, n] slabs there and here) for the copies of blocks, then for each
    run of transfers of one direction.
    """
    if batch.copies:
        yield arena, arena, np.asarray(batch.copies, dtype=np.int32).T[::-1]
    for is_out, run in groupby(batch.transfers, lambda transfer: transfer.is_out):
        pairs = [(transfer.block_id, transfer.slot) for transfer in run]
        blocks_and_slots = np.asarray(pairs, dtype=np.int32).T
        if is_out:
            yield swap, arena, blocks_and_slots[::-1]
        else:
            yield arena, swap, blocks_and_slots


def _names(rows: Iterable[ScheduledRow]) -> set[tuple[str, int]]:
    return {_name(row) for row in rows}


def _name(row: ScheduledRow) -> tuple[str, int]:
    return row.request_id, row.index


def _append(memory: Ints, at: int, packed: Sequence[Ints]) -> list[slice]:
    """Put arrays behind each other from `at` on, aligned; return their places."""
    places = []
    for ints in packed:
        memory[at : at + ints.size] = ints.reshape(-1)
        places.append(slice(at, at + ints.size))
        at = aligned(at + ints.size)
    return places
