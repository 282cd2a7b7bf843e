"""Replays the scheduler's rules over a stream of requests, with times of steps in place of a model.

The rules are those of `engine/scheduler.py`, `engine/queues.py` and `engine/admission.py` for
requests of one tenant and class: decodes first, then the prompts that run, then waiting requests in
the order of their arrival, all under one budget of tokens. A request starts if a seat is free, its
adapter's rank fits the step's sum, and its whole prompt and its adapter fit into the arena; when a
decode finds no block, the newest request gives its own back and is computed again.

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

    num_done: of `num_todo` tokens before its next choice.   num_said: tokens of its answer; while
    it decodes, those that it had when it began, in the decode numbered `begun`.
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


class Replay:
    """One run. Requests without an arrival come one by one as earlier ones end.

    Decodes are kept as sums, since each of them gets one token in every step: `_decoded` counts the
    steps, `_ends` has the requests by the count at which they end, and `_due` how many of them need
    a block at a count, modulo the size of a block.
    """

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
        self._decodes: dict[int, Running] = {}
        self._decoded = 0
        self._ends: defaultdict[int, list[Running]] = defaultdict(list)
        self._due = [0] * seats.block_size
        self._num_keys = self._num_adapted = self._rank_tokens = 0  # of the next decodes
        self._users: Counter[int] = Counter()  # running requests by adapter
        self._ranks: dict[int, int] = {}  # of the running adapters
        self._free = seats.num_slabs
        self._now = self._last_s = 0.0
        self.result = Replayed()

    def run(self) -> Replayed:
        """Serve every request. Raises AssertionError if one can never fit, which callers check."""
        while self._coming or self._waiting or self._decodes or self._prefills:
            self._take_arrivals()
            num_alike = self._num_alike()
            load, chunks = self._schedule(num_alike)
            assert load.num_tokens, "a request fits nowhere"
            self._pass_time(load, num_alike, has_chunks=bool(chunks))
            self._end_decodes(num_alike)
            for running, count in chunks:
                self._end_chunk(running, count)
        self.result.end_s = self._now
        return self.result

    def _take_arrivals(self) -> None:
        if not (self._waiting or self._decodes or self._prefills):
            self._now = max(self._now, self._coming[0][0])
        while self._coming and self._coming[0][0] <= self._now:
            arrival_s, number, request = heapq.heappop(self._coming)
            self._waiting.append(Running(request, number, arrival_s, request.num_prompt))

    def _num_alike(self) -> int:
        """How many steps of the same decodes follow, with nothing else to do; 1 if it may be less.

        They are taken at once, each as long as the one in their middle.
        """
        if self._waiting or self._prefills or not self._decodes:
            return 1
        count = min(min(self._ends) - self._decoded, self._seats.block_size)
        if self._coming:
            soonest_s = self._coming[0][0] - self._now
            count = min(count, int(soonest_s / max(self._last_s, 1e-9)))
        if count < 1 or sum(self._due) > self._free:
            return 1
        return count

    def _pass_time(self, load: StepLoad, num_alike: int, *, has_chunks: bool) -> None:
        result, parts = self.result, self._times.parts(load)
        self._last_s = sum(parts.values())
        seconds = num_alike * self._last_s
        self._now += seconds
        result.busy_s += seconds
        result.chunk_s += seconds if has_chunks else 0.0
        result.num_steps += num_alike
        for name, part_s in parts.items():
            result.parts_s[name] += num_alike * part_s
        result.most_running = max(result.most_running, self._num_running)
        assert result.num_steps < _MOST_STEPS, "the replay does not end"

    # ---- a step ----

    def _schedule(self, num_alike: int) -> tuple[StepLoad, list[tuple[Running, int]]]:
        """Plan the decodes, then prompts under way, then waiting requests."""
        self._grow_decodes(num_alike)
        count = len(self._decodes)
        num_keys = self._num_keys + count * (num_alike - 1) // 2
        load = StepLoad(
            num_tokens=count,
            num_rows=count,
            num_choosing=count,
            num_keys=num_keys,
            num_pairs=num_keys,
            adapted_tokens=self._num_adapted,
            rank_tokens=self._rank_tokens,
        )
        budget = self._seats.max_num_batched_tokens - count
        chunks: list[tuple[Running, int]] = []
        for running in self._prefills:
            if budget:
                budget -= self._add_chunk(load, chunks, running, budget)
        self._start_waiting(load, chunks, budget)
        load.num_adapters, load.sum_ranks = len(self._ranks), sum(self._ranks.values())
        return load, chunks

    def _start_waiting(
        self, load: StepLoad, chunks: list[tuple[Running, int]], budget: int
    ) -> None:
        skipped: list[Running] = []
        lacks = ""
        seats = min(self._seats.max_num_seqs, self._seats.max_num_batched_tokens)
        while self._waiting:
            running = self._waiting[0]
            if self._num_running >= seats or budget <= 0:
                lacks = "seats" if self._num_running >= seats else "tokens"
                break
            if self._lacks_ranks(running.request):
                lacks = "ranks"
                skipped.append(self._waiting.popleft())
                continue
            if not self._take_room(running):
                lacks = "slabs"
                break
            self._waiting.popleft()
            self._prefills.append(running)
            budget -= self._add_chunk(load, chunks, running, budget)
        self._waiting.extendleft(reversed(skipped))
        if lacks:
            self.result.waited[lacks] += 1

    @staticmethod
    def _add_chunk(
        load: StepLoad, chunks: list[tuple[Running, int]], running: Running, budget: int
    ) -> int:
        """Plan the next tokens of a prompt; return how many."""
        start = running.num_done
        count = min(running.num_todo - start, budget)
        load.num_tokens += count
        load.num_rows += 1
        load.num_choosing += start + count == running.num_todo
        load.num_keys += start + count
        load.num_pairs += count * (start + (count + 1) / 2)
        if running.request.adapter is not None:
            load.adapted_tokens += count
            load.rank_tokens += count * running.request.rank
        chunks.append((running, count))
        return count

    def _end_decodes(self, num_alike: int) -> None:
        """Each decode has chosen a token in each step, the last of which may be its last one."""
        self._decoded += num_alike
        self._num_keys += num_alike * len(self._decodes)
        for running in self._ends.pop(self._decoded, ()):
            self._stop_decoding(running)
            self._end(running)

    def _end_chunk(self, running: Running, count: int) -> None:
        running.num_done += count
        if running.num_done < running.num_todo:
            return
        self._prefills.remove(running)
        running.num_said += 1
        running.first_s = self._now if running.first_s < 0 else running.first_s
        if running.num_said == running.request.num_output:
            self._free += self._blocks(running.num_todo)
            self._end(running)
        else:
            self._begin_decoding(running)

    def _begin_decoding(self, running: Running) -> None:
        running.begun = self._decoded
        self._decodes[running.number] = running
        self._ends[self._end_of(running)].append(running)
        self._due[self._phase_of(running)] += 1
        self._add_to_sums(running, 1)

    def _stop_decoding(self, running: Running) -> None:
        """Take a request out of the decodes and give its blocks back."""
        del self._decodes[running.number]
        self._due[self._phase_of(running)] -= 1
        running.num_said += self._decoded - running.begun
        running.begun = self._decoded
        self._add_to_sums(running, -1)
        self._free += self._blocks(running.request.num_prompt + running.num_said - 1)

    def _add_to_sums(self, running: Running, sign: int) -> None:
        request = running.request
        self._num_keys += sign * (request.num_prompt + running.num_said)
        self._num_adapted += sign * (request.adapter is not None)
        self._rank_tokens += sign * request.rank

    def _end_of(self, running: Running) -> int:
        return running.begun + running.request.num_output - running.num_said

    def _phase_of(self, running: Running) -> int:
        """The count, modulo a block's tokens, at which the request needs another block."""
        computed = running.request.num_prompt + running.num_said - 1
        return (running.begun - computed) % self._seats.block_size

    def _end(self, running: Running) -> None:
        running.ended_s = self._now
        self._leave_adapter(running)
        self.result.served.append(running)
        if self._later:
            number, request = self._later.popleft()
            heapq.heappush(self._coming, (self._now, number, request))

    # ---- room ----

    @property
    def _num_running(self) -> int:
        return len(self._decodes) + len(self._prefills)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._seats.block_size)

    def _lacks_ranks(self, request: Request) -> bool:
        if request.adapter is None or not self._ranks or request.adapter in self._ranks:
            return False
        return sum(self._ranks.values()) + request.rank > self._seats.sum_ranks

    def _take_room(self, running: Running) -> bool:
        """Take blocks for all tokens to do, and slabs for the adapter if nobody runs with it."""
        adapter = running.request.adapter
        wanted = self._blocks(running.num_todo)
        if adapter is not None and not self._users[adapter]:
            wanted += self._seats.adapter_slabs
        if wanted > self._free:
            return False
        self._free -= wanted
        if adapter is not None:
            self._users[adapter] += 1
            self._ranks[adapter] = running.request.rank
        return True

    def _leave_adapter(self, running: Running) -> None:
        adapter = running.request.adapter
        if adapter is None:
            return
        self._users[adapter] -= 1
        if not self._users[adapter]:
            self._free += self._seats.adapter_slabs
            del self._ranks[adapter]

    def _grow_decodes(self, num_alike: int) -> None:
        """Give blocks to the decodes that need one; the newest requests give way for them."""
        size = self._seats.block_size
        phase = self._decoded % size
        while self._due[phase] > self._free:
            self._preempt(max([*self._decodes.values(), *self._prefills], key=lambda r: r.number))
        self._free -= sum(self._due[(phase + later) % size] for later in range(num_alike))

    def _preempt(self, running: Running) -> None:
        """Have a request compute everything again later."""
        if running.number in self._decodes:
            self._ends[self._end_of(running)].remove(running)
            self._stop_decoding(running)
        else:
            self._prefills.remove(running)
            self._free += self._blocks(running.num_todo)
        self._leave_adapter(running)
        running.num_done, running.num_todo = 0, running.request.num_prompt + running.num_said
        self._waiting.append(running)
        self._waiting = deque(sorted(self._waiting, key=lambda r: r.number))
        self.result.num_preemptions += 1
