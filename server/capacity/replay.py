"""Replays the scheduler's rules over a stream of requests, with times of steps in place of a model.

The rules are those of `engine/scheduling/scheduler.py`, `engine/scheduling/queues.py` and
`engine/scheduling/starts.py` for requests of one tenant and class: decodes first, then the prompts
that run, then waiting requests in the order of their arrival, all under one budget of tokens. A
request starts if a seat is free, its adapter's rank fits the step's sum, and its whole prompt and
its adapter fit into the arena; when a decode finds no block, the newest request gives its own back
and is computed again.

Left out: shares of tenants, cached prefixes, drafts, loads of cold adapters, the gateway.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from server.capacity.steps import StepLoad, StepTimes
from server.capacity.traffic import Request, percentile

_MOST_STEPS = 2_000_000


@dataclass(frozen=True, slots=True)
class Seats:
    """Seats and room that the scheduler shares out.

    num_slabs, block_size: of the arena.   adapter_slabs: of one adapter.   sum_ranks: highest of a
    step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_slabs: int
    block_size: int
    adapter_slabs: int = 0
    sum_ranks: int = 1 << 30


@dataclass(slots=True, eq=False)
class Running:
    """A request under way.

    num_done: of `num_todo` tokens before its next choice, for which it has room.
    num_said: tokens of its answer; while it decodes, those that it had when it began, in the decode
    numbered `begun`.
    """

    request: Request
    number: int
    arrival_s: float
    num_todo: int
    num_done: int = 0
    num_said: int = 0
    begun: int = 0
    first_s: float = -1.0
    ended_s: float = -1.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time of an output token after the first one; None if there is none."""
        after = self.request.num_output - 1
        return (self.ended_s - self.first_s) / after if after else None


@dataclass(slots=True)
class Replayed:
    """The outcome of a replay.

    busy_s: time of all steps.   chunk_s: of those that computed tokens of prompts as well.
    waited: steps in which requests waited, by what they lacked.   parts_s: time of all steps by
    their parts.
    """

    served: list[Running] = field(default_factory=list)
    end_s: float = 0.0
    busy_s: float = 0.0
    chunk_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    waited: Counter[str] = field(default_factory=Counter)
    parts_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    most_running: int = 0

    def ttft_s(self, share: float) -> float:
        return percentile([r.ttft_s for r in self.served], share)

    def tpot_s(self, share: float) -> float:
        """Percentile over requests with more than one output token; 0 if there are none."""
        times = [t for r in self.served if (t := r.tpot_s) is not None]
        return percentile(times, share) if times else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens a second of the whole run."""
        return sum(r.request.num_output for r in self.served) / self.end_s

    @property
    def prompt_tokens_per_s(self) -> float:
        return sum(r.request.num_prompt for r in self.served) / self.end_s


class Room:
    """Slabs of the arena that are free, and the adapters of the requests that run."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self.num_free = seats.num_slabs
        self._users: Counter[int] = Counter()
        self.ranks: dict[int, int] = {}

    def lacks_ranks(self, request: Request) -> bool:
        if request.adapter is None or not self.ranks or request.adapter in self.ranks:
            return False
        return sum(self.ranks.values()) + request.rank > self._seats.sum_ranks

    def take(self, running: Running) -> bool:
        """Take blocks for all tokens to do, and slabs for the adapter if nobody runs with it."""
        adapter = running.request.adapter
        wanted = self._blocks(running)
        if adapter is not None and not self._users[adapter]:
            wanted += self._seats.adapter_slabs
        if wanted > self.num_free:
            return False
        self.num_free -= wanted
        if adapter is not None:
            self._users[adapter] += 1
            self.ranks[adapter] = running.request.rank
        return True

    def give_back(self, running: Running) -> None:
        self.num_free += self._blocks(running)
        adapter = running.request.adapter
        if adapter is not None:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                self.num_free += self._seats.adapter_slabs
                del self.ranks[adapter]

    def _blocks(self, running: Running) -> int:
        return -(-running.num_todo // self._seats.block_size)


class Decodes:
    """The requests that decode, kept as sums, since each of them gets one token in every step.

    `_count` counts the steps, `_ends` has the requests by the count at which they end, and `_due`
    how many of them need a block at a count, modulo the size of a block.
    """

    def __init__(self, block_size: int) -> None:
        self.requests: dict[int, Running] = {}
        self._count = 0
        self._ends: defaultdict[int, list[Running]] = defaultdict(list)
        self._due = [0] * block_size
        self._num_keys = self._num_adapted = self._rank_tokens = 0  # of the next step

    def __len__(self) -> int:
        return len(self.requests)

    def load(self, num_alike: int) -> StepLoad:
        """The work of the middle one of so many steps."""
        count = len(self)
        num_keys = self._num_keys + count * (num_alike - 1) // 2
        return StepLoad(
            num_tokens=count,
            num_rows=count,
            num_choosing=count,
            num_keys=num_keys,
            num_pairs=num_keys,
            adapted_tokens=self._num_adapted,
            rank_tokens=self._rank_tokens,
        )

    def num_due(self, num_steps: int) -> int:
        """Blocks that the next steps need, no more steps than a block has tokens."""
        at = self._count % len(self._due)
        return sum((self._due * 2)[at : at + num_steps])

    @property
    def num_alike(self) -> int:
        """How many steps follow until one ends, or at most until each has needed a block."""
        return min(min(self._ends) - self._count, len(self._due))

    def add(self, running: Running) -> None:
        running.begun = self._count
        self.requests[running.number] = running
        self._ends[self._end_of(running)].append(running)
        self._count_in(running, 1)

    def remove(self, running: Running) -> None:
        self._ends[self._end_of(running)].remove(running)
        self._stop(running)

    def advance(self, num_steps: int) -> list[Running]:
        """Have each choose a token in each step; returns those whose last one it was."""
        self._count += num_steps
        self._num_keys += num_steps * len(self)
        ended = self._ends.pop(self._count, [])
        for running in ended:
            self._stop(running)
        return ended

    def _stop(self, running: Running) -> None:
        del self.requests[running.number]
        self._count_in(running, -1)
        running.num_said += self._count - running.begun
        running.num_todo = running.request.num_prompt + running.num_said - 1

    def _count_in(self, running: Running, sign: int) -> None:
        """Add the request to the sums, or with -1 take it out."""
        request, num_tokens = running.request, running.request.num_prompt + running.num_said
        self._due[(running.begun - num_tokens + 1) % len(self._due)] += sign
        self._num_keys += sign * (num_tokens + self._count - running.begun)
        self._num_adapted += sign * (request.adapter is not None)
        self._rank_tokens += sign * request.rank

    def _end_of(self, running: Running) -> int:
        return running.begun + running.request.num_output - running.num_said


@dataclass(slots=True)
class Plan:
    """A step's work.   budget: tokens that it may compute besides."""

    load: StepLoad
    budget: int
    chunks: list[tuple[Running, int]] = field(default_factory=list)

    def add_chunk(self, running: Running) -> None:
        """Plan the next tokens of a prompt, as far as the budget goes."""
        load, start = self.load, running.num_done
        count = min(running.num_todo - start, self.budget)
        if not count:
            return
        self.budget -= count
        load.num_tokens += count
        load.num_rows += 1
        load.num_choosing += start + count == running.num_todo
        load.num_keys += start + count
        load.num_pairs += count * (start + (count + 1) / 2)
        if running.request.adapter is not None:
            load.adapted_tokens += count
            load.rank_tokens += count * running.request.rank
        self.chunks.append((running, count))


class Replay:
    """One run. Requests without an arrival come one by one as earlier ones end."""

    def __init__(self, times: StepTimes, seats: Seats, requests: Iterable[Request]) -> None:
        self._times, self._seats = times, seats
        self._coming: list[tuple[float, int, Request]] = []
        self._later: deque[tuple[int, Request]] = deque()
        for number, request in enumerate(requests):
            if request.arrival_s is None:
                self._later.append((number, request))
            else:
                heapq.heappush(self._coming, (request.arrival_s, number, request))
        self._waiting: deque[Running] = deque()
        self._prefills: list[Running] = []  # oldest first
        self._decodes = Decodes(seats.block_size)
        self._room = Room(seats)
        self._now = self._last_s = 0.0
        self.result = Replayed()

    def run(self) -> Replayed:
        """Serve every request. Raises AssertionError if one can never fit, which callers check."""
        while self._coming or self._waiting or self._num_running:
            self._take_arrivals()
            num_alike = self._num_alike()
            plan = self._plan(num_alike)
            assert plan.load.num_tokens, "a request fits nowhere"
            self._pass_time(plan, num_alike)
            for running in self._decodes.advance(num_alike):
                self._end(running)
            for running, count in plan.chunks:
                self._end_chunk(running, count)
        self.result.end_s = self._now
        return self.result

    @property
    def _num_running(self) -> int:
        return len(self._decodes) + len(self._prefills)

    def _take_arrivals(self) -> None:
        if not (self._waiting or self._num_running):
            self._now = max(self._now, self._coming[0][0])
        while self._coming and self._coming[0][0] <= self._now:
            arrival_s, number, request = heapq.heappop(self._coming)
            self._waiting.append(Running(request, number, arrival_s, request.num_prompt))

    def _num_alike(self) -> int:
        """How many steps of the same decodes follow, with nothing else to do; 1 if it may be less.

        They are taken at once, each as long as the one in their middle.
        """
        if self._waiting or self._prefills or not len(self._decodes):
            return 1
        count = self._decodes.num_alike
        if self._coming:
            soonest_s = self._coming[0][0] - self._now
            count = min(count, int(soonest_s / max(self._last_s, 1e-9)))
        if count < 1 or self._decodes.num_due(self._seats.block_size) > self._room.num_free:
            return 1
        return count

    def _plan(self, num_alike: int) -> Plan:
        """Plan the decodes, then prompts under way, then waiting requests."""
        # The newest requests give way for the blocks of decodes.
        while self._decodes.num_due(1) > self._room.num_free:
            running = [*self._decodes.requests.values(), *self._prefills]
            self._preempt(max(running, key=lambda r: r.number))
        self._room.num_free -= self._decodes.num_due(num_alike)
        load = self._decodes.load(num_alike)
        plan = Plan(load, self._seats.max_num_batched_tokens - load.num_tokens)
        for prefill in self._prefills:
            plan.add_chunk(prefill)
        self._start_waiting(plan)
        load.num_adapters, load.sum_ranks = len(self._room.ranks), sum(self._room.ranks.values())
        return plan

    def _preempt(self, running: Running) -> None:
        """Have a request compute everything again later."""
        if running.number in self._decodes.requests:
            self._decodes.remove(running)
        else:
            self._prefills.remove(running)
        self._room.give_back(running)
        running.num_done, running.num_todo = 0, running.request.num_prompt + running.num_said
        self._waiting = deque(sorted([*self._waiting, running], key=lambda r: r.number))
        self.result.num_preemptions += 1

    def _start_waiting(self, plan: Plan) -> None:
        skipped: list[Running] = []
        lacks = ""
        seats = min(self._seats.max_num_seqs, self._seats.max_num_batched_tokens)
        while self._waiting:
            running = self._waiting[0]
            if self._num_running >= seats or plan.budget <= 0:
                lacks = "seats" if self._num_running >= seats else "tokens"
                break
            if self._room.lacks_ranks(running.request):
                lacks = "ranks"
                skipped.append(self._waiting.popleft())
                continue
            if not self._room.take(running):
                lacks = "slabs"
                break
            self._waiting.popleft()
            self._prefills.append(running)
            plan.add_chunk(running)
        self._waiting.extendleft(reversed(skipped))
        if lacks:
            self.result.waited[lacks] += 1

    def _pass_time(self, plan: Plan, num_alike: int) -> None:
        result, parts = self.result, self._times.parts(plan.load)
        self._last_s = sum(parts.values())
        seconds = num_alike * self._last_s
        self._now += seconds
        result.busy_s += seconds
        result.chunk_s += seconds if plan.chunks else 0.0
        result.num_steps += num_alike
        for name, part_s in parts.items():
            result.parts_s[name] += num_alike * part_s
        result.most_running = max(result.most_running, self._num_running)
        assert result.num_steps < _MOST_STEPS, "the replay does not end"

    def _end_chunk(self, running: Running, count: int) -> None:
        running.num_done += count
        if running.num_done < running.num_todo:
            return
        self._prefills.remove(running)
        running.num_said += 1
        running.first_s = self._now if running.first_s < 0 else running.first_s
        if running.num_said == running.request.num_output:
            self._end(running)
        else:
            self._decodes.add(running)

    def _end(self, running: Running) -> None:
        running.ended_s = self._now
        self._room.give_back(running)
        self.result.served.append(running)
        if self._later:
            number, request = self._later.popleft()
            heapq.heappush(self._coming, (self._now, number, request))
