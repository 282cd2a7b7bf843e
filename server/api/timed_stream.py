"""Answers with an end: a stream's comes with its request's time, and of any the end is told."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from server.api.leaving_clients import unless_gone
from server.api.live_body import LiveBody

logger = logging.getLogger(__name__)

Write = Callable[[bytes], None]

READING_S = 30.0
"""Time after a request's deadline in which a client may read the rest of its answer."""


class TimedStream(StreamingResponse):
    """A stream. on_end: called once at its end, also if the client left before it began."""

    def __init__(
        self,
        body: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        on_end: Callable[[], Awaitable[None]] | None = None,
        status: int = 200,
    ) -> None:
        super().__init__(body, status, headers)
        self._timeout_s = timeout_s
        self._on_end = on_end or body.aclose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            # The answer is not complete, so the server closes the connection.
            logger.warning("a client did not read its answer within %g s", self._timeout_s)
        finally:
            await self._on_end()


class LiveStream(Response):
    """A stream whose pieces are written in the moment in which `make` makes them.

    make: makes the answer, and gives its pieces to its argument.   on_end: called once at its end,
    also if the client left before it began.
    """

    def __init__(
        self,
        make: Callable[[Write], Coroutine[Any, Any, None]],
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._make = make
        self._timeout_s = timeout_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                await unless_gone(receive, self._send_body(LiveBody(scope, send)))
        except TimeoutError:
            # The answer is not complete, so the server closes the connection.
            logger.warning("a client did not read its answer within %g s", self._timeout_s)
        finally:
            await self._on_end()

    async def _send_body(self, body: LiveBody) -> bool:
        try:
            await self._make(body.write)
            await body.end()
        finally:
            body.close()
        return True


class Ended(Response):
    """A response that calls `on_end` once it is sent, or its client has left."""

    def __init__(self, response: Response, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._response = response
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._on_end()
