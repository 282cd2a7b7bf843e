"""Gives every request and answer its ids, headers and log line, and an unexpected error a 500.

The middleware is pure ASGI and one layer, so that streams pass untouched. A request costs 8 us of a
processor, 5 of them for ids and the count, and its line costs 9 us of the log's thread.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora.log_lines import trace_of
from registry.errors import Failed, Fault, Forbidden, Invalid
from server.api.errors import answer_of
from server.api.metrics import Metrics
from server.api.unknown_fields import shown_paths
from server.logs import begin_notes, note
from server.text.json_object import JsonObject
from server.traces import spans
from server.traces.spans import Span, Tracer

MAX_CLIENT_REQUEST_ID_BYTES = 512
_MAX_ORIGIN_CHARACTERS = 128

# Headers of every answer, unless its route sets them itself, as the page and streams do.
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cache-control": b"no-store",
    b"openai-version": b"2020-10-01",
}

_PROBES = ("/health", "/metrics", "/ready")
"""Routes that machines ask all the time; lines about them are for debugging, but for changes."""

_OPERATIONS = {
    ("POST", "/v1/chat/completions"): "chat",
    ("POST", "/v1/completions"): "text_completion",
}
"""Requests that are traced, and what OpenTelemetry calls them."""
_NOTED = ("request_id", "tenant_id", "key_id", "method", "route", "status", "attempts")
"""Fields of a request's log line that its trace has as well."""

WriteLine = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True, eq=False)
class Edge:
    """The outermost middleware of the gateway's own.

    write_line: takes the log line of a request when its answer has ended (see server.logs).
    tracer: exports the spans of inference requests; None where there are no traces.
    origins: those whose pages may call.
    """

    app: ASGIApp
    metrics: Metrics
    write_line: WriteLine
    tracer: Tracer | None
    origins: Collection[str]
    _was_ready: bool | None = field(default=None, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # answered as a GET; the server drops the body
        span = self._begin_span(method, scope)
        traceparent = span.traceparent if span else None
        exchange = _Exchange(scope, method, send, self.metrics, traceparent)
        try:
            if refused := _refusal(scope) or _refused_preflight(scope, self.origins):
                await error_response(refused)(scope, receive, exchange.send)
            else:
                await self.app(scope, receive, exchange.send)
        except (Exception, asyncio.CancelledError) as error:
            # A fault of the server: the client is not told its cause, the log gets its trace.
            spans.note_error(type(error).__name__)
            is_closed = exchange.status is not None or _is_cancelled()
            answer = None if is_closed else error_response(Failed())
            note(trace=trace_of(error))
            if answer is None:
                raise  # the answer has begun, or nobody waits for it: the connection is closed
            await answer(scope, receive, exchange.send)
        finally:
            line = exchange.line()
            if line["route"] in _PROBES and line["status"] in (200, 503):
                line["level"] = self._level_of_probe(line["route"], line["status"] == 200)
            self.write_line(line)
            if self.tracer and span:
                _end_span(span, line)
                self.tracer.export(span)

    def _begin_span(self, method: str, scope: Scope) -> Span | None:
        """Begin the span of a request that is traced, for what this task does."""
        operation = self.tracer and _OPERATIONS.get((method, scope["path"]))
        if not self.tracer or not operation:
            return None
        span = self.tracer.begin(operation, _headers(scope))
        spans.enter(span)
        return span

    def _level_of_probe(self, route: str, is_well: bool) -> str:
        """The level of a probe's line, which is debug unless it says that readiness has changed."""
        if route != "/ready" or is_well == self._was_ready:
            return "debug"
        # Callers poll a gateway that starts until it is ready; only later it is a warning.
        level = "warning" if self._was_ready else "info"
        self._was_ready = is_well
        return level


class _Exchange:
    """One request and its answer.

    method: as the client sent it.   status: None until the answer has begun.
    traceparent: its place in its trace, if it has one.
    """

    def __init__(
        self,
        scope: Scope,
        method: str,
        send: Send,
        metrics: Metrics,
        traceparent: str | None,
    ) -> None:
        self.status: int | None = None
        self._at_s = time.time()
        self._began_s = time.perf_counter()
        self._scope, self._method = scope, method
        self._send = send
        self._metrics = metrics
        request_id = uuid.uuid4().hex
        # An inference request has its receipt under this id, which comes from no client.
        scope.setdefault("state", {})["request_id"] = request_id
        self._request_id = f"req_{request_id}"
        self._client_request_id = _client_request_id(scope)
        self._digest: bytes | None = None
        self._traceparent = traceparent
        self._notes = begin_notes()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._metrics.requests.labels(self._method, self._route or "", self.status).inc()
            message["headers"] = self._headed(message["headers"])
        await self._send(message)

    def _headed(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        given = dict(headers)
        self._digest = given.get(b"x-chorale-adapter-digest")
        headed = [*headers, (b"x-request-id", self._request_id.encode())]
        headed += [pair for pair in _HEADERS.items() if pair[0] not in given]
        headed.append((b"openai-processing-ms", b"%d" % self._elapsed_ms()))
        if ignored := self._scope["state"].get("ignored_fields"):
            headed.append((b"x-chorale-ignored-fields", shown_paths(ignored).encode()))
        if self._traceparent:
            headed.append((b"traceparent", self._traceparent.encode()))
        if self._client_request_id:
            headed.append((b"x-client-request-id", self._client_request_id))
        return headed

    @property
    def _route(self) -> str | None:
        """The endpoint's path as it is declared; None before it is found, or if there is none."""
        route: BaseRoute | None = self._scope.get("route")
        return route.path if isinstance(route, Route) else None

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._began_s) * 1000

    def line(self) -> JsonObject:
        """The log line of the exchange: ids and figures alone."""
        return {
            "at": self._at_s,
            "level": "error" if "trace" in self._notes else _level(self.status),
            "request_id": self._request_id,
            "trace_id": self._traceparent and self._traceparent.split("-")[1],
            "method": self._method,
            "route": self._route,
            "status": self.status,
            "duration_ms": round(self._elapsed_ms(), 1),
            **self._notes,
            "adapter_digest": self._digest.decode() if self._digest else None,
            "client_request_id": self._client_request_id and self._client_request_id.decode(),
        }


def _level(status: int | None) -> str:
    """The log level for an answer: an error for a 500, a warning for any other 5xx.

    Status None means that the client left before the answer.
    """
    if status == 500:
        return "error"
    is_well = status is None or status < 500
    return "info" if is_well else "warning"


def _end_span(span: Span, line: JsonObject) -> None:
    """End the span of a request, with what its log line says."""
    span.notes.update({name: line.get(name) for name in _NOTED})
    status = line["status"]
    if span.error is None and status is not None and status >= 400:
        span.error = str(status)
    span.end()


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _refusal(scope: Scope) -> Fault | None:
    """The error for a request that no endpoint gets."""
    if "\0" in scope["path"] or b"%00" in scope["query_string"]:
        # PostgreSQL stores no NUL characters, and no name has one.
        return Invalid("The URL must not contain the character U+0000.")
    if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:
        # Whose request it is must not depend on which of them somebody reads.
        return Invalid("Send one header 'Authorization', not more.")
    return None


def _refused_preflight(scope: Scope, origins: Collection[str]) -> Fault | None:
    """The error for a browser that asks on behalf of a page whose origin may not call."""
    if scope["method"] != "OPTIONS":
        return None
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None or origin in origins or "access-control-request-method" not in headers:
        return None
    shown = ascii(origin[:_MAX_ORIGIN_CHARACTERS])
    note(refused_origin=shown)
    message = (
        f"Pages of {shown} may not call this server from a browser. Its operator can allow it "
        "with the setting cors_origins."
    )
    return Forbidden(message, code="origin_not_allowed")


def _is_cancelled() -> bool:
    """Whether this very task was cancelled, and not only work that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _client_request_id(scope: Scope) -> bytes | None:
    """X-Client-Request-Id; None if it is missing, empty, too long or not printable ASCII."""
    for name, value in scope["headers"]:
        if name == b"x-client-request-id":
            fits: bool = 0 < len(value) <= MAX_CLIENT_REQUEST_ID_BYTES
            is_printable = value.isascii() and value.decode("latin-1").isprintable()
            return value if fits and is_printable else None
    return None


def error_response(error: Exception) -> JSONResponse:
    """The answer that is an error, which the request's span notes."""
    answer = answer_of(error)
    spans.note_error(answer.error["code"])
    return JSONResponse(answer.body, answer.status, headers=answer.headers)
