"""Steps that were launched and have not been taken in: their rows, and what came of them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.drafts.estimate import StepEstimate
from engine.kv.cache import KVCache
from engine.requests.request import PENDING_TOKEN, Request
from engine.scheduling.outputs import Outputs
from engine.scheduling.step_plan import StepPlan
from engine.steps.batch import Batch, ScheduledRow, Scoring
from lora.manager import AdapterManager


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight.

    requests: of its rows, in their order.   at: time of its launch.
    is_after_pause: whether no other step ran meanwhile, since its rows waited for the last one.
    left_out: by number, rows that choose no token after all: how many of their last tokens are
    computed again.
    """

    batch: Batch
    requests: Sequence[Request]
    at: float
    is_after_pause: bool
    left_out: dict[int, int] = field(default_factory=dict)

    def leave_out(self, number: int, num_again: int) -> None:
        """Have a row choose no token.

        num_again: how many of its last tokens are computed again, as their logits are still needed.
        """
        self.left_out[number] = num_again
        self.requests[number].num_pending_tokens -= 1
        self.requests[number].num_in_flight_tokens -= num_again

    def settle(self, number: int, num_accepted: int) -> None:
        """Count a computed row, whose tokens are computed again if it lost its blocks meanwhile.

        Rejected drafts are taken back.
        """
        row, request = self.batch.rows[number], self.requests[number]
        num_again = self.left_out.get(number)
        if num_again is None:
            num_again = row.num_drafts - num_accepted
            request.num_in_flight_tokens -= num_again
            if row.sampling is not None:
                request.num_pending_tokens -= 1
        num_tokens = len(row.token_ids) - num_again
        request.num_in_flight_tokens -= num_tokens
        if request.block_ids or request.swapped:
            request.num_computed_tokens += num_tokens
        prompt = request.prompt
        if prompt.num_tokens_done == request.num_prompt_tokens:
            return
        if request.is_first and prompt.num_tokens_done == 0:
            prompt.num_cached_tokens = request.num_found_tokens
        done = min(row.end, request.num_prompt_tokens)
        prompt.num_tokens_done = max(prompt.num_tokens_done, done)


class InFlight:
    """Launches steps, and learns from the time that they take.

    steps: those that have not been finished, the oldest first.
    step_s: seconds that the last finished one took.
    """

    def __init__(
        self,
        adapters: AdapterManager[object],
        kv: KVCache,
        outputs: Outputs,
        estimate: StepEstimate,
        clock: Callable[[], float],
    ) -> None:
        self.steps: deque[Launched] = deque()
        self.step_s = 0.0
        self._adapters = adapters
        self._kv = kv
        self._outputs = outputs
        self._estimate = estimate
        self._clock = clock
        self._num_launched = 0
        self._finished_at = 0.0
        self._is_waiting = False  # for the step in flight, as nothing can run beside it

    def launch(self, plan: StepPlan) -> Batch:
        """Launch the planned step, whose rows are sorted by adapter, unless it is empty."""
        requests = sorted(plan.tokens, key=lambda request: request.adapter_key or "")
        batch = Batch(
            self._num_launched + 1,
            tuple(self._row(request, plan) for request in requests),
            self._kv.swap.take_transfers(),
            self._kv.take_copies(),
        )
        if not batch.is_empty:
            self._num_launched = batch.step
            self._kv.arena.launch_step(batch.step)
            for request, row in zip(requests, batch.rows, strict=True):
                request.num_in_flight_tokens += len(row.token_ids)
                if row.sampling is not None:
                    request.num_pending_tokens += 1
            self.steps.append(Launched(batch, requests, self._clock(), self._is_waiting))
        self._is_waiting = batch.is_empty and bool(self.steps)
        return batch

    def finish(self, batch: Batch) -> Launched:
        """Take the oldest step out, as it has ended, and note how long it took."""
        launched = self.steps.popleft()
        assert launched.batch is batch, "steps finish in the order in which they were launched"
        self._kv.arena.finish_step(batch.step)
        self._note_speed(launched)
        return launched

    def _row(self, request: Request, plan: StepPlan) -> ScheduledRow:
        num_tokens, drafts = plan.tokens[request], plan.drafts.get(request, ())
        start, params = request.num_scheduled_tokens, request.params
        samples = request.samples_after(num_tokens)
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        if samples and request.has_penalties:
            pending = (PENDING_TOKEN,) * request.num_pending_tokens
            before = request.prompt.distinct_token_ids
            after = (*request.output_token_ids, *pending)
        num_output_tokens = len(request.output_token_ids) + request.num_pending_tokens
        banned: tuple[int, ...] = ()
        is_constrained = samples and request.needs_mask(len(drafts))
        reasoning = request.reasoning
        if samples and not is_constrained and (reasoning or num_output_tokens < params.min_tokens):
            banned = self._outputs.banned_token_ids(params, num_output_tokens, reasoning)
        scoring, generation, digest = None, 0, None
        if params.prompt_logprobs is not None:
            scoring = _scoring(request, start, start + num_tokens)
        if request.adapter_key:
            generation, _ = self._adapters.tables(request.adapter_key)
            digest = request.group.digest
        token_ids = request.tokens(start, start + num_tokens)
        # By place, which takes half the time that it takes by name.
        return ScheduledRow(
            request.request_id,
            token_ids + drafts if drafts else token_ids,
            start,
            self._kv.row_blocks(request),
            request.adapter_key,
            digest,
            generation,
            request.sampling if samples else None,
            request.seed,
            num_output_tokens,
            request.adapter_start,
            request.index,
            before,
            after,
            scoring,
            banned,
            is_constrained,
            len(drafts),
        )

    def _note_speed(self, launched: Launched) -> None:
        """Learn the prefill speed, a cost of preemption, from steps that are mostly prefill, and
        what drafts cost from steps that are all decodes.
        """
        now, batch = self._clock(), launched.batch
        self.step_s = now - max(launched.at, self._finished_at)
        since_last_s, self._finished_at = now - self._finished_at, now
        counts = [len(row.token_ids) - row.num_drafts for row in batch.rows]
        num_prefill = sum(count for count in counts if count > 1)
        if 2 * num_prefill > batch.num_tokens:
            self._kv.swap.costs.note_prefill(batch.num_tokens, self.step_s)
        if batch.rows and not num_prefill:
            num_tokens, num_drafts = sum(counts), batch.num_tokens - sum(counts)
            if launched.is_after_pause:
                self._estimate.note_after_pause(num_tokens, num_drafts, since_last_s)
            else:
                self._estimate.note(num_tokens, num_drafts, self.step_s)


def _scoring(request: Request, start: int, end: int) -> Scoring | None:
    """The prompt tokens that get a logprob when the request's tokens [start, end) are computed."""
    num_top, first = request.params.prompt_logprobs, max(start, request.num_scored_tokens)
    end = min(end, request.num_prompt_tokens - 1)
    if num_top is None or not request.num_tokens_to_score or first >= end:
        return None
    return Scoring(first - start, request.tokens(first + 1, end + 1), num_top)
