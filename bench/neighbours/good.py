"""The well-behaved tenant: one request at a time every eighth of a second, in its own process."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx

from bench.report import percentiles_ms

INTERVAL_S = 0.125
_TIMEOUT_S = 60.0
_PROMPT = "A tenant that behaves asks for eight tokens. " * 133
"""A text of 6 kB, which is tokenized on a thread; its last 64 tokens are the prompt."""


@dataclass(frozen=True)
class Watched:
    """The tenant's view. seconds: of requests that went well.   errors: the others, by code."""

    seconds: list[float]
    errors: dict[str, int]
    num_tokens: int = 0

    def figures(self) -> dict[str, Any]:
        """The row's figures: how many requests, the share that went well, and their latency."""
        num = len(self.seconds) + sum(self.errors.values())
        latency = percentiles_ms(self.seconds)
        return {
            "requests": num,
            "success": len(self.seconds) / num,
            "errors": self.errors,
        } | latency


def complete(url: str, key: str, duration_s: float) -> Watched:
    """Ask for completions of a prompt of 6 kB."""
    body = {
        "model": "demo",
        "prompt": _PROMPT,
        "max_tokens": 8,
        "ignore_eos": True,
        "truncate_prompt_tokens": 64,
    }

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", json=body)

    return asyncio.run(_watch(url, key, duration_s, ask))


def send_parts(url: str, key: str, duration_s: float, path: str, part: bytes) -> Watched:
    """Send the same part of an upload again and again, which is accepted each time."""

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.put(path, content=part)

    return asyncio.run(_watch(url, key, duration_s, send))


async def _watch(
    url: str,
    key: str,
    duration_s: float,
    ask: Callable[[httpx.AsyncClient], Coroutine[Any, Any, httpx.Response]],
) -> Watched:
    """Ask when a request is due, whatever became of those before; each on a connection of its own.

    A connection of its own is what a client that has just started makes.
    """
    seconds: list[float] = []
    errors: Counter[str] = Counter()
    tokens = [0]

    async def one(due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        async with httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=_TIMEOUT_S,
            trust_env=False,
        ) as client:
            try:
                answer = await ask(client)
            except httpx.HTTPError as failed:
                errors[type(failed).__name__] += 1
                return
        if answer.is_success:
            seconds.append(time.perf_counter() - due)
            usage = answer.json().get("usage", {}) if answer.content else {}
            tokens[0] += usage.get("completion_tokens", 0)
        else:
            errors[str(answer.json()["error"]["code"])] += 1

    began = time.perf_counter()
    dues = [began + i * INTERVAL_S for i in range(int(duration_s / INTERVAL_S))]
    await asyncio.gather(*map(one, dues))
    return Watched(seconds, dict(errors), tokens[0])
