"""Which tokens of which requests run in the next step, and what their results mean.

One rule: every request's `num_computed_tokens` catches up with its `num_tokens`. Prefill, chunked
prefill, prefix hits, decode and recomputation after preemption are all this rule under one budget.

`schedule` may be called again before the step that runs has been handed to `update`: what that step
computes is `num_in_flight_tokens`, the tokens it chooses are pending.
"""

import secrets
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.batch import BAD_LOGITS, Batch, ScheduledRow, StepResult, StepTokens
from engine.config import SchedulerConfig
from engine.fairness import DECODE_COST, PREFILL_COST, make_policy
from engine.kv_cache import KVCache
from engine.messages import AddRequest, ExtendLease, RequestProgress, StopCause, TokenLogprobs
from engine.outputs import Ending, Outputs
from engine.prefix_cache import BlockHasher
from engine.request import PENDING_TOKEN, Request, RequestGroup
from engine.stops import StopMatcher
from engine.swap import PreemptionCosts, SwapSpace
from lora.layout import Layout
from lora.manager import AdapterManager

_MASK = (1 << 64) - 1


class ArenaTooSmall(ValueError):
    """A request of max_model_len tokens would never fit."""

    def __init__(self, max_model_len: int, num_slabs: int, layout: Layout) -> None:
        tokens = num_slabs * layout.block_size
        wanted = layout.num_blocks(max_model_len) * layout.slab_bytes
        super().__init__(
            f"the arena holds {tokens} tokens and max_model_len is {max_model_len}: "
            f"give arena_bytes of at least {wanted}, or a smaller max_model_len"
        )


class Scheduler:
    """Owns every request from `add` to its one last output.

    vocabulary: token id -> bytes, for stop strings.   swap: where preempted KV may go.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        layout: Layout,
        adapters: AdapterManager,
        vocabulary: Sequence[bytes],
        eos_token_ids: Sequence[int],
        swap: SwapSpace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if layout.num_blocks(config.max_model_len) > adapters.arena.num_slabs:
            raise ArenaTooSmall(config.max_model_len, adapters.arena.num_slabs, layout)
        self.config = config
        self.layout = layout
        self.adapters = adapters
        self.arena = adapters.arena
        self.clock = clock
        self.policy = make_policy(config.scheduling_policy, clock)
        self.hasher = BlockHasher(layout.block_size, config.public_prefixes)
        self.kv = KVCache(
            self.arena,
            layout,
            self.hasher,
            swap or SwapSpace(0, layout.slab_bytes, PreemptionCosts(clock=clock)),
            prefix_caching=config.prefix_caching,
        )
        self.outputs = Outputs(config.max_model_len, vocabulary, eos_token_ids, clock)
        self.groups: dict[str, RequestGroup] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # oldest first
        self.num_preemptions = self.num_swaps = 0
        self._num_arrivals = 0
        self._step = 0
        self._plan: dict[Request, int] = {}  # tokens of the step that is being put together
        self._short_of_room: list[Request] = []
        self._launched: deque[_Launched] = deque()
        self._finished_at = 0.0
        self._ended: list[RequestGroup] = []

    # ---- what the gateway says ----

    def add(self, gateway_id: str, message: AddRequest) -> str | None:
        """Queue a request; or say in a word why not (nothing was accepted, nothing is counted)."""
        if refusal := self._refusal(message):
            return refusal
        group = RequestGroup(gateway_id, message, arrived_at=self.clock())
        seed = message.sampling_params.seed
        seed = secrets.randbits(64) if seed is None else seed
        scope = self.hasher.scope(message)
        num_public_blocks = self.hasher.num_public_blocks(message)
        for index in range(message.sampling_params.n):
            self._num_arrivals += 1
            request = Request(
                group,
                index,
                arrival=self._num_arrivals,
                seed=(seed + index * 0x9E3779B97F4A7C15) & _MASK,
                scope=scope,
                num_public_blocks=num_public_blocks,
                stops=StopMatcher(message.sampling_params.stop),
            )
            group.requests.append(request)
            self.waiting.append(request)
        self.groups[group.request_id] = group
        if group.adapter:
            self.adapters.want(group.adapter)
        return None

    def abort(self, request_ids: Sequence[str], cause: StopCause = "aborted") -> None:
        """End requests early; what they generated stays counted. Unknown ids have ended already."""
        ending = Ending("abort" if cause == "aborted" else "error", cause)
        for request_id in request_ids:
            if group := self.groups.get(request_id):
                self._end_group(group, ending)

    def extend_lease(self, message: ExtendLease) -> None:
        if group := self.groups.get(message.request_id):
            group.message = replace(group.message, token_lease=message.token_lease)

    def abort_gateway(self, gateway_id: str) -> None:
        """The gateway is gone: nobody reads its requests any more."""
        lost = [g.request_id for g in self.groups.values() if g.gateway_id == gateway_id]
        self.abort(lost, "gateway_lost")

    @property
    def has_work(self) -> bool:
        return bool(self.groups or self._ended or self._launched)

    # ---- a step ----

    def schedule(self) -> Batch:
        """Decodes first, then prefills, then whoever waits; rows sorted by adapter."""
        self._end_overdue()
        self._plan, self._short_of_room = {}, []
        self._schedule_running()
        self._admit([request for request in list(self.waiting) if self._is_ready(request)])
        plan = sorted(self._plan.items(), key=lambda item: item[0].adapter_key or "")
        batch = Batch(
            self._step + 1,
            tuple(self._row(request, num_tokens) for request, num_tokens in plan),
            self.kv.swap.take_transfers(),
        )
        if not batch.is_empty:
            self._launch(batch, [request for request, _ in plan])
        return batch

    def update(self, batch: Batch, tokens: StepTokens) -> StepResult:
        """Take in what the oldest launched step came to; with an empty one, what else happened."""
        result = StepResult(batch.step)
        if not batch.is_empty:
            launched = self._launched.popleft()
            assert launched.batch is batch, "steps finish in the order in which they were launched"
            self.arena.finish_step(batch.step)
            self._note_speed(launched)
            for number, (row, request) in enumerate(
                zip(batch.rows, launched.requests, strict=True)
            ):
                self._settle(request, row, launched.restarts[number])
                if request.finish_reason is None:
                    logprobs = tokens.logprobs.get(number)
                    self._take(request, tokens.token_ids[number], logprobs, result)
        result.outputs, result.leases_low = self.outputs.take()
        result.ended, self._ended = self._ended, []
        return result

    def check_integrity(self) -> None:
        """Nothing is lost between queues, arena and adapters; run when idle and in every test."""
        self.arena.check_integrity()
        self.adapters.check_integrity()
        requests = [r for g in self.groups.values() for r in g.requests if r.finish_reason is None]
        assert sorted(requests, key=id) == sorted([*self.running, *self.waiting], key=id)
        assert [r.arrival for r in self.waiting] == sorted(r.arrival for r in self.waiting)
        self.kv.check_integrity(requests)
        holders = Counter(r.adapter_key for r in requests if r.holds_adapter)
        for key, entry in self.adapters.entries.items():
            assert entry.users == holders[key]

    # ---- running requests ----

    def _schedule_running(self) -> None:
        """Every decode, then as many prompt tokens as the budget leaves; room for all of them."""

        def urgency(request: Request) -> tuple[bool, int, float, int]:
            served = self.policy.served(request)
            return not request.is_decoding, request.priority, served, request.arrival

        for request in sorted(self.running, key=urgency):
            num_tokens = min(self._num_tokens_to_do(request), self._budget)
            if num_tokens > 0 and request in self.running and self._grow(request, num_tokens):
                self._plan[request] = num_tokens
        for request, num_tokens in self._plan.items():
            self._charge(request, num_tokens)

    @property
    def _budget(self) -> int:
        """Tokens that the step may still take."""
        return self.config.max_num_batched_tokens - sum(self._plan.values())

    def _num_tokens_to_do(self, request: Request) -> int:
        """None while a pending token is certain to be its last."""
        num_pending = request.num_pending_tokens
        count = len(request.output_token_ids) + num_pending
        longest = self.config.max_model_len
        is_last = count >= request.max_tokens or request.num_tokens + num_pending >= longest
        return 0 if num_pending and is_last else request.num_tokens_to_do

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Blocks for a running request; others give way, and at last itself."""
        missing = self.kv.num_missing(request, num_tokens)
        while not self.arena.make_room(missing):
            if self.arena.num_free + self.arena.num_coming >= missing:
                return False  # what was given up is free once the running step has finished
            victim = self._victim()
            self._preempt(victim)
            if victim is request:
                return False
        self.kv.allocate(request, num_tokens)
        return True

    def _victim(self) -> Request:
        """Who gives way: reservations of those that only wait, then the lowest class, the most
        served tenant, the newest.
        """
        reserved = next((r for r in reversed(self.waiting) if r.block_ids), None)
        return reserved or max(
            self.running, key=lambda r: (r.priority, self.policy.served(r), r.arrival)
        )

    def _preempt(self, request: Request) -> None:
        """Give back its blocks: copied to the host, or computed again when there is room."""
        if request in self.running:
            self._plan.pop(request, None)
            self.running.remove(request)
            insort(self.waiting, request, key=lambda r: r.arrival)
            self.num_preemptions += 1
            self.num_swaps += self.kv.preempt(request)
        else:
            self.kv.give_back(request)
        self._release_adapter(request)

    # ---- admission ----

    def _refusal(self, message: AddRequest) -> str | None:
        """Why this request cannot be accepted, ever or now."""
        if message.request_id in self.groups:
            return "duplicate_request_id"
        if len(self.waiting) + message.sampling_params.n > self.config.max_waiting:
            return "queue_full"
        if not 0 < len(message.prompt_token_ids) < self.config.max_model_len:
            return "prompt_too_long"
        return None

    def _is_ready(self, request: Request) -> bool:
        """Whether nothing but room keeps it from running."""
        if request.num_in_flight_tokens:
            return False  # preempted, and its last step still runs
        first = request.group.requests[0]
        if request is not first and self.config.prefix_caching:
            # The others find in the cache what the first answer computes.
            prompt_done = request.group.num_prompt_tokens_done == request.num_prompt_tokens
            if not prompt_done and first.finish_reason is None:
                return False
        key = request.adapter_key
        return key is None or self.adapters.is_ready(key) or self._advance_adapter(request)

    def _is_still_ready(self, request: Request) -> bool:
        """Room for those admitted before it may have cost it its adapter."""
        key = request.adapter_key
        return request.finish_reason is None and (key is None or self.adapters.is_ready(key))

    def _advance_adapter(self, request: Request) -> bool:
        """Take its adapter's next step towards the arena; whether it is there."""
        assert request.adapter is not None
        key = request.adapter.object_key
        if (failure := self.adapters.failure(key)) is not None:
            cause: StopCause = "adapter_rejected" if failure.is_permanent else "adapter_failed"
            self._end_group(request.group, Ending("error", cause, failure.error))
            return False
        self.adapters.want(request.adapter)
        needed = self.adapters.slabs_needed(key)
        if needed and not self._is_held_up(request):
            self._place(request, needed)
        return needed is not None and self.adapters.is_ready(key)

    def _place(self, request: Request, num_slabs: int) -> None:
        """One transaction: the adapter's slabs and the request's first chunk, or neither."""
        assert request.adapter is not None
        first_chunk = min(request.num_tokens_to_do, self.config.max_num_batched_tokens)
        num_blocks = self.kv.num_missing(request, first_chunk)
        if num_slabs + self._max_blocks(request) > self.arena.num_slabs:
            error = "the adapter does not fit into the arena"
            self._end_group(request.group, Ending("error", "adapter_rejected", error))
        elif self.arena.make_room(num_slabs + num_blocks):
            size_bytes = self.adapters.place(request.adapter.object_key)
            request.load_service = size_bytes / self.layout.kv_bytes_per_token
            reserved = self._reserve(request, first_chunk, is_whole=False)
            assert reserved, "room was made for both"
        else:
            self._short_of_room.append(request)

    def _admit(self, ready: list[Request]) -> None:
        """Move waiting requests to running, in the policy's order, while there is room."""
        admitted: list[Request] = []
        for request in self.policy.order(ready):
            if self._budget <= 0:
                break
            if self._is_held_up(request) or not self._is_still_ready(request):
                continue
            if not self._fits_rank_budget(request):
                # Skip, do not stop: the requests behind may use adapters that already run.
                self._short_of_room.append(request)
            elif not self._start(request):
                break
            else:
                admitted.append(request)
        for passed in self._short_of_room:
            passed.num_skips += sum(_is_behind(request, passed) for request in admitted)

    def _start(self, request: Request) -> bool:
        """A seat and blocks for it, those of a lower class if need be."""
        seats = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        while len(self.running) >= seats or not self._reserve(request, self._budget, is_whole=True):
            lower = [r for r in self.running if r.priority > request.priority]
            if not lower or self.arena.num_coming:
                return False
            self._preempt(max(lower, key=lambda r: (r.priority, self.policy.served(r), r.arrival)))
        self.waiting.remove(request)
        self.running.append(request)
        num_tokens = min(request.num_tokens_to_do, self._budget)
        self._plan[request] = num_tokens
        self._charge(request, num_tokens)
        return True

    def _is_held_up(self, request: Request) -> bool:
        """Whether somebody before it was passed so often that now nobody passes any more.

        Who has blocks already goes on: they are what the one before waits for.
        """
        return not request.block_ids and any(
            passed.num_skips >= self.config.max_skips and _is_behind(request, passed)
            for passed in self._short_of_room
        )

    def _fits_rank_budget(self, request: Request) -> bool:
        """Whether the adapters of the running batch and its own are not too many bytes a step."""
        if request.adapter is None:
            return True
        ranks = {r.adapter_key: r.adapter.rank for r in self.running if r.adapter}
        if not ranks or request.adapter_key in ranks:
            return True
        return sum(ranks.values()) + request.adapter.rank <= self.config.max_sum_ranks_per_step

    def _reserve(self, request: Request, budget: int, *, is_whole: bool) -> bool:
        """Its adapter held, what is cached taken, blocks for its next tokens; or nothing.

        is_whole: a request that starts anew gets them only where all its tokens would fit now.
        """
        held_before, is_new = request.holds_adapter, not request.block_ids
        # Held first: making room for the blocks must not evict the request's own adapter.
        self._hold_adapter(request)
        self.kv.take_cached(request)
        num_tokens = min(request.num_tokens_to_do, budget)
        wanted = request.num_tokens_to_do if is_new and is_whole else num_tokens
        if self.arena.make_room(self.kv.num_missing(request, wanted)):
            self.kv.allocate(request, num_tokens)
            return True
        if is_new:
            self.kv.give_back(request)
        if not held_before:
            self._release_adapter(request)
        return False

    def _max_blocks(self, request: Request) -> int:
        """Blocks it may come to need, all tokens generated."""
        longest = request.num_prompt_tokens + request.max_tokens
        return self.layout.num_blocks(min(longest, self.config.max_model_len))

    def _charge(self, request: Request, num_tokens: int) -> None:
        """Service of the next `num_tokens`; what is computed again or was cached is free."""
        start = max(request.num_scheduled_tokens, request.num_charged_tokens)
        end = min(request.num_scheduled_tokens + num_tokens, request.num_prompt_tokens)
        service = max(end - start, 0) * PREFILL_COST + request.load_service
        if num_tokens == request.num_tokens_to_do:
            service += DECODE_COST
        request.num_charged_tokens = max(end, request.num_charged_tokens)
        request.load_service = 0.0
        self.policy.charge(request, service)

    # ---- launching, and what came of it ----

    def _row(self, request: Request, num_tokens: int) -> ScheduledRow:
        start = request.num_scheduled_tokens
        samples = num_tokens == request.num_tokens_to_do
        history: dict[str, tuple[int, ...]] = {}
        if samples and request.params.has_penalties:
            pending = (PENDING_TOKEN,) * request.num_pending_tokens
            history = {
                "prompt_token_ids": request.message.prompt_token_ids,
                "output_token_ids": (*request.output_token_ids, *pending),
            }
        generation = 0
        if request.adapter_key:
            generation, _ = self.adapters.tables(request.adapter_key)
        return ScheduledRow(
            request_id=request.request_id,
            index=request.index,
            token_ids=request.tokens(start, start + num_tokens),
            start=start,
            block_ids=tuple(request.block_ids),
            adapter_key=request.adapter_key,
            adapter_digest=request.group.digest,
            adapter_generation=generation,
            sampling=request.params if samples else None,
            seed=request.seed,
            num_output_tokens=len(request.output_token_ids) + request.num_pending_tokens,
            **history,
        )

    def _launch(self, batch: Batch, requests: list[Request]) -> None:
        self._step = batch.step
        self.arena.launch_step(batch.step)
        for request, row in zip(requests, batch.rows, strict=True):
            request.num_in_flight_tokens += len(row.token_ids)
            request.num_pending_tokens += row.sampling is not None
        restarts = [request.num_restarts for request in requests]
        self._launched.append(_Launched(batch, requests, restarts, self.clock()))

    def _settle(self, request: Request, row: ScheduledRow, num_restarts: int) -> None:
        """A row has been computed. What was given back meanwhile has to be computed again."""
        request.num_in_flight_tokens -= len(row.token_ids)
        request.num_pending_tokens -= row.sampling is not None
        if num_restarts == request.num_restarts:
            request.num_computed_tokens += len(row.token_ids)
        group = request.group
        if request.index == 0 and group.num_prompt_tokens_done == 0:
            group.num_cached_tokens = request.num_found_tokens
        done = min(row.start + len(row.token_ids), request.num_prompt_tokens)
        group.num_prompt_tokens_done = max(group.num_prompt_tokens_done, done)

    def _take(
        self,
        request: Request,
        token_id: int | None,
        logprobs: TokenLogprobs | None,
        result: StepResult,
    ) -> None:
        """What a row chose, for the journal and for whoever waits for it."""
        is_token = token_id is not None and token_id != BAD_LOGITS
        result.progress.append(
            RequestProgress(
                request_id=request.request_id,
                index=request.index,
                num_prompt_tokens=request.group.num_prompt_tokens_done,
                num_cached_tokens=request.group.num_cached_tokens,
                new_token_ids=(token_id,) if is_token and token_id is not None else (),
            )
        )
        if token_id == BAD_LOGITS:
            error = "the logits are not finite"
            self._end_group(request.group, Ending("error", "engine_failure", error))
            return
        self.kv.publish(request)
        if token_id is not None and self.outputs.add_token(request, token_id, logprobs):
            self._put_away(request)

    def _note_speed(self, launched: "_Launched") -> None:
        """What preemption would cost is told by steps that are mostly prefill."""
        now, batch = self.clock(), launched.batch
        seconds = now - max(launched.at, self._finished_at)
        self._finished_at = now
        num_prefill = sum(len(row.token_ids) for row in batch.rows if len(row.token_ids) > 1)
        if 2 * num_prefill > batch.num_tokens:
            self.kv.swap.costs.note_prefill(batch.num_tokens, seconds)

    # ---- endings ----

    def _end_overdue(self) -> None:
        now = self.clock()
        for group in list(self.groups.values()):
            waited_s, message = now - group.arrived_at, group.message
            if waited_s >= message.deadline_s:
                self._end_group(group, Ending("length", "deadline"))
            elif group.first_token_at is None and waited_s >= message.first_token_timeout_s:
                self._end_group(group, Ending("error", "first_token_timeout"))

    def _end_group(self, group: RequestGroup, ending: Ending) -> None:
        """End every answer that has not ended yet."""
        for request in group.requests:
            if request.finish_reason is None:
                self.outputs.finish(request, ending)
                self._put_away(request)

    def _put_away(self, request: Request) -> None:
        """An answer has ended: everything it held is given back."""
        self.kv.forget(request)
        self._release_adapter(request)
        (self.running if request in self.running else self.waiting).remove(request)
        self.policy.ended(request)
        if request.group.is_over:
            del self.groups[request.request_id]
            self._ended.append(request.group)

    def _hold_adapter(self, request: Request) -> None:
        if request.adapter_key and not request.holds_adapter:
            self.adapters.acquire(request.adapter_key)
            request.holds_adapter = True

    def _release_adapter(self, request: Request) -> None:
        if request.adapter_key and request.holds_adapter:
            self.adapters.release(request.adapter_key)
            request.holds_adapter = False


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step under way. restarts: `num_restarts` of its requests when it began.   at: seconds."""

    batch: Batch
    requests: Sequence[Request]
    restarts: Sequence[int]
    at: float


def _is_behind(request: Request, passed: Request) -> bool:
    """Whether it came later, and is of no higher class."""
    return request.arrival > passed.arrival and request.priority >= passed.priority
