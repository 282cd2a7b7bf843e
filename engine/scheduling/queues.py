"""Running and waiting requests, what the next step computes of each, and the room for it."""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence

from engine.config import SchedulerConfig
from engine.kv.cache import KVCache
from engine.requests.request import Request
from engine.scheduling.fairness import Policy
from engine.scheduling.shares import giving_way
from engine.scheduling.step_plan import StepPlan
from engine.wire.messages import Priority
from lora.manager import AdapterManager


class Queues:
    """Every request runs or waits; a running one may be in the plan of the next step."""

    def __init__(
        self, config: SchedulerConfig, kv: KVCache, adapters: AdapterManager[object], policy: Policy
    ) -> None:
        self.config = config
        self.kv = kv
        self.adapters = adapters
        self.arena = adapters.arena
        self.policy = policy
        self.waiting: list[Request] = []  # oldest first
        self.running: dict[Request, None] = {}
        self.plan = StepPlan(config.max_num_batched_tokens, policy)
        self.num_preemptions = self.num_swaps = 0

    def plan_running(self) -> None:
        """Begin a plan of every decode, and of as many prompt tokens as the budget leaves."""
        plan = self.plan = StepPlan(self.config.max_num_batched_tokens, self.policy)
        served, longest = self.policy.served, self.config.max_model_len
        for request in sorted(
            self.running, key=lambda r: (not r.is_decoding, r.priority, served(r), r.arrival)
        ):
            num_tokens = min(_num_tokens_to_plan(request, longest), plan.budget)
            # A more urgent request may have taken its blocks meanwhile.
            if num_tokens > 0 and request in self.running and self._grow(request, num_tokens):
                plan.add(request, num_tokens)

    def start(self, request: Request) -> bool:
        """Start a waiting request; False without room.

        It may take the room of lower classes, and in its own that of tenants above their share.
        """
        plan = self.plan
        while not (has_seat := self._has_seat) or not self.reserve(
            request, plan.budget, is_whole=True
        ):
            num_blocks = self.kv.num_missing(request, request.num_tokens_to_do)
            victims = self._giving_way(request, num_blocks, has_seat=has_seat)
            if not self.preempt_for(request, victims):
                return False
        self.waiting.remove(request)
        self.running[request] = None
        plan.add(request, min(request.num_tokens_to_do, plan.budget))
        return True

    def add_drafts(self, request: Request, token_ids: Sequence[int]) -> None:
        """Have a planned row verify drafts, as many as free blocks hold: none make others give
        way.
        """
        num_tokens = self.plan.tokens[request]
        while token_ids:
            if self.kv.num_missing(request, num_tokens + len(token_ids)) <= self.arena.num_free:
                break
            token_ids = token_ids[:-1]
        else:
            return
        self.kv.allocate(request, num_tokens + len(token_ids))
        self.plan.add_drafts(request, token_ids)

    def reserve(self, request: Request, budget: int, *, is_whole: bool) -> bool:
        """Hold a request's adapter, and get cached and new blocks for its next tokens; or neither.

        is_whole: a request that has no blocks yet gets them only if all its tokens would fit now.
        """
        held_before, is_new = request.holds_adapter, not request.block_ids
        # The adapter is held first, so that making room for the blocks does not evict it.
        if request.adapter_key and not held_before:
            self.adapters.acquire(request.adapter_key)
            request.holds_adapter = True
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

    def preempt(self, requests: Iterable[Request]) -> None:
        """Give back requests' blocks, which are copied to the host or computed again later."""
        for request in requests:
            if request in self.running:
                self.plan.refund(request)
                self.num_preemptions += 1
                self.num_swaps += self.kv.preempt(request)
            else:
                self.kv.give_back(request)
            self._wait(request)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, and give back everything it held."""
        self.put_back(request)
        self.waiting.remove(request)
        self.policy.ended(request)

    def put_back(self, request: Request) -> None:
        """Have a request hold nothing and wait."""
        self.kv.forget(request)
        self._wait(request)

    def fork(self, request: Request, child: Request) -> None:
        """Have another answer to the prompt, which holds nothing, go on as this one."""
        self.kv.fork(request, child)
        child.num_charged_tokens = request.num_charged_tokens

    def check_integrity(self) -> None:
        assert not self.running.keys() & set(self.waiting)
        assert [r.arrival for r in self.waiting] == sorted(r.arrival for r in self.waiting)
        num_drafts = sum(map(len, self.plan.drafts.values()))
        num_planned = sum(self.plan.tokens.values()) + num_drafts
        assert self.plan.budget + num_planned == self.config.max_num_batched_tokens
        requests = [*self.running, *self.waiting]
        self.kv.check_integrity(requests)
        holders = Counter(r.adapter_key for r in requests if r.holds_adapter)
        for key, entry in self.adapters.entries.items():
            assert entry.users == holders[key]

    def _expendability(self, request: Request) -> tuple[Priority, float, int]:
        """Order of preemption: the lowest class first, the most served tenant, the newest."""
        return request.priority, self.policy.served(request), request.arrival

    @property
    def _has_seat(self) -> bool:
        seats = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        return len(self.running) < seats and self.plan.budget > 0

    def make_way(self, request: Request, num_blocks: int) -> bool:
        """Free blocks for a waiting request, if need be by preemption; False without room."""
        while not self.arena.make_room(num_blocks):
            victims = self._giving_way(request, num_blocks, has_seat=True)
            if not self.preempt_for(request, victims):
                return False
        return True

    def preempt_for(self, request: Request, victims: Sequence[Request]) -> bool:
        """Preempt these for a waiting request, or idle beams if there are none; False if neither
        are any.
        """
        victims = victims or self._idle_beams(request)
        self.preempt(victims)
        return bool(victims)

    def _idle_beams(self, request: Request) -> list[Request]:
        """The beams that give way to a waiting request, as nothing runs: they wait for other beams,
        which lack room. So a search goes on even if its beams do not fit together.
        """
        is_idle = not self.plan.tokens and not self.arena.num_coming
        if not is_idle or any(r.num_in_flight_tokens for r in self.running):
            return []
        others = (r for r in (*self.running, *self.waiting) if r is not request)
        return [other for other in others if other.is_beam and other.block_ids]

    def _giving_way(self, request: Request, num_blocks: int, *, has_seat: bool) -> list[Request]:
        """The requests to preempt so that a waiting one can have this many blocks, and a seat.

        If the step has no tokens left, only requests that have some of them help.
        """
        running = self.plan.tokens if self.plan.budget <= 0 else self.running
        last = max(running, key=self._expendability, default=request)
        if last.priority > request.priority:
            # Blocks that are coming may be enough, so no more is preempted before they have come.
            return [] if has_seat and self.arena.num_coming else [last]
        num_short = num_blocks - self.arena.num_available
        if not self.policy.has_shares or (has_seat and num_short <= 0):
            return []  # or the blocks are free once the running steps have finished
        return giving_way(
            request,
            running,
            self.policy.served,
            needs_seat=not has_seat,
            num_blocks=num_blocks,
            num_short=num_short,
        )

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for a running request; may preempt others, and at last the request."""
        missing = self.kv.num_missing(request, num_tokens)
        if not missing:
            return True
        while not self.arena.make_room(missing):
            if self.arena.num_free + self.arena.num_coming >= missing:
                return False  # blocks given up are free once the running step has finished
            victim = self._victim()
            self.preempt([victim])
            if victim is request:
                return False
        self.kv.allocate(request, num_tokens)
        return True

    def _victim(self) -> Request:
        """Choose the request to preempt.

        Waiting requests with reserved blocks come first, once each; then any request of these and
        of the running ones, the most expendable first.
        """
        reserved = [request for request in self.waiting if request.block_ids]
        for request in reversed(reserved):
            if request.num_skips < self.config.max_skips:
                request.num_skips = self.config.max_skips
                return request
        return max((*self.running, *reserved), key=self._expendability)

    def _wait(self, request: Request) -> None:
        """Have a request that holds no blocks wait, without its adapter."""
        self._release_adapter(request)
        self.plan.remove(request)
        if request in self.running:
            del self.running[request]
            insort(self.waiting, request, key=lambda r: r.arrival)

    def _release_adapter(self, request: Request) -> None:
        if request.adapter_key and request.holds_adapter:
            self.adapters.release(request.adapter_key)
            request.holds_adapter = False


def _num_tokens_to_plan(request: Request, longest: int) -> int:
    """Tokens left to compute; 0 if the pending token will be the last one, if the lease is used up,
    or if a slow grammar has still to say what may follow.

    longest: tokens of the longest request.
    """
    num_pending = request.num_pending_tokens
    if request.constraint is not None and request.constraint.must_wait(num_pending):
        return 0
    if not num_pending:
        return 0 if request.is_unleased else request.num_tokens_to_do
    if request.is_beam:
        return 0  # the other beams decide whether it goes on
    count = len(request.output_token_ids) + num_pending
    is_last = count >= request.max_tokens or request.num_tokens + num_pending >= longest
    return 0 if is_last else request.num_tokens_to_do
