"""An HTTP client as cheap as Python allows: it shares the machine with the measured server."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

PROMPT = "What does the gateway cost? Say it in as many words as you are asked for, please. "
_EVENT = b"data: {"
_END_OF_HEAD = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class HttpTarget:
    """A gateway that speaks OpenAI's API, ours or another."""

    port: int
    key: str
    model: str
    max_tokens: int
    stream: bool = False

    async def open(self) -> "HttpClient":
        return HttpClient(self)

    @property
    def body(self) -> bytes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": self.max_tokens,
            "stream": self.stream,
        }
        return json.dumps(body).encode()


class HttpClient:
    """Posts one body again and again, on as many kept-alive connections as are needed at once."""

    def __init__(self, target: HttpTarget) -> None:
        self._port = target.port
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {target.key}\r\n"
            f"Content-Length: {len(target.body)}\r\n\r\n"
        )
        self._request = head.encode() + target.body
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, on_event: Callable[[int], None] = lambda _: None) -> str | None:
        """Return None if the request went well, else the error.

        on_event: called with the number of SSE events that came at once.
        """
        try:
            while self._idle:
                reader, writer = self._idle.pop()
                if not reader.at_eof():
                    break
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(self._request)
            head = await reader.readuntil(_END_OF_HEAD)
            if length := re.search(rb"(?i)\r\ncontent-length: *(\d+)", head):
                body = await reader.readexactly(int(length[1]))
            else:
                body = await _read_events(reader, on_event)
        except (OSError, EOFError) as error:
            return type(error).__name__
        self._idle.append((reader, writer))
        status = int(head.split(maxsplit=2)[1])
        return None if status == 200 else f"{status} {body[:200]!r}"

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _read_events(reader: asyncio.StreamReader, on_event: Callable[[int], None]) -> bytes:
    """Count the events of a stream, and return its end. Raises EOFError."""
    end = b""
    while not end.endswith(_LAST_CHUNK):
        data = await reader.read(_READ_BYTES)
        if not data:
            raise EOFError
        # The bytes that are kept may begin an event; they are too few to be one.
        end = end[-(len(_EVENT) - 1) :] + data
        if events := end.count(_EVENT):
            on_event(events)
    return end
