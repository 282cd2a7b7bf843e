"""uvicorn's HTTP/1.1 protocol, with limits that hold before there is a request.

A head is limited in size, in number of headers and in time, and has to be of HTTP/1.0 or HTTP/1.1.
"""

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from registry.errors import Fault, Invalid
from server.api import errors
from server.api.connections import Connections
from server.api.errors import answer_of


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of a request's head, and of a small body, which the application gets whole.

    A body that stalls before it is known who sends it so costs no more than a silent connection.
    Between two requests, uvicorn's keep-alive timeout counts.
    """

    max_head_bytes: int = 64 << 10
    max_headers: int = 100
    head_timeout_s: float = 3.0
    small_body_bytes: int = 8 << 10
    body_timeout_s: float = 10.0


class Deadline:
    """The time by which something has to have come; then a function is called instead."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, in_s: float, refuse: Callable[[Fault], None], error: Fault) -> None:
        """Set it anew."""
        self.lift()
        self._timer = self._loop.call_later(in_s, refuse, error)

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LimitedProtocol(HttpToolsProtocol):
    """Refuses a head that is too large (431) or too slow (408), and connections without a place.

    A refused connection is closed, and data that still arrives on it is ignored.
    """

    def __init__(
        self, *args: Any, limits: HttpLimits, all_connections: Connections, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._all_connections = all_connections
        # Bytes of the head that is being received; None while the rest of its request is.
        self._num_head_bytes: int | None = 0
        # Of the head, or of the small body, that is being received.
        self._deadline = Deadline(self.loop)
        self._is_in_head = False
        # The request whose small body is being received.
        self._unbegun: tuple[RequestResponseCycle, ASGI3Application] | None = None
        self._is_refused = False
        self._is_winding_down = False
        # Whether the present answer goes to an HTTP/1.0 client, which does not know chunks.
        self._is_plain = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        try:
            self._all_connections.open(self, self.client[0] if self.client else None)
        except Fault as error:
            self._refuse(error)
        else:
            self._expect_head()

    def give_way(self) -> None:
        """Close at once, for another connection; a client that had no answer yet is told why."""
        cycle = self.cycle
        if self.transport.is_closing() or self.pipeline or (cycle and cycle.response_started):
            self.transport.abort()
        else:
            self._refuse_request(errors.too_many_connections())

    def wind_down(self) -> bool:
        """Have the next answer say that it is the connection's last.

        Returns whether the connection may bring another request until then.
        """
        self._is_winding_down = True
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False
        return self.cycle is None or self.cycle.keep_alive

    def show_key(self, tenant_id: str) -> None:
        """Count the connection as the tenant's. Raises Invalid if the tenant has its share."""
        self._all_connections.show_key(self, tenant_id)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.lift()
        self._all_connections.close(self)
        super().connection_lost(exc)

    def write_piece(self, piece: bytes) -> bool:
        """Write a piece of the present answer's body, without a switch of tasks.

        The answer's head was sent without a length. Returns False if the client is behind: then the
        piece has to wait, and go through ASGI's `send`.
        """
        if self.flow.write_paused:
            return False
        if not self.transport.is_closing():
            self.transport.write(piece if self._is_plain else b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not self._deadline.is_set and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        if self._num_head_bytes is not None:
            # Counted here, because the parser does not tell the size of an unfinished line.
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes is not None and self._num_head_bytes > self._limits.max_head_bytes:
            self._refuse(errors.head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        size_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size_bytes > self._limits.max_head_bytes or len(self.headers) > self._limits.max_headers:
            self._refuse(errors.head_too_large())
            return
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refuse(Invalid("The server speaks HTTP/1.1 and HTTP/1.0."))
            return
        self._deadline.lift()
        self._num_head_bytes = None
        self._is_in_head = False
        self.scope["state"]["connection"] = self
        super().on_headers_complete()
        if self._is_winding_down:
            self.cycle.keep_alive = False
        self._all_connections.begin_request(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        size = dict(cycle.scope["headers"]).get(b"content-length", b"0")
        if not cycle.more_body or len(size) > 9 or int(size) > self._limits.small_body_bytes:
            self._begin(cycle, app)
            return
        self._unbegun = cycle, app
        self._deadline.set(self._limits.body_timeout_s, self._refuse_request, errors.body_timeout())
        if cycle.waiting_for_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False

    def _begin_if_due(self) -> None:
        """Begin the request whose body is whole, or is not small after all."""
        if self._unbegun is not None:
            cycle, app = self._unbegun
            if not cycle.more_body or len(cycle.body) > self._limits.small_body_bytes:
                self._unbegun = None
                self._deadline.lift()
                self._begin(cycle, app)

    def _begin(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._is_plain = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if self._is_plain else app)

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)
            self._begin_if_due()

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()
            self._begin_if_due()
            # A pipelined head that waits its turn is counted too: uvicorn stops reading after it.
            self._num_head_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_head and not self._is_refused:  # it began during the last answer
            self._unset_keepalive_if_required()
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Invalid(msg))

    def _expect_head(self) -> None:
        self._deadline.set(self._limits.head_timeout_s, self._refuse, errors.head_timeout())

    def _refuse_request(self, error: Fault) -> None:
        """Refuse the present request, of whose answer nothing has been sent."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # what the application still sends goes nowhere
        self._refuse(error)

    def _refuse(self, error: Fault) -> None:
        self._is_refused = True
        self._deadline.lift()
        # An error cannot be written into the middle of another request's answer.
        if self.cycle is None or self.cycle.response_complete or self.cycle.disconnected:
            answer = answer_of(error)
            body = json.dumps(answer.body).encode()
            headers = {
                **answer.headers,
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(STATUS_LINE[answer.status] + lines.encode() + b"\r\n" + body)
        self.transport.close()


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """The application, whose bodies without a length last until the connection's end.

    uvicorn closes the connection after an answer to HTTP/1.0. Source: RFC 9112, 6.1 and 6.3.
    """

    async def run(scope: Scope, receive: ASGIReceiveCallable, _: Any) -> None:
        has_length = True

        async def send(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = b"content-length" in {name.lower() for name, _ in message["headers"]}
                # uvicorn adds the header where this is still None.
                cycle.chunked_encoding = None if has_length else False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await cycle.send(message)

        await app(scope, receive, send)

    return run


def protocol(limits: HttpLimits, all_connections: Connections) -> type[asyncio.Protocol]:
    """A factory of protocols for uvicorn's `http` setting, which is typed as a class."""
    make = functools.partial(LimitedProtocol, limits=limits, all_connections=all_connections)
    return cast(type[asyncio.Protocol], make)
