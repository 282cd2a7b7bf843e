"""A collector that takes OTLP over HTTP, and keeps what it was sent."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Exported:
    """A span as it came over the wire; `parts` are its children, the first to begin first."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    began_ns: int
    ended_ns: int
    is_error: bool
    attributes: dict[str, Any]
    parts: list["Exported"] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [part.name for part in self.parts]

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9

    def part(self, name: str) -> "Exported":
        (found,) = [part for part in self.parts if part.name == name]
        return found

    def all(self) -> Iterator["Exported"]:
        yield self
        for part in self.parts:
            yield from part.all()


@dataclass
class Collector:
    """Requests that were posted to a collector.   may_answer: while it is not set, senders wait."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    may_answer: threading.Event = field(default_factory=threading.Event)

    def spans(self) -> list[Exported]:
        return [span for body in self.bodies for span in _decoded(body)]

    def resource(self) -> dict[str, Any]:
        message = ExportTraceServiceRequest.FromString(self.bodies[0])
        return _values(message.resource_spans[0].resource.attributes)

    def roots(self) -> list[Exported]:
        """The spans without a parent here, in the order of their begin, with all within them."""
        spans = sorted(self.spans(), key=lambda span: span.began_ns)
        by_id = {span.span_id: span for span in spans}
        for span in spans:
            if span.parent_id in by_id:
                by_id[span.parent_id].parts.append(span)
        return [span for span in spans if span.parent_id not in by_id]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port."""
    collector = Collector()
    collector.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.asked.set()
            collector.may_answer.wait()
            collector.paths.append(self.path)
            collector.bodies.append(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=lambda: server.serve_forever(0.01))
        thread.start()
        try:
            yield collector
        finally:
            collector.may_answer.set()
            server.shutdown()
            thread.join()


def _decoded(body: bytes) -> Iterator[Exported]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Exported(
                    span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name,
                    span.kind, span.start_time_unix_nano, span.end_time_unix_nano,
                    span.status.code == span.status.STATUS_CODE_ERROR, _values(span.attributes),
                )  # fmt: skip


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
