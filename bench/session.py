"""Requests to an engine in this process, without gateway and sockets. A token's time is when step()
returned it, by a clock: that of the wall, or the processor seconds of this process.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.outcome import Outcome
from engine.core import EngineCore
from engine.wire.messages import (
    AbortRequests,
    AddRequest,
    RequestOutput,
    SamplingParams,
    StepOutputs,
)
from registry.ref import AdapterRef

GATEWAY = "bench"
_FOREVER_S = 1e9


class WallClock:
    """Seconds as they pass for everybody."""

    def now_s(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        """Pass time in which nothing is to be done."""
        time.sleep(seconds)


class ProcessorClock(WallClock):
    """Processor seconds of this process, which others on the machine change least."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now_s(self) -> float:
        return time.process_time() + self._waited_s

    def wait(self, seconds: float) -> None:
        self._waited_s += seconds


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. due_s: when it arrives, in seconds from the start of the run.

    drafts: whether a step may give its answer several tokens.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    due_s: float = 0.0
    tenant_id: str = "bench"
    adapter: AdapterRef | None = None
    grammar: str = ""
    drafts: bool = True
    temperature: float = 0.0


@dataclass(slots=True)
class _Answer:
    ask: Ask
    sent_s: float
    chunk_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end_s: float | None = None
    error: str | None = None


class Session:
    """One run on one engine: requests go in at any time, `step` notes their outputs.

    clock: that of the wall by default.
    """

    def __init__(self, core: EngineCore, clock: WallClock | None = None) -> None:
        self.core = core
        self.num_open = 0
        self._answers: list[_Answer] = []
        self.clock = clock or WallClock()
        self._start = self.clock.now_s()

    def now_s(self) -> float:
        return self.clock.now_s() - self._start

    def send(self, ask: Ask) -> int:
        message = AddRequest(
            request_id=str(len(self._answers)),
            tenant_id=ask.tenant_id,
            adapter=ask.adapter,
            prompt_token_ids=ask.prompt_token_ids,
            sampling_params=SamplingParams(
                max_tokens=ask.max_tokens,
                temperature=ask.temperature,
                seed=len(self._answers),
                ignore_eos=True,
            ),
            token_lease=ask.max_tokens,
            deadline_s=_FOREVER_S,
            first_token_timeout_s=_FOREVER_S,
            grammar=ask.grammar,
            drafts=ask.drafts,
        )
        self._answers.append(_Answer(ask, self.now_s()))
        self.num_open += 1
        self._note(self.core.handle(GATEWAY, message))
        return len(self._answers) - 1

    def step(self) -> None:
        self._note(self.core.step())

    def finish(self) -> None:
        """Step until no request is open."""
        while self.num_open:
            self.step()

    def stop(self) -> None:
        """Abort all requests that are open; their outcomes have an error."""
        named = tuple(str(i) for i in range(len(self._answers)) if self.is_open(i))
        self.core.handle(GATEWAY, AbortRequests(request_ids=named))
        self.finish()

    def num_tokens(self, index: int) -> int:
        """Number of tokens generated so far for request number `index`."""
        return len(self._answers[index].token_ids)

    def is_open(self, index: int) -> bool:
        return self._answers[index].end_s is None

    def outcome(self, index: int) -> Outcome:
        return _outcome(index, self._answers[index])

    def outcomes(self) -> list[Outcome]:
        """Return all outcomes in the order of sending."""
        return [_outcome(index, answer) for index, answer in enumerate(self._answers)]

    def _note(self, messages: Sequence[tuple[str, object]]) -> None:
        now_s = self.now_s()
        for _, message in messages:
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    self._note_output(output, now_s)

    def _note_output(self, output: RequestOutput, now_s: float) -> None:
        answer = self._answers[int(output.request_id)]
        if output.new_token_ids:
            answer.chunk_s.append(now_s)
            answer.token_ids += output.new_token_ids
        if output.is_last:
            answer.end_s = now_s
            self.num_open -= 1
            if output.finish_reason != "length":
                answer.error = output.error or output.finish_reason


def _outcome(index: int, answer: _Answer) -> Outcome:
    assert answer.end_s is not None, "the run is not over"
    return Outcome(
        index=index,
        model="base",
        num_prompt_tokens=len(answer.ask.prompt_token_ids),
        due_s=answer.ask.due_s,
        sent_s=answer.sent_s,
        end_s=answer.end_s,
        chunk_s=tuple(answer.chunk_s),
        token_ids=tuple(answer.token_ids),
        error=answer.error,
    )


def run(core: EngineCore, asks: Sequence[Ask], clock: WallClock | None = None) -> list[Outcome]:
    """Serve `asks` in the order in which they are due; return their outcomes in that order."""
    session, waiting = Session(core, clock), deque(asks)
    while waiting or session.num_open:
        while waiting and waiting[0].due_s <= session.now_s():
            session.send(waiting.popleft())
        if session.num_open:
            session.step()
        elif waiting:
            session.clock.wait(max(waiting[0].due_s - session.now_s(), 0.0))
    return session.outcomes()
