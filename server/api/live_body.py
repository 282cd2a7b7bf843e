"""The body of an answer under way, whose pieces go to the connection as soon as they exist."""

import asyncio
from collections import deque
from typing import Protocol

from starlette.types import Scope, Send


class Connection(Protocol):
    def write_piece(self, piece: bytes) -> bool:
        """Write a piece of the present answer's body; False if the client is behind."""


class LiveBody:
    """Writes each piece at once; pieces that a slow client does not take yet are kept.

    Without a connection in the request's state, as under another server, all pieces go through
    ASGI's `send`. What is kept is bounded by the answer.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._connection: Connection | None = scope.get("state", {}).get("connection")
        self._send = send
        self._kept: deque[bytes] = deque()
        self._sending: asyncio.Task[None] | None = None

    def write(self, piece: bytes) -> None:
        if self._sending is None:
            if self._connection is not None and self._connection.write_piece(piece):
                return
            self._sending = asyncio.create_task(self._send_kept())
        self._kept.append(piece)

    async def end(self) -> None:
        """Send what is kept, and the end of the body."""
        if self._sending is not None:
            await self._sending
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Let go of what was not sent."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send_kept(self) -> None:
        while self._kept:
            piece = self._kept.popleft()
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sending = None
