"""Figures of one request, noted while its outputs pass."""

import time
from collections import deque
from statistics import median

from engine.wire.delivery import Take
from engine.wire.messages import RequestOutput, Timings
from server import logs
from server.inference import outcomes
from server.inference.request_metrics import RequestMetrics
from server.inference.ticket import Ticket
from server.traces import spans

_MAX_GAPS = 512


class Progress:
    """Passes outputs on to `take`, and keeps the last of them."""

    def __init__(self, ticket: Ticket, take: Take, metrics: RequestMetrics) -> None:
        self.last: RequestOutput | None = None
        self._ticket = ticket
        self._begun = ticket.running.begun
        self._take = take
        self._metrics = metrics
        self._all_gaps = metrics.histogram("inter_token_latency", ticket.base.model_id)
        self._has_failed = False
        self._finish_reasons: dict[int, str] = {}
        self._waited_s: float | None = None
        # The times between the tokens of an answer: the latest of all answers together.
        self._gaps_s: deque[float] = deque(maxlen=_MAX_GAPS)
        self._last_at: dict[int, float] = {}

    def note(self, output: RequestOutput) -> None:
        """Note an output and pass it on. Raises Fault if it says that the request has failed."""
        self.last = output
        index = output.index
        if output.new_token_ids:
            now = time.monotonic()
            if (last_at := self._last_at.get(index)) is not None:
                gap_s = now - last_at
                self._gaps_s.append(gap_s)
                self._all_gaps.observe(gap_s, len(output.new_token_ids))
            self._last_at[index] = now
        if output.finish_reason is not None:
            if failure := outcomes.failure_of(self._ticket, output):
                self._has_failed = True
                raise failure
            self._finish_reasons[index] = output.finish_reason
        if index not in self._begun and not output.is_of_prompt:
            self._begin(index)
        self._take(output)

    def tell(self) -> None:
        """Add the figures to the request's line in the log, and to its spans."""
        gap_s = median(self._gaps_s) if self._gaps_s else None
        logs.note(ttft_ms=_ms(self._waited_s), itl_ms_p50=_ms(gap_s))
        spans.note(engine=self._ticket.running.engine)
        last = self.last
        if last is None or not last.is_last:
            return
        if timings := last.timings:
            logs.note(load_ms=_ms(timings.load_s), queue_ms=_ms(timings.queue_s))
            _add_spans(timings)
        spans.note(stop_cause=last.stop_cause)
        if self._has_failed:
            logs.note(stop_cause=last.stop_cause)
        else:
            logs.note(
                prompt_tokens=last.num_prompt_tokens, completion_tokens=last.num_completion_tokens
            )
            spans.note(
                input_tokens=last.num_prompt_tokens,
                cached_tokens=last.num_cached_tokens,
                output_tokens=last.num_completion_tokens,
                finish_reasons=[reason for _, reason in sorted(self._finish_reasons.items())],
            )

    def _begin(self, index: int) -> None:
        """Note the first token of an answer."""
        running = self._ticket.running
        if not running.has_begun:
            self._waited_s = time.monotonic() - self._ticket.arrived_at
            self._metrics.note_first_token(self._ticket, self._waited_s)
            self._ticket.base.keeper.first_tokens.note(self._waited_s)
        self._ticket.base.load.begin(running, index)


def _add_spans(timings: Timings) -> None:
    """Add a span for each stretch of the engine's work, up to the last output, which came now."""
    added = spans.add_parts(
        ("load", timings.load_s, {"load_tier": timings.load_tier}),
        ("queue", timings.queue_s, {}),
        ("prefill", timings.prefill_s, {}),
        ("decode", timings.decode_s, {}),
    )
    if timings.fetch_s is not None and (load := added.get("load")):
        load.add_first("fetch", timings.fetch_s)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
