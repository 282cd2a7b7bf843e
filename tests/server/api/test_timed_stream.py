"""A stream ends at its time limit and calls on_end once, whatever its client does."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import StreamingResponse

from server.api.timed_stream import Ended

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


class Stream:
    """An endless body, and the number of calls of on_end."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.num_ends = 0

    async def body(self) -> AsyncGenerator[bytes, None]:
        while True:
            yield b"event"

    async def end(self) -> None:
        self.num_ends += 1

    async def send(self, message: dict[str, Any]) -> None:
        """Take the status and the first event, and then block as a full buffer does."""
        self.num_sent += 1
        if self.num_sent > 2:
            await asyncio.Event().wait()

    def run(self, receive: Any, timeout_s: float) -> None:
        response = Ended(StreamingResponse(self.body()), self.end, timeout_s)
        asyncio.run(asyncio.wait_for(response(SCOPE, receive, self.send), 30))


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def is_gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def test_a_client_that_does_not_read_is_hung_up_on_when_its_time_is_over(caplog) -> None:
    stream = Stream()
    stream.run(stays, timeout_s=0.01)
    assert (stream.num_sent, stream.num_ends) == (3, 1)
    assert "did not read" in caplog.text


def test_a_client_that_left_before_the_stream_began_ends_it_as_well() -> None:
    stream = Stream()
    stream.run(is_gone, timeout_s=30)
    assert stream.num_ends == 1
