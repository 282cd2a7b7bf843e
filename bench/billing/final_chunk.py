"""Delay of a request's last token: it waits until the request's end record is on the disk.

The engine writes every step to the journal before its tokens leave, and syncs in a step in which a
request has ended. So steps with an end and steps without are measured alternately, in one journal.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bench.billing.measurement import Measurement
from bench.report import percentiles_ms, rounded
from engine.batch import StepResult
from engine.journal import Journal
from engine.messages import AddRequest, FinishReason, SamplingParams, StopCause, Timings
from engine.records import RequestProgress
from engine.request import RequestGroup

_WARM_UP = 20


@dataclass(eq=False)
class _Asked:
    """Stands in for engine.request.RequestGroup, with the attributes that a journal reads."""

    request_id: str
    message: AddRequest
    num_prompt_tokens: int
    digest: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    stop_cause: StopCause = "max_tokens"
    timings: Timings = Timings()


@dataclass(frozen=True, kw_only=True)
class FinalChunk(Measurement):
    """The delay of a request's last token by the journal's sync.

    running: requests that get a token each step.   steps: measured steps with, and without, an
    end.
    """

    running: int = 64
    steps: int = 300

    def measure(self, folder: Path) -> dict[str, Any]:
        journal = Journal(folder / "journal", "engine-1", "b" * 64)
        asked = [self._start(journal, number) for number in range(self.running)]
        progress_s, end_s = [], []
        for step in range(2 * (self.steps + _WARM_UP)):
            ended = asked[:1] if step % 2 else []
            result = StepResult(step, progress=[_progress(request) for request in asked])
            result.ended = cast(list[RequestGroup], ended)
            start = time.perf_counter()
            journal.commit(result)
            (end_s if ended else progress_s).append(time.perf_counter() - start)
            if ended:
                # Acknowledge the end as a settler does: the journal would keep all end records.
                journal.read(journal.last_seq, 1)
                asked = [*asked[1:], self._start(journal, self.running + step)]
        without, with_end = (percentiles_ms(s[_WARM_UP:]) for s in (progress_s, end_s))
        assert with_end["p50"] is not None
        assert without["p50"] is not None
        return {
            "step_without_end_ms": without,
            "step_with_end_ms": with_end,
            "added_ms_p50": rounded(with_end["p50"] - without["p50"]),
        }

    def _start(self, journal: Journal, number: int) -> _Asked:
        message = AddRequest(
            request_id=f"req_{number:024x}",
            tenant_id="ten_1",
            prompt_token_ids=tuple(range(100)),
            sampling_params=SamplingParams(max_tokens=1000),
            token_lease=1000,
            deadline_s=120.0,
        )
        asked = _Asked(message.request_id, message, len(message.prompt_token_ids))
        journal.start(cast(RequestGroup, asked))
        return asked


def _progress(request: _Asked) -> RequestProgress:
    token = 1 + len(request.output_token_ids)
    request.output_token_ids.append(token)
    return RequestProgress(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        new_token_ids=(token,),
    )
