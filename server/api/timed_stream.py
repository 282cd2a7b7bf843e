"""Answers whose end is told and comes with the request's time, and streams written at once."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.http_protocol import LimitedProtocol
from server.api.leaving_clients import unless_gone

logger = logging.getLogger(__name__)

Write = Callable[[bytes], None]

READING_S = 30.0
"""Time after a request's deadline in which a client may read the rest of its answer."""


class Ended(Response):
    """A response that calls `on_end` once it is sent, or its client has left, also before it began.

    timeout_s: time in which the client has to read it; None for no end.
    """

    def __init__(
        self,
        response: Response,
        on_end: Callable[[], Awaitable[None]],
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._response = response
        self._on_end = on_end
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Most answers have no time, and a limit of none costs 5 us.
        limit = asyncio.timeout(self._timeout_s) if self._timeout_s else nullcontext()
        try:
            async with limit:
                await self._response(scope, receive, send)
        except TimeoutError:
            if self._timeout_s is None:
                raise
            # The answer is not complete, so the server closes the connection.
            logger.warning("a client did not read its answer within %g s", self._timeout_s)
        finally:
            await self._on_end()


class LiveStream(Response):
    """A stream whose pieces are written in the moment in which `make` makes them.

    Pieces that a slow client does not take yet are kept; the answer bounds them. Without a
    connection in the request's state, as under another server, all go through ASGI's `send`.
    make: makes the answer, and gives its pieces to its argument.
    """

    def __init__(
        self, make: Callable[[Write], Coroutine[Any, Any, None]], headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._make = make
        self._kept: deque[bytes] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection: LimitedProtocol | None = scope.get("state", {}).get("connection")
        self._send = send
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await unless_gone(receive, self._send_body())

    async def _send_body(self) -> None:
        try:
            await self._make(self._write)
            if self._sending is not None:
                await self._sending
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._sending is not None:
                self._sending.cancel()

    def _write(self, piece: bytes) -> None:
        if self._sending is None:
            if self._connection is not None and self._connection.write_piece(piece):
                return
            self._sending = asyncio.create_task(self._send_kept())
        self._kept.append(piece)

    async def _send_kept(self) -> None:
        while self._kept:
            piece = self._kept.popleft()
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sending = None
