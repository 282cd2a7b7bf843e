"""Schedules which tokens of which requests run in the next step, and takes in the results.

One rule: every request's `num_computed_tokens` catches up with its `num_tokens`. Prefill, chunked
prefill, prefix hits, decode and recomputation after preemption are all this rule under one budget.

`schedule` may be called again before the step that runs has been handed to `update`: tokens that it
computes are counted by `num_in_flight_tokens`, and the tokens that it chooses are pending.
"""

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.admission import Admission
from engine.batch import (
    BAD_LOGITS,
    Batch,
    ScheduledRow,
    Scoring,
    StepResult,
    StepTokens,
)
from engine.beam_searches import BeamSearches
from engine.block_hash import BlockHasher
from engine.config import SchedulerConfig
from engine.fairness import PREFILL_COST, make_policy
from engine.grammar.constraint import Constraint
from engine.grammar.constraints import Constraints
from engine.grammar.matcher import Grammars, Mask
from engine.kv_cache import KVCache
from engine.messages import AddRequest, ExtendLease, StopCause
from engine.outputs import Ending, Outputs
from engine.queues import Queues
from engine.records import RequestProgress
from engine.request import PENDING_TOKEN, Prompt, Request, RequestGroup
from engine.speculation import Speculation
from engine.stops import StopMatcher
from engine.swap import PreemptionCosts, SwapSpace
from lora.entry import Waiter
from lora.layout import Layout
from lora.manager import AdapterManager

NOT_FINITE = "the logits are not finite"
_MASK = (1 << 64) - 1
_PATIENCE = 0.05
_LEAST_PATIENCE_S = 1e-3
"""How long a step waits for masks that a lane has not made yet: a share of the last step's time."""
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that a request's answers have different seeds


class ArenaTooSmall(ValueError):
    """A request of max_model_len tokens would never fit into the arena."""

    def __init__(self, max_model_len: int, num_slabs: int, layout: Layout) -> None:
        tokens = num_slabs * layout.block_size
        wanted = layout.num_blocks(max_model_len) * layout.slab_bytes
        super().__init__(
            f"the arena holds {tokens} tokens and max_model_len is {max_model_len}: "
            f"give arena_bytes of at least {wanted}, or a smaller max_model_len"
        )


class Scheduler:
    """Owns every request from `add` to its one last output.

    vocabulary: token id -> bytes, for stop strings.   swap: space for preempted KV.
    clock: seconds, monotonic.   grammars: None where requests with a grammar are refused.
    speculation: None for an engine without drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        layout: Layout,
        adapters: AdapterManager[object],
        vocabulary: Sequence[bytes],
        eos_token_ids: Sequence[int],
        swap: SwapSpace | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        if layout.num_blocks(config.max_model_len) > adapters.arena.num_slabs:
            raise ArenaTooSmall(config.max_model_len, adapters.arena.num_slabs, layout)
        self.config = config
        self.layout = layout
        self.adapters = adapters
        self.arena = adapters.arena
        self.clock = clock
        self.policy = make_policy(config.scheduling_policy, clock)
        self.hasher = BlockHasher(layout.block_size, config.public_prefixes, config.base_revision)
        swap = swap or SwapSpace(0, layout.slab_bytes, PreemptionCosts(clock=clock))
        self.kv = KVCache(
            self.arena,
            layout,
            self.hasher,
            swap,
            prefix_caching=config.prefix_caching,
            sliding_window=config.sliding_window,
        )
        self.queues = Queues(config, self.kv, adapters, self.policy)
        self.constraints = Constraints(grammars, eos_token_ids)
        self.admission = Admission(self.queues, self.constraints, clock)
        self.outputs = Outputs(config.max_model_len, vocabulary, eos_token_ids, clock)
        self.searches = BeamSearches(self.queues, self.outputs)
        self.speculation = speculation
        self.groups: dict[str, RequestGroup] = {}
        self._num_arrivals = 0
        self._step = 0
        self.launched: deque[Launched] = deque()  # oldest first
        self._finished_at = 0.0
        self._step_s = 0.0
        self._is_waiting = False  # for the step in flight, as nothing can run beside it
        self._first_due_at = math.inf  # no request is overdue before
        self._added: list[RequestProgress] = []  # beside what rows chose
        self._num_added = 0
        self._ended: list[RequestGroup] = []

    # ---- what the gateway says ----

    def add(self, gateway_id: str, message: AddRequest) -> str | None:
        """Queue a request, or return in a word why not; then nothing is accepted or counted."""
        if refusal := self._refusal(message):
            return refusal
        group = RequestGroup(gateway_id, message, arrived_at=self.clock())
        if message.grammar:
            group.compilation = self.constraints.want(message.tenant_id, message.grammar)
        seed = message.sampling_params.seed
        seed = secrets.randbits(64) if seed is None else seed
        for token_ids in message.prompts:
            self._add_prompt(group, Prompt(token_ids), seed)
        self.groups[group.request_id] = group
        self._first_due_at = min(self._first_due_at, _due_at(group))
        if group.adapter:
            waiter = Waiter(
                group.request_id,
                message.tenant_id,
                group.requests[0].arrival,
                message.priority,
                message.weight,
            )
            group.load_tier = self.adapters.join(group.adapter, waiter)
        return None

    def _add_prompt(self, group: RequestGroup, prompt: Prompt, seed: int) -> None:
        """Queue n answers to the prompt."""
        message, params = group.message, group.message.sampling_params
        words = dict(params.words)
        group.prompts.append(prompt)
        for place in range(params.n):
            self._num_arrivals += 1
            index = len(group.requests)
            # With a seed, each prompt of a list gets the answers that it gets alone.
            number = index if params.seed is None else place
            request = Request(
                group,
                prompt,
                index,
                arrival=self._num_arrivals,
                seed=(seed + number * _SEED_STEP) & _MASK,
                base_scope=self.hasher.base_scope(message),
                scope=self.hasher.scope(message),
                num_public_blocks=self.hasher.num_public_blocks(prompt.token_ids),
                stops=StopMatcher(params.stop, words, params.include_stop_str_in_output),
            )
            prompt.answers.append(request)
            group.requests.append(request)
            self.queues.waiting.append(request)
        if request.is_beam:
            self.searches.begin(prompt, params, self.config.max_model_len)

    def abort(self, request_ids: Sequence[str], cause: StopCause = "aborted") -> None:
        """End requests early; what they generated stays counted. Unknown ids have ended already."""
        ending = Ending("abort" if cause == "aborted" else "error", cause)
        for request_id in request_ids:
            if group := self.groups.get(request_id):
                self._end_group(group, ending)

    def extend_lease(self, message: ExtendLease) -> None:
        if group := self.groups.get(message.request_id):
            group.extend_lease(message.token_lease)

    def forget_drafts(self, tenant_id: str, adapter_digest: str | None) -> None:
        """Forget what a tenant's adapter said, or all its adapters if the digest is None; and keep
        nothing of the answers that are under way.
        """
        for group in self.groups.values():
            is_of_it = adapter_digest in (None, group.digest)
            if group.message.tenant_id == tenant_id and is_of_it:
                group.message = replace(group.message, shares_drafts=False)
        if self.speculation is not None:
            self.speculation.forget_drafts(tenant_id, adapter_digest)

    def abort_gateway(self, gateway_id: str) -> None:
        """End the requests of a gateway that is gone, since nobody reads them any more."""
        lost = [g.request_id for g in self.groups.values() if g.gateway_id == gateway_id]
        self.abort(lost, "gateway_lost")

    @property
    def has_work(self) -> bool:
        return bool(self.groups or self._ended or self.launched)

    def _refusal(self, message: AddRequest) -> str | None:
        """Reason why a request cannot be accepted, ever or now; None if it can."""
        if message.request_id in self.groups:
            return "duplicate_request_id"
        if len(self.queues.waiting) + message.num_answers > self.config.max_waiting:
            return "queue_full"
        if not all(0 < len(prompt) < self.config.max_model_len for prompt in message.prompts):
            return "prompt_too_long"
        if message.grammar and not self.constraints.is_available:
            return "no_grammars"
        return None

    # ---- a step ----

    def schedule(self) -> Batch:
        """Plan a step: decodes, then prefills, then waiting requests; rows sorted by adapter."""
        self._end_overdue()
        self._end_unleased()
        self._force_known()
        self.queues.begin_step()
        self.queues.schedule_running()
        for group, ending in self.admission.run():
            self._end_group(group, ending)
        self._add_drafts()
        plan = sorted(self.queues.plan.items(), key=lambda item: item[0].adapter_key or "")
        batch = Batch(
            self._step + 1,
            tuple(self._row(request, num_tokens) for request, num_tokens in plan),
            self.kv.swap.take_transfers(),
            self.kv.take_copies(),
        )
        if not batch.is_empty:
            self._launch(batch, [request for request, _ in plan])
        self._is_waiting = batch.is_empty and bool(self.launched)
        return batch

    def constrain(self, batch: Batch) -> dict[int, Sequence[Mask]]:
        """Masks of the newest step's constrained rows that are to choose, by row number: of the
        next token, then of those behind drafts.

        A row whose grammar leaves no choice gets its tokens at once. A row whose mask is late
        chooses nothing, and has the next step compute its last token again.
        """
        launched = self.launched[-1]
        assert launched.batch is batch, "only the newest step has not chosen its tokens yet"
        until = time.monotonic() + max(_LEAST_PATIENCE_S, _PATIENCE * self._step_s)
        masks: dict[int, Sequence[Mask]] = {}
        for number, (row, request) in enumerate(zip(batch.rows, launched.requests, strict=True)):
            constraint = request.constraint
            if not row.is_constrained or request.finish_reason is not None:
                continue
            if constraint is None:
                masks[number] = self.outputs.masks(request, row.draft_token_ids, None)
                continue
            found = constraint.wait(until)
            if constraint.error is not None:
                self.constraints.lanes.figures.masks_failed += 1
                ending = Ending("error", "constraint_too_slow", constraint.error)
                self._end_group(request.group, ending)
            elif found is None:
                self.constraints.lanes.figures.masks_late += 1
                self._leave_out(launched, number, request, num_again=1 + row.num_drafts)
            elif found.forced and _may_force(request):
                self._leave_out(launched, number, request, num_again=row.num_drafts)
                self._force(request, constraint)
            else:
                ahead = constraint.wait_ahead(until) if row.num_drafts else ()
                allowed = (found.first_mask, *ahead)
                masks[number] = self.outputs.masks(request, row.draft_token_ids, allowed)
        return masks

    def _add_drafts(self) -> None:
        """Have the step's rows verify drafts where that brings more tokens a second."""
        if self.speculation is None:
            return
        self.speculation.keep_only(self.queues.running)
        drafts = self.speculation.choose(
            self.queues.plan, self.queues.budget, self.outputs.before_end
        )
        for request, token_ids in drafts.items():
            self.queues.add_drafts(request, token_ids)
        for request, token_ids in self.queues.drafts.items():
            if request.constraint is not None and not request.num_pending_tokens:
                request.constraint.look_ahead(token_ids)

    def update(self, batch: Batch, tokens: StepTokens) -> StepResult:
        """Apply the results of the oldest launched step; an empty batch only has ended requests."""
        result = StepResult(batch.step)
        self._hand_over_added(result)  # before the tokens that were chosen after them
        if not batch.is_empty:
            launched = self.launched.popleft()
            assert launched.batch is batch, "steps finish in the order in which they were launched"
            self.arena.finish_step(batch.step)
            self._note_speed(launched)
            for number, (row, request) in enumerate(
                zip(batch.rows, launched.requests, strict=True)
            ):
                num_accepted = tokens.num_accepted.get(number, 0)
                self._settle(request, row, launched, number, num_accepted)
                if number in tokens.adapter_digests:
                    self._note_adapter(request.group, tokens.adapter_digests[number])
                if request.finish_reason is None:
                    self._take(request, row, number, tokens, result)
        self.hand_over(result)
        return result

    def hand_over(self, result: StepResult) -> None:
        """Add to a step's result what happened since the last one was handed over."""
        outputs, leases_low = self.outputs.take()
        result.outputs += outputs
        result.leases_low += leases_low
        result.ended += self._ended
        self._ended = []
        self._hand_over_added(result)

    def _hand_over_added(self, result: StepResult) -> None:
        result.progress += self._added
        result.num_forced += self._num_added
        self._added, self._num_added = [], 0

    def check_integrity(self) -> None:
        """Assert that queues, arena and adapters agree; runs when idle and in every test."""
        self.arena.check_integrity()
        self.adapters.check_integrity()
        self.queues.check_integrity()
        if self.speculation is not None:
            self.speculation.check_integrity()
        alive = {r for g in self.groups.values() for r in g.requests if r.finish_reason is None}
        assert alive == {*self.queues.running, *self.queues.waiting}
        waiting = {(g.adapter.object_key, r) for r, g in self.groups.items() if g.adapter}
        entries = self.adapters.entries.values()
        assert waiting == {(entry.key, r) for entry in entries for r in entry.waiters}

    # ---- launching, and what came of it ----

    def _row(self, request: Request, num_tokens: int) -> ScheduledRow:
        start, params = request.num_scheduled_tokens, request.params
        samples = request.samples_after(num_tokens)
        drafts = self.queues.drafts.get(request, ())
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
            banned = self.outputs.banned_token_ids(params, num_output_tokens, reasoning)
        scoring, generation, digest = None, 0, None
        if params.prompt_logprobs is not None:
            scoring = _scoring(request, start, start + num_tokens)
        if request.adapter_key:
            generation, _ = self.adapters.tables(request.adapter_key)
            digest = request.group.digest
        token_ids = request.tokens(start, start + num_tokens)
        # By place, which takes half the time that it takes by name.
        return ScheduledRow(
            request.request_id,
            token_ids + drafts if drafts else token_ids,
            start,
            self.kv.row_blocks(request),
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

    def _launch(self, batch: Batch, requests: list[Request]) -> None:
        self._step = batch.step
        self.arena.launch_step(batch.step)
        for request, row in zip(requests, batch.rows, strict=True):
            request.num_in_flight_tokens += len(row.token_ids)
            request.num_pending_tokens += row.sampling is not None
        restarts = [request.num_restarts for request in requests]
        launched = Launched(batch, requests, restarts, self.clock(), self._is_waiting)
        self.launched.append(launched)

    def _leave_out(
        self, launched: "Launched", number: int, request: Request, num_again: int
    ) -> None:
        """Have a row of a launched step choose no token.

        num_again: how many of its last tokens are computed again, as their logits are still needed.
        """
        launched.left_out[number] = num_again
        request.num_pending_tokens -= 1
        request.num_in_flight_tokens -= num_again

    def _force_known(self) -> None:
        """Add the forced tokens that are known, for the next step to compute with those before."""
        for request in list(self.queues.running):
            constraint = request.constraint
            if constraint is None or request.num_pending_tokens or not constraint.has_forced:
                continue
            if _may_force(request):
                self._force(request, constraint)

    def _force(self, request: Request, constraint: Constraint) -> None:
        """Add the tokens that an answer's grammar forces; its tenant pays for computing them."""
        num_before = len(request.output_token_ids)
        if self.outputs.add_tokens(request, constraint.take_forced(request.num_leased_tokens)):
            self._put_away(request)
        added = tuple(request.output_token_ids[num_before:])
        self.policy.charge(request, PREFILL_COST * len(added))
        self.constraints.lanes.figures.forced_tokens += len(added)
        self._added.append(self._progress(request, added))
        self._num_added += len(added)

    def _settle(
        self,
        request: Request,
        row: ScheduledRow,
        launched: "Launched",
        number: int,
        num_accepted: int,
    ) -> None:
        """Count a computed row, whose tokens are computed again if it lost its blocks meanwhile.

        Rejected drafts are taken back.
        """
        num_tokens = len(row.token_ids)
        if number in launched.left_out:
            num_tokens -= launched.left_out[number]
            request.num_in_flight_tokens -= num_tokens
        else:
            request.num_in_flight_tokens -= num_tokens
            request.num_pending_tokens -= row.sampling is not None
            num_tokens -= row.num_drafts - num_accepted
        if launched.restarts[number] == request.num_restarts:
            request.num_computed_tokens += num_tokens
        prompt = request.prompt
        if prompt.num_tokens_done == request.num_prompt_tokens:
            return
        if request.is_first and prompt.num_tokens_done == 0:
            prompt.num_cached_tokens = request.num_found_tokens
        done = min(row.end, request.num_prompt_tokens)
        prompt.num_tokens_done = max(prompt.num_tokens_done, done)

    def _note_adapter(self, group: RequestGroup, applied_digest: str) -> None:
        """Note the adapter that the step says it applied, which is what the customer is told."""
        assert applied_digest == group.digest, "another adapter was applied"
        group.applied_digest = applied_digest

    def _take(
        self,
        request: Request,
        row: ScheduledRow,
        number: int,
        tokens: StepTokens,
        result: StepResult,
    ) -> None:
        """Take a row's result: note it for the journal, and send it to the gateway."""
        token_id = tokens.token_ids[number]
        chosen: tuple[int, ...] = ()
        if token_id is not None and token_id != BAD_LOGITS:
            chosen = (token_id,)
            if row.num_drafts:
                chosen = (*row.draft_token_ids[: tokens.num_accepted.get(number, 0)], token_id)
        result.progress.append(self._progress(request, () if request.is_beam else chosen))
        if token_id == BAD_LOGITS:
            self._end_group(request.group, Ending("error", "engine_failure", NOT_FINITE))
            return
        if row.scoring is not None:
            assert row.start + row.scoring.first == request.num_scored_tokens, "scored twice"
            self.outputs.add_prompt_logprobs(request, tokens.prompt_logprobs[number])
        if row.num_drafts and chosen:
            self._note_drafts(request, row.num_drafts, len(chosen) - 1)
        ending: Ending | None = None
        if chosen and not request.is_beam:
            ending = self.outputs.add_tokens(request, chosen, tokens.logprobs.get(number, ()))
        elif not request.params.max_tokens and row.end == request.num_prompt_tokens:
            ending = Ending("length", "max_tokens")
            self.outputs.finish(request, ending)
        self.kv.settle(request)  # accepted drafts are tokens by now
        if ending:
            self._put_away(request)
            return
        if chosen and request.is_beam:
            if self.searches.take(request, tokens.logprobs[number][0]):
                self._end_search(request.prompt, None)
        elif chosen and request.constraint is not None:
            request.constraint.advance(chosen)
            if request.num_in_flight_tokens and (drafts := self.queues.drafts.get(request)):
                request.constraint.look_ahead(drafts)  # they follow the token that was pending
        if len(chosen) <= row.num_drafts:
            self.kv.trim(request)

    def _end_search(self, prompt: Prompt, ending: Ending | None) -> None:
        """End the answers to a prompt with the best beams; they are paid for token by token.

        ending: of a search that is cut off.
        """
        num_rows = self.searches.num_rows(prompt)
        num_tokens = 0
        for answer, token_ids in self.searches.end(prompt, ending):
            self._put_away(answer)
            self._added.append(self._progress(answer, token_ids))
            num_tokens += len(token_ids)
        self._num_added += max(0, num_tokens - num_rows)

    def _note_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        request.group.num_accepted_tokens += num_accepted
        request.group.num_rejected_tokens += num_drafts - num_accepted
        if self.speculation is not None:
            self.speculation.note(request, num_drafts, num_accepted)

    @staticmethod
    def _progress(request: Request, new_token_ids: tuple[int, ...]) -> RequestProgress:
        group = request.group
        return RequestProgress(
            request.request_id,
            group.num_prompt_tokens_done,
            new_token_ids,
            request.index,
            group.num_cached_tokens,
        )

    def _note_speed(self, launched: "Launched") -> None:
        """Learn the prefill speed, a cost of preemption, from steps that are mostly prefill."""
        now, batch = self.clock(), launched.batch
        seconds = now - max(launched.at, self._finished_at)
        since_last_s = now - self._finished_at
        self._finished_at, self._step_s = now, seconds
        counts = [len(row.token_ids) - row.num_drafts for row in batch.rows]
        num_prefill = sum(count for count in counts if count > 1)
        if 2 * num_prefill > batch.num_tokens:
            self.kv.swap.costs.note_prefill(batch.num_tokens, seconds)
        if self.speculation is not None and batch.rows and not num_prefill:
            num_drafts = sum(row.num_drafts for row in batch.rows)
            num_tokens = batch.num_tokens - num_drafts
            if launched.is_after_pause:
                self.speculation.note_after_pause(num_tokens, num_drafts, since_last_s)
            else:
                self.speculation.note_step(num_tokens, num_drafts, seconds)

    # ---- endings ----

    def _end_overdue(self) -> None:
        now = self.clock()
        if now < self._first_due_at:
            return
        for group in list(self.groups.values()):
            waited_s, message = now - group.arrived_at, group.message
            if waited_s >= message.deadline_s:
                self._end_group(group, Ending("length", "deadline"))
            elif group.first_token_at is None and waited_s >= message.first_token_timeout_s:
                self._end_group(group, self._late(group))
        self._first_due_at = min(map(_due_at, self.groups.values()), default=math.inf)

    def _end_unleased(self) -> None:
        """End the answers that have waited long enough for a longer lease."""
        for request, until in list(self.outputs.unleased.items()):
            is_waiting = request.finish_reason is None and request.is_unleased
            if is_waiting and self.clock() < until:
                continue
            del self.outputs.unleased[request]
            if is_waiting:
                self.outputs.finish(request, Ending("length", "budget"))
                self._put_away(request)

    def _late(self, group: RequestGroup) -> Ending:
        """Ending of a request without a token in time, for lack of its adapter or of a seat."""
        if group.adapter and not self.adapters.is_ready(key := group.adapter.object_key):
            retry_after_s = self.adapters.retry_after_s(key)
            return Ending("error", "adapter_loading", "still on its way", retry_after_s)
        return Ending("error", "first_token_timeout")

    def _end_group(self, group: RequestGroup, ending: Ending) -> None:
        """End every answer that has not ended yet."""
        for prompt in group.prompts:
            if prompt in self.searches:
                self._end_search(prompt, ending)
        for request in group.requests:
            if request.finish_reason is None:
                self.outputs.finish(request, ending)
                self._put_away(request)

    def _put_away(self, request: Request) -> None:
        """Give back everything that an ended answer held."""
        self.queues.remove(request)
        self.policy.ended(request)
        if self.speculation is not None:
            self.speculation.end(request)
        if request.group.is_over:
            if request.adapter_key:
                self.adapters.leave(request.adapter_key, request.request_id)
            del self.groups[request.request_id]
            self._ended.append(request.group)


def _due_at(group: RequestGroup) -> float:
    """Time from which the group is overdue, if it does not get a token or its end before."""
    timeout_s = group.message.deadline_s
    if group.first_token_at is None:
        timeout_s = min(timeout_s, group.message.first_token_timeout_s)
    return group.arrived_at + timeout_s


def _may_force(request: Request) -> bool:
    """Whether tokens without an alternative are taken without the model: not the first one, since
    only a step that has ended says which adapter it applied, not where logprobs are wanted, and not
    where a step may give an answer one token only, nor where no lease covers them.
    """
    if request.num_computed_tokens < request.num_prompt_tokens or request.is_unleased:
        return False
    return request.params.logprobs is None and request.message.drafts


def _scoring(request: Request, start: int, end: int) -> Scoring | None:
    """The prompt tokens that get a logprob when the request's tokens [start, end) are computed."""
    num_top, first = request.params.prompt_logprobs, max(start, request.num_scored_tokens)
    end = min(end, request.num_prompt_tokens - 1)
    if num_top is None or not request.num_tokens_to_score or first >= end:
        return None
    return Scoring(first - start, request.tokens(first + 1, end + 1), num_top)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight.

    restarts: `num_restarts` of its requests at its launch.   at: its time.
    is_after_pause: whether no other step ran meanwhile, since its rows waited for the last one.
    left_out: by number, rows that choose no token after all: how many of their last tokens are
    computed again.
    """

    batch: Batch
    requests: Sequence[Request]
    restarts: Sequence[int]
    at: float
    is_after_pause: bool
    left_out: dict[int, int] = field(default_factory=dict)
