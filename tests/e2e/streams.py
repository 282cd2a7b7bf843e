"""Streams that run at once, and what became of each."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.stack import Stack, Tenant

PLAIN: dict[str, Any] = {"verify": False, "timeout": 60}
"""Options of clients that need no certificates, which take longer to read than a request."""


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
    """One streamed answer. error: code of the error with which it ended, or "cut off"."""

    request_id: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


async def stream(client: httpx.AsyncClient, number: int, tokens: int, got: Streamed) -> None:
    body = {
        "model": "base", "prompt": [10 + number, *range(10, 40)], "max_tokens": tokens,
        "stream": True, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    _take(json.loads(line[6:]), got)
    except httpx.TransportError:
        got.error = "cut off"


def _take(chunk: dict[str, Any], got: Streamed) -> None:
    if "error" in chunk:
        got.error = chunk["error"]["code"]
        return
    got.request_id = chunk["id"].rpartition("-")[2]
    (choice,) = chunk["choices"]
    got.num_tokens += len(choice["token_ids"])
    got.finish_reason = choice["finish_reason"] or got.finish_reason


async def run_streams(
    stack: Stack,
    tenant: Tenant,
    count: int,
    tokens: int,
    kill: Callable[[], None] | None = None,
) -> list[Streamed]:
    """Run streams at once, and call `kill` when all have begun."""
    headers = {"authorization": f"Bearer {tenant.api_key}"}
    limits = httpx.Limits(max_connections=count)
    streams = [Streamed() for _ in range(count)]
    async with (
        httpx.AsyncClient(
            base_url=stack.base_url, headers=headers, timeout=60, limits=limits
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for number, got in enumerate(streams):
            group.create_task(stream(client, number, tokens, got))
        if kill:
            while not all(got.num_tokens for got in streams):
                await asyncio.sleep(0.02)
            assert not any(got.finish_reason for got in streams), "all are under way"
            await asyncio.to_thread(kill)
    return streams


class StreamThread(threading.Thread):
    """A stream under way on a connection and a thread of its own.

    events: those that came, without the last line, "[DONE]".   is_whole: whether that one came.
    """

    def __init__(self, tenant: Tenant, **changes: Any) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.is_whole = False
        self.answer: httpx.Response | None = None
        self._tenant, self._changes = tenant, changes
        self._has_begun = threading.Event()
        self.start()
        assert self._has_begun.wait(30)

    def run(self) -> None:
        body = {
            "model": "base", "prompt": [5, 6, 7], "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **self._changes,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self._tenant.api_key}"}
        url = f"{self._tenant.stack.base_url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=headers, **PLAIN) as self.answer:
                for line in filter(None, self.answer.iter_lines()):
                    if line == "data: [DONE]":
                        self.is_whole = True
                    else:
                        self.events.append(json.loads(line.removeprefix("data: ")))
                        self._has_begun.set()
        except httpx.TransportError:
            self._has_begun.set()

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of the answer, once it has come to its end."""
        self.join(60)
        assert self.is_whole
        return self.events[-1]["usage"]
