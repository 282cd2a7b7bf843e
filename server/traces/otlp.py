"""Traces as OpenTelemetry has them, sent to a collector by its own library (the extra `otel`)."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.traces.spans import Span
from server.version import VERSION

_CONVENTIONS = "0.1.0"
"""Release of open-telemetry/semantic-conventions-genai that the names below are of. None of its
names is stable yet.
"""
_NAMES = {
    "request_model": "gen_ai.request.model",
    "response_model": "gen_ai.response.model",
    "response_id": "gen_ai.response.id",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "input_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
}
"""Attributes by the names of notes; what the conventions have no word for is `chorale.NOTE`."""

MAX_SPANS = 4096
"""Spans that may wait for the collector: 11 MB, the spans of 340 requests."""
_BATCH_SPANS = 512
_HEADER = TraceContextTextMapPropagator()
"""Reads and writes the header `traceparent`."""
_IDS = RandomIdGenerator()
_SCOPE = InstrumentationScope("chorale", VERSION)
_UNSET, _FAILED = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_CLOSE_S = 3.0
"""Time for the last spans when the gateway stops."""


@dataclass(slots=True, eq=False)
class _RequestSpan(Span):
    """offset_s: from its clock to the time. One for all spans within it: they nest, even if the
    time is set meanwhile.
    """

    exported: trace.Span = trace.INVALID_SPAN
    offset_s: float = 0.0


class OtlpTracer:
    """Sends spans as OTLP over HTTP, from a thread of the library.

    endpoint: base URL of a collector.   sample_ratio: share of the requests without a caller's
    decision that are traced.   instance: name of this gateway among all that report there.
    max_spans: ended spans that may wait; more are dropped.   delay_s: longest time that they wait.
    """

    def __init__(
        self,
        endpoint: str,
        sample_ratio: float,
        instance: str,
        *,
        max_spans: int = MAX_SPANS,
        delay_s: float = 5.0,
    ) -> None:
        self._exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        about = {
            "service.name": "chorale",
            "service.version": VERSION,
            "service.instance.id": instance,
            "chorale.gen_ai_conventions": _CONVENTIONS,
        }
        self._resource = Resource(about)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=max_spans,
            schedule_delay_millis=delay_s * 1000,
            max_export_batch_size=min(_BATCH_SPANS, max_spans),
        )
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(sample_ratio)), self._resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("chorale", VERSION)

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        span = _RequestSpan(name, offset_s=_offset_s())
        began_ns = _ns(span.began_at + span.offset_s)
        caller = _HEADER.extract(headers)
        span.exported = self._tracer.start_span(name, caller, SpanKind.SERVER, start_time=began_ns)
        place: dict[str, str] = {}
        _HEADER.inject(place, set_span_in_context(span.exported))
        span.traceparent = place.get("traceparent")
        return span

    def export(self, request: Span) -> None:
        assert isinstance(request, _RequestSpan), "another tracer began it"
        exported = request.exported
        if exported.is_recording():
            if model := request.notes.get("request_model"):
                exported.update_name(f"{request.name} {model}")
            exported.set_attributes(_attributes(request))
            if _has_failed(request):
                exported.set_status(_FAILED)
            for part in request.parts:
                self._add(part, exported.get_span_context(), request.offset_s)
        exported.end(_ns(request.ended_at + request.offset_s))

    def export_late(self, name: str, traceparents: Sequence[str], began_at: float) -> None:
        offset_s, ended_at = _offset_s(), time.monotonic()
        for traceparent in traceparents:
            request = trace.get_current_span(_HEADER.extract({"traceparent": traceparent}))
            late = Span(name, began_at=began_at, ended_at=ended_at)
            self._add(late, request.get_span_context(), offset_s)

    def _add(self, span: Span, parent: SpanContext, offset_s: float) -> None:
        """Export a span that has ended, and those within it.

        They are made at once: beginning and ending each by the library takes three times as long.
        """
        place = SpanContext(
            parent.trace_id,
            _IDS.generate_span_id(),
            is_remote=False,
            trace_flags=parent.trace_flags,
        )
        self._processor.on_end(
            ReadableSpan(
                span.name,
                place,
                parent,
                self._resource,
                _attributes(span),
                kind=SpanKind.INTERNAL,
                status=_FAILED if _has_failed(span) else _UNSET,
                start_time=_ns(span.began_at + offset_s),
                end_time=_ns(span.ended_at + offset_s),
                instrumentation_scope=_SCOPE,
            )
        )
        for part in span.parts:
            self._add(part, place, offset_s)

    def close(self) -> None:
        """Export what is queued, for `_CLOSE_S` at most; a collector that is away is given up."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(_CLOSE_S)
        if last.is_alive():
            self._exporter.shutdown()


def _attributes(span: Span) -> dict[str, object]:
    known = {name: value for name, value in span.notes.items() if value is not None}
    attributes = {_NAMES.get(name, f"chorale.{name}"): known[name] for name in known}
    if isinstance(span, _RequestSpan):
        attributes |= {"gen_ai.operation.name": span.name, "gen_ai.provider.name": "chorale"}
    if span.error is not None:
        attributes["error.type"] = span.error
    return attributes


def _has_failed(span: Span) -> bool:
    """Whether the span's status is an error: for a request by OpenTelemetry's rules for HTTP
    servers, to which a 4xx is none.
    """
    status = span.notes.get("status")
    if isinstance(status, int) and status >= 400:
        return status >= 500
    return span.error is not None


def _offset_s() -> float:
    """Seconds from what `time.monotonic` says to what `time.time` says."""
    return time.time() - time.monotonic()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
