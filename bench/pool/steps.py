"""The steps of a modelled engine: one prompt after the other, beside all requests that decode.

Time is counted in steps. A step takes longer with every request in it, and with a chunk of a
prompt, so requests slow each other down; every request that decodes gets a token from each step.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.pool.clock import Clock
from bench.pool.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Speeds of an engine with an 8B model in 16 bits on a GPU with 2 TB/s, by arithmetic.

    step_s: time to read the weights.   row_s: time per request, for its KV.   prompt_token_s: time
    per prompt token, for its products.   arena_bytes: memory for adapters.   copy_*: bandwidth from
    disk into the arena, one adapter at a time.   prefix_tokens: size of the prefix cache.
    """

    seats: int = 64
    step_s: float = 0.008
    row_s: float = 5e-5
    prompt_token_s: float = 5e-5
    chunk_tokens: int = 512
    arena_bytes: int = 6 << 30
    copy_bytes_per_s: float = 2e9
    prefix_tokens: int = 0

    def requests_per_s(self, traffic: Traffic) -> float:
        """Return the rate with every seat taken, nothing cached, and all adapters in the arena."""
        token_s = self.step_s / self.seats + self.row_s
        prompt_s = traffic.mean_prompt_tokens * self.prompt_token_s
        return 1 / (prompt_s + traffic.mean_output_tokens * token_s)


@dataclass(slots=True)
class Row:
    """A request in the steps. on_first, on_end: called at the first and at the last token."""

    prompt_tokens: float
    output_tokens: int
    on_first: Callable[[], None]
    on_end: Callable[[], None]


class Steps:
    """Runs rows. The caller adds a row only if a seat is free."""

    def __init__(self, spec: EngineSpec, clock: Clock) -> None:
        self._spec = spec
        self._clock = clock
        self._prompts: deque[Row] = deque()
        self._prompt_ends = 0.0  # step at which the first prompt ends
        self._decoding: list[tuple[float, int, Row]] = []  # heap by last step
        self._num_rows = 0
        self._passed = 0.0  # steps so far
        self._passed_at_s = 0.0
        self._plan = 0

    def __len__(self) -> int:
        return len(self._prompts) + len(self._decoding)

    def add(self, row: Row) -> None:
        self._pass()
        self._prompts.append(row)
        if len(self._prompts) == 1:
            self._begin_prompt()
        self._wake()

    def _pass(self) -> None:
        """Count the steps until now, at the pace since the last change."""
        now_s = self._clock.now_s
        self._passed += (now_s - self._passed_at_s) / self._pace_s()
        self._passed_at_s = now_s

    def _pace_s(self) -> float:
        spec = self._spec
        chunk_s = spec.chunk_tokens * spec.prompt_token_s if self._prompts else 0.0
        return spec.step_s + spec.row_s * len(self._decoding) + chunk_s

    def _begin_prompt(self) -> None:
        self._prompt_ends = self._passed + self._prompts[0].prompt_tokens / self._spec.chunk_tokens

    def _wake(self) -> None:
        """Schedule the next change; it is void if another change comes before it."""
        self._plan += 1
        ends = [self._prompt_ends] if self._prompts else []
        if self._decoding:
            ends.append(self._decoding[0][0])
        if ends:
            plan, steps = self._plan, max(min(ends) - self._passed, 0.0)
            self._clock.after(steps * self._pace_s(), lambda: self._change(plan, min(ends)))

    def _change(self, plan: int, passed: float) -> None:
        if plan != self._plan:
            return
        self._passed, self._passed_at_s = passed, self._clock.now_s
        over = []
        while self._decoding and self._decoding[0][0] <= passed:
            over.append(heapq.heappop(self._decoding)[2].on_end)
        if self._prompts and self._prompt_ends <= passed:
            over.append(self._end_prompt())
        self._wake()
        for tell in over:
            tell()

    def _end_prompt(self) -> Callable[[], None]:
        """End the first prompt, whose row has its first token now; the others take a step each."""
        row = self._prompts.popleft()
        self._num_rows += 1
        last_step = self._passed + row.output_tokens - 1
        heapq.heappush(self._decoding, (last_step, self._num_rows, row))
        if self._prompts:
            self._begin_prompt()
        return row.on_first
