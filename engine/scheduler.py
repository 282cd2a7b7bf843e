"""Which tokens of which requests run in the next step, and what their results mean.

One rule: every request's `num_computed_tokens` catches up with its `num_tokens`. Prefill, chunked
prefill, decode and recomputation after preemption are all this rule under one token budget.
"""

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.batch import BAD_LOGITS, Batch, ScheduledRow, StepResult
from engine.config import SchedulerConfig
from engine.messages import (
    AddRequest,
    ExtendLease,
    FinishReason,
    LeaseLow,
    RequestOutput,
    RequestProgress,
    StopCause,
)
from engine.request import Request
from engine.stops import StopMatcher
from lora.layout import Layout
from lora.manager import AdapterManager

_LEASE_LOW_TOKENS = 64


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
    """Owns every request from `add` to its one final output.

    vocabulary: token id -> bytes, for stop strings.   clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        layout: Layout,
        adapters: AdapterManager,
        vocabulary: Sequence[bytes],
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if layout.num_blocks(config.max_model_len) > adapters.arena.num_slabs:
            raise ArenaTooSmall(config.max_model_len, adapters.arena.num_slabs, layout)
        self.config = config
        self.layout = layout
        self.adapters = adapters
        self.arena = adapters.arena
        self.vocabulary = vocabulary
        self.eos_token_ids = frozenset(eos_token_ids)
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0
        self._step = 0
        self._ended: list[tuple[Request, RequestOutput]] = []

    # ---- what the gateway says ----

    def add(self, gateway_id: str, message: AddRequest) -> str | None:
        """Queue a request; or say in a word why not (nothing was accepted, nothing is counted)."""
        if refusal := self._refusal(message):
            return refusal
        seed = message.sampling_params.seed
        request = Request(
            gateway_id,
            message,
            arrived_at=self.clock(),
            seed=secrets.randbits(64) if seed is None else seed,
            stops=StopMatcher(message.sampling_params.stop),
        )
        self.requests[request.request_id] = request
        self.waiting.append(request)
        if request.adapter:
            self.adapters.want(request.adapter)
        return None

    def abort(self, request_ids: Sequence[str], cause: StopCause = "aborted") -> None:
        """End requests early; what they generated stays counted. Unknown ids have ended already."""
        for request_id in request_ids:
            if request := self.requests.get(request_id):
                self._end(request, "abort" if cause == "aborted" else "error", cause)

    def extend_lease(self, message: ExtendLease) -> None:
        if request := self.requests.get(message.request_id):
            request.message = replace(request.message, token_lease=message.token_lease)

    def abort_gateway(self, gateway_id: str) -> None:
        """The gateway is gone: nobody reads its requests any more."""
        lost = [r.request_id for r in self.requests.values() if r.gateway_id == gateway_id]
        self.abort(lost, "gateway_lost")

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._ended)

    # ---- a step ----

    def schedule(self) -> Batch:
        """Decodes first, then prefills, then whoever waits; rows sorted by adapter."""
        self._end_overdue()
        self._step += 1
        rows: list[tuple[Request, int]] = []
        budget = self.config.max_num_batched_tokens
        for request in sorted(self.running, key=lambda r: r.num_tokens_to_do > 1):
            num_tokens = min(request.num_tokens_to_do, budget)
            if num_tokens > 0 and request in self.running and self._grow(request, num_tokens):
                rows.append((request, num_tokens))
                budget -= num_tokens
        rows = [row for row in rows if row[0] in self.running]  # not preempted since
        rows += self._admit(budget, self.config.max_num_seqs - len(self.running))
        self.arena.launch_step(self._step)
        rows.sort(key=lambda row: row[0].adapter_key or "")
        return Batch(self._step, tuple(self._row(*row) for row in rows))

    def update(self, batch: Batch, sampled: Sequence[int | None]) -> StepResult:
        """Take in a step's tokens: one for every row with `sampling`, None for the others."""
        self.arena.finish_step(batch.step)
        result = StepResult(batch.step)
        for row, token_id in zip(batch.rows, sampled, strict=True):
            if request := self.requests.get(row.request_id):
                self._update_row(request, row, token_id, result)
        for request, output in self._ended:
            result.ended.append(request)
            result.outputs.append((request.gateway_id, output))
        self._ended = []
        return result

    def check_integrity(self) -> None:
        """Nothing is lost between queues, arena and adapters; run when idle and in every test."""
        self.arena.check_integrity()
        self.adapters.check_integrity()
        assert set(self.requests.values()) == {*self.running, *self.waiting}
        for request in self.requests.values():
            assert self.arena.owned_by(request.request_id) == len(request.block_ids)
            assert len(request.block_ids) >= self.layout.num_blocks(request.num_computed_tokens)
        holders = Counter(r.adapter_key for r in self.requests.values() if r.holds_adapter)
        for key, entry in self.adapters.entries.items():
            assert entry.users == holders[key]

    # ---- admission ----

    def _refusal(self, message: AddRequest) -> str | None:
        """Why this request cannot be accepted, ever or now."""
        if message.request_id in self.requests:
            return "duplicate_request_id"
        if len(self.waiting) >= self.config.max_waiting:
            return "queue_full"
        if not 0 < len(message.prompt_token_ids) < self.config.max_model_len:
            return "prompt_too_long"
        return None

    def _admit(self, budget: int, num_seats: int) -> list[tuple[Request, int]]:
        """Move waiting requests to running, first come first served, while there is room."""
        rows: list[tuple[Request, int]] = []
        for request in list(self.waiting):
            if budget <= 0 or num_seats <= 0:
                break
            if not self._is_adapter_ready(request):
                # Skip, do not stop: the requests behind may use adapters that are already resident.
                continue
            num_tokens = min(request.num_tokens_to_do, budget)
            if not self._reserve(request, num_tokens, evict=True):
                break
            self.waiting.remove(request)
            self.running.append(request)
            rows.append((request, num_tokens))
            budget -= num_tokens
            num_seats -= 1
        return rows

    def _is_adapter_ready(self, request: Request) -> bool:
        """Whether its adapter is in the arena; if not, take the next step towards that."""
        if request.adapter is None:
            return True
        key = request.adapter.object_key
        if (failure := self.adapters.failure(key)) is not None:
            cause: StopCause = "adapter_rejected" if failure.is_permanent else "adapter_failed"
            self._end(request, "error", cause, failure.error)
            return False
        self.adapters.want(request.adapter)
        needed = self.adapters.slabs_needed(key)
        if needed:
            self._place(request, needed)
        return needed is not None and self.adapters.is_ready(key)

    def _place(self, request: Request, num_slabs: int) -> None:
        """One transaction: the adapter's slabs and the request's first chunk, or neither."""
        assert request.adapter is not None
        first_chunk = min(request.num_tokens_to_do, self.config.max_num_batched_tokens)
        blocks = self._blocks_missing(request, first_chunk)
        if num_slabs + self._max_blocks(request) > self.arena.num_slabs:
            error = "the adapter does not fit into the arena"
            self._end(request, "error", "adapter_rejected", error)
        elif self.adapters.make_room(num_slabs + blocks):
            self.adapters.place(request.adapter.object_key)
            reserved = self._reserve(request, first_chunk, evict=False)
            assert reserved, "room was made for both"

    def _reserve(self, request: Request, num_tokens: int, *, evict: bool) -> bool:
        """Blocks for the next `num_tokens`, and its adapter held, or nothing."""
        # Held first: making room for the blocks must not evict the request's own adapter.
        held_before = request.holds_adapter
        if request.adapter and not held_before:
            self.adapters.acquire(request.adapter.object_key)
            request.holds_adapter = True
        missing = self._blocks_missing(request, num_tokens)
        if missing > self.arena.num_free and not (evict and self.adapters.make_room(missing)):
            if not held_before:
                self._release_adapter(request)
            return False
        request.block_ids += self.arena.allocate(missing, request.request_id)
        return True

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Blocks for a running request; others give way, the newest first, and at last itself."""
        missing = self._blocks_missing(request, num_tokens)
        while not self.adapters.make_room(missing):
            victim = self._victim(request)
            self._preempt(victim)
            if victim is request:
                return False
        request.block_ids += self.arena.allocate(missing, request.request_id)
        return True

    def _victim(self, request: Request) -> Request:
        """Reservations of requests that only wait go first, then the newest running request."""
        reserved = next((r for r in reversed(self.waiting) if r.block_ids), None)
        return reserved or self.running[-1]

    def _preempt(self, request: Request) -> None:
        """Give back its blocks; it is recomputed when there is room again."""
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        if request in self.running:
            self.num_preemptions += 1
            self.running.remove(request)
            self.waiting.appendleft(request)

    def _blocks_missing(self, request: Request, num_tokens: int) -> int:
        wanted = self.layout.num_blocks(request.num_computed_tokens + num_tokens)
        return max(0, wanted - len(request.block_ids))

    def _max_blocks(self, request: Request) -> int:
        """Blocks it may come to need, all tokens generated."""
        longest = request.num_prompt_tokens + request.max_tokens
        return self.layout.num_blocks(min(longest, self.config.max_model_len))

    def _row(self, request: Request, num_tokens: int) -> ScheduledRow:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        generation = 0
        if request.adapter_key:
            generation, _ = self.adapters.tables(request.adapter_key)
        return ScheduledRow(
            request_id=request.request_id,
            token_ids=request.tokens(start, end),
            start=start,
            block_ids=tuple(request.block_ids),
            adapter_key=request.adapter_key,
            adapter_digest=request.digest,
            adapter_generation=generation,
            sampling=request.params if end == request.num_tokens else None,
            seed=request.seed,
            num_output_tokens=len(request.output_token_ids),
        )

    # ---- results ----

    def _update_row(
        self, request: Request, row: ScheduledRow, token_id: int | None, result: StepResult
    ) -> None:
        request.num_computed_tokens += len(row.token_ids)
        done = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.num_prompt_tokens_done = max(request.num_prompt_tokens_done, done)
        is_token = token_id is not None and token_id != BAD_LOGITS
        new_tokens = (token_id,) if is_token and token_id is not None else ()
        result.progress.append(
            RequestProgress(
                request_id=request.request_id,
                num_prompt_tokens=request.num_prompt_tokens_done,
                new_token_ids=new_tokens,
            )
        )
        if token_id == BAD_LOGITS:
            self._end(request, "error", "engine_failure", "the logits are not finite")
        elif token_id is not None:
            self._take_token(request, token_id, result)

    def _take_token(self, request: Request, token_id: int, result: StepResult) -> None:
        """Count a token; then it ends the request, is held back, or leaves."""
        request.output_token_ids.append(token_id)
        if request.first_token_at is None:
            request.first_token_at = self.clock()
        released, stop_bytes = request.stops.push(token_id, self.vocabulary[token_id])
        if (ending := self._ending(request, token_id, stop_bytes)) is not None:
            released += request.stops.flush()
            self._end(request, *ending, tokens=released, num_stop_bytes=stop_bytes or 0)
            return
        if released:
            result.outputs.append((request.gateway_id, self._output(request, released)))
        left = request.message.token_lease - len(request.output_token_ids)
        if left == _LEASE_LOW_TOKENS and request.params.max_tokens > request.message.token_lease:
            low = LeaseLow(
                request_id=request.request_id,
                num_completion_tokens=len(request.output_token_ids),
                token_lease=request.message.token_lease,
            )
            result.leases_low.append((request.gateway_id, low))

    def _ending(
        self, request: Request, token_id: int, stop_bytes: int | None
    ) -> tuple[FinishReason, StopCause] | None:
        """Whether this token is the last one, and why."""
        params, count = request.params, len(request.output_token_ids)
        if token_id in self.eos_token_ids and not params.ignore_eos:
            return "stop", "eos"
        if token_id in params.stop_token_ids:
            return "stop", "stop_token"
        if stop_bytes is not None:
            return "stop", "stop_string"
        if count >= params.max_tokens:
            return "length", "max_tokens"
        if count >= request.message.token_lease:
            return "length", "budget"
        if request.num_tokens >= self.config.max_model_len:
            return "length", "max_model_len"
        return None

    def _end_overdue(self) -> None:
        now = self.clock()
        for request in list(self.requests.values()):
            if now >= request.deadline_at:
                self._end(request, "length", "deadline")

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        cause: StopCause,
        error: str | None = None,
        tokens: list[int] | None = None,
        num_stop_bytes: int = 0,
    ) -> None:
        """The one final output of a request; everything it held is given back."""
        request.finish_reason, request.stop_cause = reason, cause
        released = tokens if tokens is not None else request.stops.flush()
        output = self._output(request, released, error=error, num_stop_bytes=num_stop_bytes)
        self._release(request)
        del self.requests[request.request_id]
        (self.running if request in self.running else self.waiting).remove(request)
        self._ended.append((request, output))

    def _output(
        self,
        request: Request,
        tokens: list[int],
        error: str | None = None,
        num_stop_bytes: int = 0,
    ) -> RequestOutput:
        request.num_outputs_sent += 1
        return RequestOutput(
            request_id=request.request_id,
            seq=request.num_outputs_sent - 1,
            new_token_ids=tuple(tokens),
            finish_reason=request.finish_reason,
            stop_cause=request.stop_cause,
            error=error,
            num_prompt_tokens=request.num_prompt_tokens_done,
            num_completion_tokens=len(request.output_token_ids),
            num_stop_bytes=num_stop_bytes,
            adapter_digest=request.digest if request.first_token_at is not None else None,
            is_last=request.finish_reason is not None,
        )

    def _release(self, request: Request) -> None:
        self.arena.retire(request.block_ids)
        request.block_ids = []
        self._release_adapter(request)

    def _release_adapter(self, request: Request) -> None:
        if request.holds_adapter and request.adapter_key:
            self.adapters.release(request.adapter_key)
        request.holds_adapter = False
