"""Schedules which tokens of which requests run in the next step, and takes in the results.

One rule: every request's `num_computed_tokens` catches up with its `num_tokens`. Prefill, chunked
prefill, prefix hits, decode and recomputation after preemption are all this rule under one budget.

`schedule` may be called again before the step that runs has been handed to `update`: tokens that it
computes are counted by `num_in_flight_tokens`, and the tokens that it chooses are pending.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.config import SchedulerConfig
from engine.drafts.speculation import Speculation
from engine.grammar.constraints import Constraints
from engine.grammar.matcher import Grammars, Mask
from engine.kv.block_hash import BlockHasher
from engine.kv.cache import KVCache
from engine.kv.swap import PreemptionCosts, SwapSpace
from engine.requests.request import Prompt, Request, RequestGroup
from engine.requests.stops import StopMatcher
from engine.scheduling.beam_searches import BeamSearches
from engine.scheduling.endings import Endings
from engine.scheduling.fairness import make_policy
from engine.scheduling.forced import Forced
from engine.scheduling.in_flight import InFlight
from engine.scheduling.outputs import Ending, Outputs
from engine.scheduling.queues import Queues
from engine.scheduling.starts import Starts
from engine.steps.batch import BAD_LOGITS, Batch, ScheduledRow, StepTokens
from engine.wire.messages import AddRequest, ExtendLease, StopCause
from lora.entry import Waiter
from lora.layout import Layout
from lora.manager import AdapterManager

NOT_FINITE = "the logits are not finite"
_MASK = (1 << 64) - 1
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
        self.starts = Starts(self.queues, self.constraints, clock)
        self.outputs = Outputs(config.max_model_len, vocabulary, eos_token_ids, clock)
        self.searches = BeamSearches(self.queues, self.outputs)
        self.speculation = speculation or Speculation.off()
        self.endings = Endings(self.queues, self.outputs, self.searches, self.speculation)
        self.groups = self.endings.groups
        self.forced = Forced(self.constraints, self.outputs, self.policy, self.endings)
        estimate = self.speculation.estimate
        self.in_flight = InFlight(adapters, self.kv, self.outputs, estimate, clock)
        self._num_arrivals = 0

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
        self.endings.expect(group)
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
                base_scope=self.hasher.scope(message.cache_salt, None),
                scope=self.hasher.scope(message.cache_salt, group.digest),
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
                self.endings.end_group(group, ending)

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
        self.speculation.forget_drafts(tenant_id, adapter_digest)

    @property
    def has_work(self) -> bool:
        return bool(self.groups or self.outputs.result.ended or self.in_flight.steps)

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
        """Launch a step: decodes, then prefills, then waiting requests, and drafts of them all."""
        self.endings.end_overdue(self.clock())
        self.forced.add_known(self.queues.running)
        self.queues.plan_running()
        for group, ending in self.starts.run():
            self.endings.end_group(group, ending)
        self._add_drafts()
        return self.in_flight.launch(self.queues.plan)

    def constrain(self) -> dict[int, Sequence[Mask]]:
        """Masks of the newest step's constrained rows; see `Forced.masks`."""
        return self.forced.masks(self.in_flight.steps[-1], self.in_flight.step_s)

    def _add_drafts(self) -> None:
        """Have the step's rows verify drafts where that brings more tokens a second."""
        plan = self.queues.plan
        self.speculation.keep_only(self.queues.running)
        drafts = self.speculation.choose(plan.tokens, plan.budget, self.outputs.before_end)
        for request, token_ids in drafts.items():
            self.queues.add_drafts(request, token_ids)
        for request, token_ids in plan.drafts.items():
            if request.constraint is not None and not request.num_pending_tokens:
                request.constraint.look_ahead(token_ids)

    def update(self, batch: Batch, tokens: StepTokens) -> None:
        """Apply the results of the oldest launched step, unless it is an empty one.

        `outputs` has what answers get.
        """
        if batch.is_empty:
            return
        launched = self.in_flight.finish(batch)
        for number, (row, request) in enumerate(zip(batch.rows, launched.requests, strict=True)):
            launched.settle(number, tokens.num_accepted.get(number, 0))
            if number in tokens.adapter_digests:
                # The customer is told what the step says it applied.
                request.group.applied_digest = tokens.adapter_digests[number]
                assert request.group.applied_digest == request.group.digest, "another adapter"
            if request.finish_reason is None:
                self._take(request, row, number, tokens)

    def check_integrity(self) -> None:
        """Assert that queues, arena and adapters agree; runs when idle and in every test."""
        self.arena.check_integrity()
        self.adapters.check_integrity()
        self.queues.check_integrity()
        self.speculation.check_integrity()
        alive = {r for g in self.groups.values() for r in g.requests if r.finish_reason is None}
        assert alive == {*self.queues.running, *self.queues.waiting}
        waiting = {(g.adapter.object_key, r) for r, g in self.groups.items() if g.adapter}
        entries = self.adapters.entries.values()
        assert waiting == {(entry.key, r) for entry in entries for r in entry.waiters}

    def _take(self, request: Request, row: ScheduledRow, number: int, tokens: StepTokens) -> None:
        """Take a row's result: note it for the journal, and send it to the gateway."""
        token_id = tokens.token_ids[number]
        chosen: tuple[int, ...] = ()
        if token_id is not None and token_id != BAD_LOGITS:
            chosen = (token_id,)
            if row.num_drafts:
                chosen = (*row.draft_token_ids[: tokens.num_accepted.get(number, 0)], token_id)
        self.outputs.note_progress(request, () if request.is_beam else chosen)
        if token_id == BAD_LOGITS:
            ending = Ending("error", "engine_failure", NOT_FINITE)
            self.endings.end_group(request.group, ending)
            return
        if row.scoring is not None:
            assert row.start + row.scoring.first == request.num_scored_tokens, "scored twice"
            self.outputs.add_prompt_logprobs(request, tokens.prompt_logprobs[number])
        if row.num_drafts and chosen:
            self.speculation.note(request, row.num_drafts, len(chosen) - 1)
        ended: Ending | None = None
        if chosen and not request.is_beam:
            ended = self.outputs.add_tokens(request, chosen, tokens.logprobs.get(number, ()))
        elif not request.params.max_tokens and row.end == request.num_prompt_tokens:
            ended = Ending("length", "max_tokens")
            self.outputs.finish(request, ended)
        self.kv.settle(request)  # accepted drafts are tokens by now
        if ended:
            self.endings.put_away(request)
            return
        if chosen and request.is_beam:
            if self.searches.take(request, tokens.logprobs[number][0]):
                self.endings.end_search(request.prompt, None)
        elif chosen and request.constraint is not None:
            request.constraint.advance(chosen)
            if request.num_in_flight_tokens and (drafts := self.queues.plan.drafts.get(request)):
                request.constraint.look_ahead(drafts)  # they follow the token that was pending
        if len(chosen) <= row.num_drafts:
            self.kv.trim(request)
