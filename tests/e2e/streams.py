"""Streams that run at once, and what became of each."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.stack import Stack, Tenant

PLAIN: dict[str, Any] = {"verify": False, "timeout": 60}
"""Options of clients that need no certificates, which take longer to read than a request."""
BODY = {
    "model": "base", "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip


def engines(stack: Stack) -> dict[str, Any]:
    """Return engines by name, as `GET /admin/v1/engines` shows them."""
    answer = stack.operator.get("/admin/v1/engines")
    return {engine["name"]: engine for engine in answer.json()["data"]}


def wait_until_ready(stack: Stack, count: int) -> None:
    """Wait until `count` engines are ready and each has reported its first figures."""

    def are_ready() -> bool:
        found = engines(stack).values()
        states = [engine["state"] for engine in found if engine["figures"]]
        return len(found) == count and states == ["ready"] * count

    stack.wait(are_ready)


def num_generated(stack: Stack) -> dict[str, int]:
    """Return completion tokens by engine that has told, counted since the engine's start."""
    found = {name: engine["figures"] for name, engine in engines(stack).items()}
    return {name: figures["completion_tokens"] for name, figures in found.items() if figures}


@dataclass
class Streamed:
    """A streamed answer.   events: those that came, without the last line, "[DONE]".

    is_whole: whether that line came.   sent_at, begun_at: when the request was sent, and when its
    answer began.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    is_whole: bool = False
    sent_at: float = 0.0
    begun_at: float = 0.0

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_whole = True
        elif line.startswith("data: "):
            self.events.append(json.loads(line.removeprefix("data: ")))

    @property
    def request_id(self) -> str:
        return str(self.events[0]["id"].rpartition("-")[2])

    @property
    def num_tokens(self) -> int:
        return sum(len(choice["token_ids"]) for choice in self._choices)

    @property
    def finish_reason(self) -> str | None:
        return next((c["finish_reason"] for c in self._choices if c["finish_reason"]), None)

    @property
    def error(self) -> str | None:
        """Code of the error with which it ended, or "cut off"; None if it is whole."""
        if self.is_whole:
            return None
        return str(self.events[-1].get("error", {}).get("code", "cut off"))

    @property
    def usage(self) -> dict[str, Any]:
        assert self.is_whole
        return dict(self.events[-1]["usage"])

    @property
    def _choices(self) -> Iterator[dict[str, Any]]:
        return (choice for event in self.events for choice in event.get("choices", ()))


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], got: Streamed) -> None:
    got.sent_at = time.monotonic()
    with contextlib.suppress(httpx.TransportError):
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            got.status, got.headers, got.begun_at = (
                answer.status_code, answer.headers, time.monotonic(),
            )  # fmt: skip
            async for line in answer.aiter_lines():
                got.take(line)


async def run_streams(
    tenant: Tenant, count: int, kill: Callable[[], None] | None = None, **changes: Any
) -> list[Streamed]:
    """Run streams at once, each on a connection of its own, and call `kill` when all have begun."""
    limits = httpx.Limits(max_connections=count)
    streams = [Streamed() for _ in range(count)]
    async with (
        httpx.AsyncClient(
            base_url=tenant.stack.base_url, headers=tenant.headers, timeout=120, limits=limits
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for number, got in enumerate(streams):
            body = BODY | {"prompt": [10 + number, *range(10, 40)], "return_token_ids": True}
            group.create_task(_stream(client, body | changes, got))
        if kill:
            while not all(got.num_tokens for got in streams):
                assert {got.status for got in streams} <= {0, 200}
                await asyncio.sleep(0.02)
            assert not any(got.finish_reason for got in streams), "all are under way"
            await asyncio.to_thread(kill)
    return streams


class StreamThread(threading.Thread):
    """A stream under way on a connection and a thread of its own.   got: what came of it."""

    def __init__(self, tenant: Tenant, **changes: Any) -> None:
        super().__init__()
        self.got = Streamed()
        self.answer: httpx.Response | None = None
        self._tenant, self._changes = tenant, changes
        self._has_begun = threading.Event()
        self.start()
        assert self._has_begun.wait(30)

    def run(self) -> None:
        body = BODY | {"prompt": [5, 6, 7]} | self._changes
        url = f"{self._tenant.stack.base_url}/v1/completions"
        try:
            with httpx.stream(
                "POST", url, json=body, headers=self._tenant.headers, **PLAIN
            ) as self.answer:
                for line in self.answer.iter_lines():
                    self.got.take(line)
                    if self.got.events:
                        self._has_begun.set()
        except httpx.TransportError:
            self._has_begun.set()

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of the answer, once it has come to its end."""
        self.join(60)
        return self.got.usage
