"""An HTTP client as cheap as Python allows: it shares the machine with the measured server."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

_EVENT = b"data: {"
_END_OF_HEAD = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class HttpClient:
    """Posts one body again and again, on as many kept-alive connections as are needed at once."""

    def __init__(self, host: str, port: int, path: str, body: bytes, key: str | None) -> None:
        self._address = (host, port)
        lines = [f"POST {path} HTTP/1.1", f"Host: {host}:{port}", "Content-Type: application/json"]
        lines += [f"Authorization: Bearer {key}"] if key else []
        lines += [f"Content-Length: {len(body)}", "", ""]
        self._request = "\r\n".join(lines).encode() + body
        self._idle: deque[_Connection] = deque()

    async def ask(self, on_event: Callable[[int], None] = lambda _: None) -> str | None:
        """Return None if the request went well, else the error.

        on_event: called with the number of SSE events that came at once.
        """
        try:
            connection = await self._connection()
            status, body = await connection.exchange(self._request, on_event)
        except OSError as error:
            return type(error).__name__
        if connection.is_open:
            self._idle.append(connection)
        return None if status == 200 else f"{status} {body[:200]!r}"

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> "_Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, *self._address)
        return connection


class _Connection(asyncio.Protocol):
    """A connection, one exchange at a time; the events of a stream are counted and not kept."""

    def __init__(self) -> None:
        self.is_open = False
        self._begin(lambda _: None)

    def _begin(self, on_event: Callable[[int], None]) -> None:
        self._on_event = on_event
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = b""
        self._status = 0
        self._length: int | None = None

    async def exchange(self, request: bytes, on_event: Callable[[int], None]) -> tuple[int, bytes]:
        """Return the status and the body; the end of the body if it is a stream. Raises OSError."""
        self._begin(on_event)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self._transport.close()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._status:
            head, found, rest = self._buffer.partition(_END_OF_HEAD)
            if not found:
                return
            self._status, self._length = _read_head(head)
            self._buffer = data = rest
        if self._length is not None:
            if len(self._buffer) >= self._length:
                self._finish()
            return
        is_end = self._buffer.endswith(_LAST_CHUNK)
        if events := self._buffer.count(_EVENT):
            self._on_event(events)
        # Keep the bytes that may begin an event or the last chunk; they are too few to be an event.
        self._buffer = self._buffer[-(len(_EVENT) - 1) :]
        if is_end:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._answer and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError())

    def _finish(self) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_result((self._status, self._buffer))


def _read_head(head: bytes) -> tuple[int, int | None]:
    """Return the status, and the length of the body, which is None if it comes in chunks."""
    lines = head.split(b"\r\n")
    status = int(lines[0].split()[1])
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return status, int(value)
    return status, None
