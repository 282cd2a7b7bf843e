"""Decides which waiting requests start, and brings their adapters into the arena.

A request whose grammar is being compiled, or whose adapter is on its way or lacks room, is skipped,
so that requests behind it can use adapters that are resident. Once a request has been passed
`max_skips` times for lack of room, no request may pass it, so that room accumulates as running
requests end.
"""

from collections.abc import Callable

from engine.grammar.constraints import Constraints
from engine.requests.request import Prompt, Request, RequestGroup, find_adapter_start
from engine.scheduling.outputs import Ending
from engine.scheduling.queues import Queues
from engine.scheduling.shares import ranks_giving_way
from engine.wire.messages import StopCause
from lora.errors import FailureKind

_CAUSES: dict[FailureKind, StopCause] = {
    "unavailable": "adapter_loading",
    "evicted": "adapter_loading",
    "lost": "adapter_loading",
    "dropped": "adapter_loading",
    "missing": "adapter_missing",
    "corrupt": "adapter_corrupt",
    "incompatible": "adapter_incompatible",
    "too_large": "adapter_too_large",
}


class Starts:
    """Makes one pass over the waiting requests in every step."""

    def __init__(
        self, queues: Queues, constraints: Constraints, clock: Callable[[], float]
    ) -> None:
        self.queues = queues
        self.constraints = constraints
        self._clock = clock
        self.config = queues.config
        self.adapters = queues.adapters
        self._short_of_room: list[Request] = []  # in this pass
        self._started: list[Request] = []
        self._ranks: dict[str, int] | None = None  # of the running adapters, by key
        self._hopeless: list[tuple[RequestGroup, Ending]] = []

    def run(self) -> list[tuple[RequestGroup, Ending]]:
        """Start requests in the policy's order; return those that can never run, and why."""
        self._short_of_room, self._hopeless, self._started = [], [], []
        self._ranks = None
        # Making room for an adapter may preempt requests, which then wait behind this pass.
        ready = [
            request
            for request in list(self.queues.waiting)
            if not request.is_unleased
            and (
                (request.needs_only_room and not request.num_in_flight_tokens)
                or self._is_ready(request)
            )
        ]
        order = self.queues.policy.order(ready)
        for request in order:
            if not self._start_or_skip(request):
                break
        # `order` goes on behind the request that lacked room. Requests that hold blocks take no
        # room from others, and have what others wait for.
        if any(request.block_ids for request in ready):
            for request in order:
                if request.block_ids and not self._start_or_skip(request):
                    break
        for passed in self._short_of_room:
            passed.num_skips += sum(self._is_behind(request, passed) for request in self._started)
        return self._hopeless

    def _start_or_skip(self, request: Request) -> bool:
        """Start or skip a request; False if there is no room, so that none behind it may start."""
        if not request.block_ids and self._is_held_up(request) or not self._has_adapter(request):
            return True  # its adapter was evicted, to make room for those before it
        if not self._make_way_for_ranks(request):
            self._short_of_room.append(request)
            return True
        self._ranks = None  # running requests may be preempted
        if not self.queues.start(request):
            return False
        if request.group.started_at is None:
            request.group.started_at = self._clock()
        self._started.append(request)
        return True

    def _is_ready(self, request: Request) -> bool:
        """Whether only lack of room keeps the request from running."""
        if request.num_in_flight_tokens or request.is_parked:
            return False  # preempted, and its last step still runs; or it waits for other beams
        if not self._has_constraint(request):
            return False
        if not request.is_first and self._waits_for_first_answer(request.prompt):
            return False
        if self._has_adapter(request):
            may_run = self._is_invoked(request) and self._may_fit(request)
            is_plain = request.adapter_key is None and request.group.compilation is None
            is_independent = request.is_first and not request.is_beam
            request.needs_only_room = may_run and is_plain and is_independent
            return may_run
        if request.group.started_at is None:
            self._note_load(request)
        return self._advance_adapter(request)

    def _note_load(self, request: Request) -> None:
        """Note that a request which has not started yet still waits for its adapter."""
        group = request.group
        assert group.adapter is not None
        group.loading_until = self._clock()
        if group.load_tier != "store":
            return
        if found := self.adapters.fetched_from(group.adapter.object_key):
            group.load_tier = found
        else:
            group.fetching_until = group.loading_until

    def _waits_for_first_answer(self, prompt: Prompt) -> bool:
        """Whether the first answer still computes the prompt, which others will find cached, or
        still owes the logprobs of the prompt, which come before any answer's tokens.
        """
        if prompt.answers[0].finish_reason is not None:
            return False
        is_computed = prompt.num_tokens_done == len(prompt.token_ids)
        is_cached_first = self.config.prefix_caching and not is_computed
        return is_cached_first or bool(prompt.answers[0].num_tokens_to_score)

    def _has_constraint(self, request: Request) -> bool:
        """Whether the answer's grammar, if it has one, is compiled; then its constraint begins."""
        compilation = request.group.compilation
        if compilation is None or request.constraint is not None:
            return True
        if compilation.error is not None:
            self._give_up(request, "constraint_too_slow", compilation.error)
        elif compilation.matcher is not None:
            request.constraint = self.constraints.begin(compilation)
        return request.constraint is not None

    def _has_adapter(self, request: Request) -> bool:
        key = request.adapter_key
        return key is None or self.adapters.is_ready(key)

    def _advance_adapter(self, request: Request) -> bool:
        """Bring its adapter a step closer to the arena; return whether it is resident."""
        assert request.adapter is not None
        key = request.adapter.object_key
        if (failure := self.adapters.wait(key)) is not None:
            cause = _CAUSES[failure.kind]
            may_come = cause == "adapter_loading"
            retry_after_s = self.adapters.retry_after_s(key) if may_come else None
            self._give_up(request, cause, failure.error, retry_after_s)
            return False
        needed = self.adapters.slabs_needed(key)
        if needed is None or not self._is_invoked(request) or not self._may_fit(request):
            return False
        if needed and not self._is_held_up(request):
            self._place(request, needed)
        return self.adapters.is_ready(key)

    def _is_invoked(self, request: Request) -> bool:
        """Whether the adapter applies to any part of the prompt; its start is noted in the prompt.

        If it applies nowhere, the request fails, instead of silently being served without it.
        """
        prompt, key = request.prompt, request.adapter_key
        if prompt.adapter_start is None:
            tokens = self.adapters.invocation_tokens(key) if key else None
            prompt.adapter_start = find_adapter_start(request.adapter, prompt.token_ids, tokens)
        if prompt.adapter_start is None:
            error = "the prompt does not hold the adapter's invocation tokens"
            self._give_up(request, "adapter_not_invoked", error)
        return prompt.adapter_start is not None

    def _may_fit(self, request: Request) -> bool:
        """Whether the request fits into the arena beside its adapter, however long it gets.

        If it does not, it fails, instead of waiting for room that never comes.
        """
        if request.adapter_key is None:
            return True  # max_model_len fits
        kv, arena = self.queues.kv, self.queues.arena
        longest = request.num_prompt_tokens + request.max_tokens
        most_blocks = kv.layout.num_blocks(min(longest, self.config.max_model_len))
        num_slabs = self.adapters.entries[request.adapter_key].num_slabs
        if num_slabs + most_blocks <= arena.num_slabs:
            return True
        if num_slabs >= arena.num_slabs:
            self._give_up(request, "adapter_too_large", "the adapter does not fit into the arena")
        else:
            error = "its adapter leaves too little of the arena"
            self._give_up(request, "request_too_long", error)
        return False

    def _give_up(
        self, request: Request, cause: StopCause, error: str, retry_after_s: float | None = None
    ) -> None:
        ending = Ending("error", cause, error, retry_after_s)
        self._hopeless.append((request.group, ending))

    def _place(self, request: Request, num_slabs: int) -> None:
        """Allocate the adapter's slabs and the request's first chunk, or neither of them."""
        assert request.adapter is not None
        kv = self.queues.kv
        first_chunk = min(request.num_tokens_to_do, self.config.max_num_batched_tokens)
        if self.queues.make_way(request, num_slabs + kv.num_missing(request, first_chunk)):
            self._ranks = None  # running requests may have been preempted
            size_bytes = self.adapters.place(request.adapter.object_key)
            request.load_service = size_bytes / kv.layout.kv_bytes_per_token
            reserved = self.queues.reserve(request, first_chunk, is_whole=False)
            assert reserved, "room was made for both"
        else:
            self._short_of_room.append(request)

    def _is_held_up(self, request: Request) -> bool:
        """Whether this request is behind one that has been passed as often as allowed."""
        return any(
            passed.num_skips >= self.config.max_skips and self._is_behind(request, passed)
            for passed in self._short_of_room
        )

    def _is_behind(self, request: Request, passed: Request) -> bool:
        """Whether the request came later than `passed`, is of no higher priority class, and its
        tenant is not the less served one.
        """
        if request.arrival <= passed.arrival or request.priority < passed.priority:
            return False
        served = self.queues.policy.served
        return served(request) >= served(passed)

    def _make_way_for_ranks(self, request: Request) -> bool:
        """Make the running adapters and its own together fit the step's sum of ranks, if need be by
        preemption; False if they do not.
        """
        num_short, queues = self._num_ranks_short(request), self.queues
        if num_short <= 0:
            return True
        victims: list[Request] = []
        if queues.policy.has_shares:
            served = queues.policy.served
            victims = ranks_giving_way(request, queues.running, served, num_short=num_short)
        return queues.preempt_for(request, victims)

    def _num_ranks_short(self, request: Request) -> int:
        """Ranks by which its adapter would exceed the step's sum; 0 or less if it fits."""
        if request.adapter is None:
            return 0
        if self._ranks is None:
            adapters = (r.adapter for r in self.queues.running)
            self._ranks = {a.object_key: a.rank for a in adapters if a}
        if not self._ranks or request.adapter.object_key in self._ranks:
            return 0
        ranks = sum(self._ranks.values()) + request.adapter.rank
        return ranks - self.config.max_sum_ranks_per_step
