"""Traces as OpenTelemetry has them, sent to a collector by its own library (the extra `otel`)."""

import threading
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
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
_CLOSE_S = 3.0
"""Time for the last spans when the gateway stops."""


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
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(sample_ratio)), Resource(about), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=max_spans,
                schedule_delay_millis=delay_s * 1000,
                max_export_batch_size=min(_BATCH_SPANS, max_spans),
            )
        )
        self._tracer = self._provider.get_tracer("chorale", VERSION)
        self._caller = TraceContextTextMapPropagator()

    def export(self, request: Span, headers: Mapping[str, str]) -> None:
        # One offset for all spans of a request: they nest, even if the clock is set meanwhile.
        offset_s = time.time() - time.monotonic()
        self._export(request, self._caller.extract(headers), offset_s)

    def _export(self, span: Span, parent: Context, offset_s: float) -> None:
        is_request = span.parent is None
        model = span.notes.get("request_model") if is_request else None
        exported = self._tracer.start_span(
            f"{span.name} {model}" if model else span.name,
            parent,
            SpanKind.SERVER if is_request else SpanKind.INTERNAL,
            start_time=_ns(span.began_at + offset_s),
        )
        if exported.is_recording():
            exported.set_attributes(_attributes(span))
            if _has_failed(span):
                exported.set_status(StatusCode.ERROR)
            within = set_span_in_context(exported, parent)
            for part in span.parts:
                self._export(part, within, offset_s)
        exported.end(_ns(span.ended_at + offset_s))

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
    if span.parent is None:
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


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
