"""A client that calls the application without a socket, hears each message, and may leave."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.server.in_process import User


@dataclass
class Caller:
    """A client that calls the application and leaves after `leave_after` pieces of the body.

    leave_after: -1 is at once, 0 at the status; None is when `leaving` is set.
    """

    user: User
    body: dict[str, Any]
    sent_headers: Mapping[str, str] = field(default_factory=dict)
    leave_after: int | None = None
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    received: list[bytes] = field(default_factory=list)
    got: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self) -> None:
        sent = [{"type": "http.request", "body": json.dumps(self.body).encode()}]
        headers = {"authorization": f"Bearer {self.user.api_key}", **self.sent_headers}
        path = "/v1/chat/completions" if "messages" in self.body else "/v1/completions"
        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "asgi": {"spec_version": "2.3"},
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            if self.leave_after != -1:
                await self.leaving.wait()
            return {"type": "http.disconnect"}

        async def hear(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            elif message.get("body"):
                self.received.append(message["body"])
            self.got.set()
            if self.leave_after is not None and 0 <= self.leave_after <= len(self.received):
                self.leaving.set()
                await asyncio.Event().wait()  # the client takes nothing more

        await self.user.product.app(scope, receive, hear)
