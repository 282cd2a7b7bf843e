"""The process of a gateway: its loop beats, and at its end nobody is cut off."""

import asyncio
import os
import socket
import tempfile
from types import SimpleNamespace
from typing import cast

import uvicorn
from starlette.types import Receive, Scope, Send

from lora.beat import RECORD, Beat
from server.__main__ import _Server
from server.api.connections import Connections
from server.api.http_protocol import HttpLimits, protocol
from server.inference.bases import Bases
from server.inference.drain import Drain

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Running:
    """A gateway's server with neighbours, whose application tells whether the drain has begun."""

    def __init__(self, beat: Beat) -> None:
        self.drain = Drain(cast(Bases, SimpleNamespace(num_running=0)), 1.0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        http = protocol(HttpLimits(), Connections(99, 99))
        options = {"http": http, "interface": "asgi3", "lifespan": "off", "log_config": None}
        config = uvicorn.Config(self._app, **options)
        self.server = _Server(config, self.drain, beat, has_neighbours=True)

    async def __aenter__(self) -> "Running":
        self._serving = asyncio.create_task(self.server.serve([self._listener]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.should_exit = True
        await self._serving

    @property
    def listens(self) -> bool:
        return self._listener.fileno() >= 0

    async def _app(self, _: Scope, __: Receive, send: Send) -> None:
        body = b"late" if self.drain.has_begun else b"good"
        headers = [(b"content-length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def test_an_idle_connection_has_one_more_answer_before_requests_are_refused() -> None:
    async with Running(Beat()) as running:
        reader, writer = await asyncio.open_connection(*running.address)
        writer.write(REQUEST)
        assert b"connection: close" not in await reader.readuntil(b"good")
        running.server.should_exit = True
        while running.listens:
            await asyncio.sleep(0)
        writer.write(REQUEST)
        assert b"connection: close" in await reader.readuntil(b"good")
        assert await reader.read() == b""
        writer.close()
    assert running.drain.has_begun


def test_the_loop_of_a_gateway_beats() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(RECORD.size))
        file.flush()

        def num_beats() -> int:
            return int(RECORD.unpack(os.pread(file.fileno(), RECORD.size, 0))[0])

        async def run() -> None:
            async with Running(Beat(file.fileno(), silence_s=0.1)), asyncio.timeout(30.0):
                while num_beats() < 2:
                    await asyncio.sleep(0)

        asyncio.run(run())
        assert num_beats() >= 2
