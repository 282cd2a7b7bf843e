"""Running and waiting requests, what the next step computes of each, and the room for it."""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence

from engine.config import SchedulerConfig
from engine.fairness import DECODE_COST, PREFILL_COST, Policy
from engine.kv_cache import KVCache
from engine.messages import Priority
from engine.request import Request
from engine.shares import giving_way
from lora.manager import AdapterManager


class Queues:
    """Every request runs or waits; a running one may be in the plan of the next step.

    plan: tokens of the next step, by request.   drafts: tokens that it verifies besides.
    budget: tokens that the step may still take.
    """

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
        self.plan: dict[Request, int] = {}
        self.drafts: dict[Request, tuple[int, ...]] = {}
        self.budget = 0
        self.num_preemptions = self.num_swaps = 0
        # By request in the plan: the service charged for its tokens, and its prompt tokens charged
        # before.
        self._charges: dict[Request, tuple[float, int]] = {}

    def begin_step(self) -> None:
        self.plan, self.drafts, self.budget = {}, {}, self.config.max_num_batched_tokens
        self._charges = {}

    def schedule_running(self) -> None:
        """Schedule every decode, then as many prompt tokens as the budget leaves."""
        for request in sorted(self.running, key=self._urgency):
            num_tokens = min(self._num_tokens_to_do(request), self.budget)
            # A more urgent request may have taken its blocks meanwhile.
            if num_tokens > 0 and request in self.running and self._grow(request, num_tokens):
                self._schedule(request, num_tokens)

    def start(self, request: Request) -> bool:
        """Start a waiting request; False without room.

        It may take the room of lower classes, and in its own that of tenants above their share.
        """
        while not (has_seat := self._has_seat) or not self.reserve(
            request, self.budget, is_whole=True
        ):
            num_blocks = self.kv.num_missing(request, request.num_tokens_to_do)
            victims = self._giving_way(request, num_blocks, has_seat=has_seat)
            victims = victims or self.idle_beams(request)
            if not victims:
                return False
            self.preempt(victims)
        self.waiting.remove(request)
        self.running[request] = None
        self._schedule(request, min(request.num_tokens_to_do, self.budget))
        return True

    def add_drafts(self, request: Request, token_ids: Sequence[int]) -> None:
        """Have a planned row verify drafts, as many as free blocks hold: none make others give way.

        Its tenant pays for computing them, whether they are accepted or not.
        """
        num_tokens = self.plan[request]
        while token_ids:
            if self.kv.num_missing(request, num_tokens + len(token_ids)) <= self.arena.num_free:
                break
            token_ids = token_ids[:-1]
        else:
            return
        self.kv.allocate(request, num_tokens + len(token_ids))
        self.policy.charge(request, PREFILL_COST * len(token_ids))
        self.drafts[request] = tuple(token_ids)
        self.budget -= len(token_ids)

    def reserve(self, request: Request, budget: int, *, is_whole: bool) -> bool:
        """Hold a request's adapter, and get cached and new blocks for its next tokens; or neither.

        is_whole: a request that has no blocks yet gets them only if all its tokens would fit now.
        """
        held_before, is_new = request.holds_adapter, not request.block_ids
        # The adapter is held first, so that making room for the blocks does not evict it.
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

    def preempt(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._preempt(request)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, and give back everything it held."""
        self.put_back(request)
        self.waiting.remove(request)

    def put_back(self, request: Request) -> None:
        """Have a request hold nothing and wait."""
        self.kv.forget(request)
        self._release_adapter(request)
        self._unschedule(request)
        if request in self.running:
            del self.running[request]
            insort(self.waiting, request, key=lambda r: r.arrival)

    def fork(self, request: Request, child: Request) -> None:
        """Have another answer to the prompt, which holds nothing, go on as this one."""
        self.kv.fork(request, child)
        child.num_charged_tokens = request.num_charged_tokens

    def check_integrity(self) -> None:
        assert not self.running.keys() & set(self.waiting)
        assert [r.arrival for r in self.waiting] == sorted(r.arrival for r in self.waiting)
        num_drafts = sum(map(len, self.drafts.values()))
        num_planned = sum(self.plan.values()) + num_drafts
        assert self.budget + num_planned == self.config.max_num_batched_tokens
        requests = [*self.running, *self.waiting]
        self.kv.check_integrity(requests)
        holders = Counter(r.adapter_key for r in requests if r.holds_adapter)
        for key, entry in self.adapters.entries.items():
            assert entry.users == holders[key]

    # ---- order ----

    def _urgency(self, request: Request) -> tuple[bool, Priority, float, int]:
        served = self.policy.served(request)
        return not request.is_decoding, request.priority, served, request.arrival

    def _expendability(self, request: Request) -> tuple[Priority, float, int]:
        """Order of preemption: the lowest class first, the most served tenant, the newest."""
        return request.priority, self.policy.served(request), request.arrival

    # ---- the plan ----

    def _num_tokens_to_do(self, request: Request) -> int:
        """Tokens left to compute; 0 if the pending token will be the last one, if the lease is used
        up, or if a slow grammar has still to say what may follow.
        """
        num_pending = request.num_pending_tokens
        if request.constraint is not None and request.constraint.must_wait(num_pending):
            return 0
        if not num_pending:
            if request.is_unleased:
                return 0
            return request.num_tokens_to_do
        if request.is_beam:
            return 0  # the other beams decide whether it goes on
        count = len(request.output_token_ids) + num_pending
        longest = self.config.max_model_len
        is_last = count >= request.max_tokens or request.num_tokens + num_pending >= longest
        return 0 if is_last else request.num_tokens_to_do

    def _schedule(self, request: Request, num_tokens: int) -> None:
        self._charge(request, num_tokens)
        self.plan[request] = num_tokens
        self.budget -= num_tokens

    def _unschedule(self, request: Request) -> None:
        self.budget += self.plan.pop(request, 0) + len(self.drafts.pop(request, ()))

    def _charge(self, request: Request, num_tokens: int) -> None:
        """Charge for the next tokens and a load; tokens cached or computed again are free."""
        service, num_charged = 0.0, request.num_charged_tokens
        if num_charged < request.num_prompt_tokens:
            start = max(request.num_scheduled_tokens, num_charged)
            end = min(request.num_scheduled_tokens + num_tokens, request.num_prompt_tokens)
            service = max(end - start, 0) * PREFILL_COST
            request.num_charged_tokens = max(end, num_charged)
        if request.samples_after(num_tokens):
            service += DECODE_COST
        self._charges[request] = service, num_charged
        self.policy.charge(request, service + request.load_service)
        request.load_service = 0.0

    def _refund(self, request: Request) -> None:
        """Take back the charge for tokens that the step will not compute after all."""
        if request in self.plan:
            service, request.num_charged_tokens = self._charges.pop(request)
            self.policy.charge(request, -service)

    # ---- room ----

    @property
    def _has_seat(self) -> bool:
        seats = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        return len(self.running) < seats and self.budget > 0

    def make_way(self, request: Request, num_blocks: int) -> bool:
        """Free blocks for a waiting request, if need be by preemption; False without room."""
        while not self.arena.make_room(num_blocks):
            victims = self._giving_way(request, num_blocks, has_seat=True)
            victims = victims or self.idle_beams(request)
            if not victims:
                return False
            self.preempt(victims)
        return True

    def idle_beams(self, request: Request) -> list[Request]:
        """The beams that give way to a waiting request, as nothing runs: they wait for other beams,
        which lack room. So a search goes on even if its beams do not fit together.
        """
        if self.plan or self.arena.num_coming or any(r.num_in_flight_tokens for r in self.running):
            return []
        others = (r for r in (*self.running, *self.waiting) if r is not request)
        return [other for other in others if other.is_beam and other.block_ids]

    def _giving_way(self, request: Request, num_blocks: int, *, has_seat: bool) -> list[Request]:
        """The requests to preempt so that a waiting one can have this many blocks, and a seat.

        If the step has no tokens left, only requests that have some of them help.
        """
        running = self.plan if self.budget <= 0 else self.running
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
            self._preempt(victim)
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

    def _preempt(self, request: Request) -> None:
        """Give back a request's blocks, which are copied to the host or computed again later."""
        if request in self.running:
            self._refund(request)
            self._unschedule(request)
            del self.running[request]
            insort(self.waiting, request, key=lambda r: r.arrival)
            self.num_preemptions += 1
            self.num_swaps += self.kv.preempt(request)
        else:
            self.kv.give_back(request)
        self._release_adapter(request)

    def _hold_adapter(self, request: Request) -> None:
        if request.adapter_key and not request.holds_adapter:
            self.adapters.acquire(request.adapter_key)
            request.holds_adapter = True

    def _release_adapter(self, request: Request) -> None:
        if request.adapter_key and request.holds_adapter:
            self.adapters.release(request.adapter_key)
            request.holds_adapter = False
