"""A stream ends at its time limit, and its pieces reach the client in order."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import StreamingResponse
from hypothesis import given
from hypothesis import strategies as st

from server.api.timed_stream import Ended, LiveStream

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


class Client:
    """A connection and an ASGI `send` of one client. is_behind: whether it takes nothing now."""

    def __init__(self) -> None:
        self.got = b""
        self.has_all = False
        self.is_behind = False
        self._caught_up = asyncio.Event()

    def write_piece(self, piece: bytes) -> bool:
        if not self.is_behind:
            self.got += piece
        return not self.is_behind

    async def send(self, message: dict[str, Any]) -> None:
        while self.is_behind:
            await self._caught_up.wait()
        self.got += message.get("body", b"")
        self.has_all = not message.get("more_body", True)

    def catch_up(self) -> None:
        self.is_behind = False
        self._caught_up.set()
        self._caught_up = asyncio.Event()

    async def stream(self, make: Any, *, has_connection: bool = True) -> None:
        scope = SCOPE | ({"state": {"connection": self}} if has_connection else {})
        await LiveStream(make, {})(scope, stays, self.send)


@given(st.lists(st.sampled_from(["write", "fall behind", "catch up", "wait"])), st.booleans())
async def test_a_client_gets_every_piece_once_and_in_order(steps, has_connection) -> None:
    client, written = Client(), []

    async def make(write: Any) -> None:
        for number, step in enumerate(steps):
            if step == "write":
                written.append(b"%d," % number)
                write(written[-1])
            elif step == "wait":
                await asyncio.sleep(0)
            elif step == "catch up":
                client.catch_up()
            else:
                client.is_behind = True
        client.catch_up()

    await client.stream(make, has_connection=has_connection)
    assert client.got == b"".join(written)
    assert client.has_all


async def test_who_reads_pays_no_switch_of_tasks() -> None:
    client = Client()

    async def make(write: Any) -> None:
        write(b"now")
        assert client.got == b"now"

    await client.stream(make)
    assert client.has_all
