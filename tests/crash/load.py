"""The clients of one run: the request of each, and the answer that it saw."""

import asyncio
import itertools
import json
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

_STEM = list(range(10, 60))
"""Tokens with a part of which many prompts begin, so that cached tokens occur in the bill."""
_CONNECT_TRIES = 500
_RETRY_S = 0.02
_TIMEOUT_S = 30.0

Fate = Literal["done", "left", "error", "reset", "unsent"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion. max_tokens: differs between requests of a run, so it identifies the hold.

    delay_s: time from the start of the load.   leave_after: number of chunks after which the client
    hangs up; None: it stays to the end.
    """

    max_tokens: int
    prompt: tuple[int, ...]
    model: str = "base"
    tenant: int = 0
    delay_s: float = 0.0
    is_stream: bool = True
    leave_after: int | None = None


@dataclass(slots=True)
class Seen:
    """The answer that one client got.

    done: the whole answer.   left: the client hung up.   error: an error status, or an error event.
    reset: the connection ended before the answer did.   unsent: no gateway listened.
    """

    max_tokens: int
    fate: Fate = "unsent"
    num_tokens: int = 0
    code: str | None = None


def make_asks(chance: random.Random, lengths: list[int], spread_s: float) -> list[Ask]:
    """Make a request for each max_tokens in `lengths`, at a random moment within `spread_s`."""
    asks = []
    for max_tokens in lengths:
        stem = _STEM[: chance.randrange(len(_STEM))]
        own = [chance.randrange(4, 250) for _ in range(chance.randrange(1, 60))]
        asks.append(
            Ask(
                max_tokens,
                (*stem, *own),
                model=chance.choice(["base", "pirate"]),
                tenant=chance.randrange(2),
                delay_s=chance.random() * spread_s,
                is_stream=chance.random() < 0.8,
                leave_after=chance.choice([None, None, None, 1, 5, 20]),
            )
        )
    return asks


async def send_all(sockets: list[Path], api_keys: list[str], asks: list[Ask]) -> list[Seen]:
    """Send the requests to the gateways at these sockets, in turn."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(socket)) for socket in sockets]
        pairs = zip(itertools.cycle(clients), asks, strict=False)
        return list(await asyncio.gather(*(_send(http, api_keys, ask) for http, ask in pairs)))


def _client(socket: Path) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(
        uds=str(socket), verify=False, limits=httpx.Limits(max_keepalive_connections=0)
    )
    return httpx.AsyncClient(transport=transport, base_url="http://chorale", timeout=30)


async def _send(http: httpx.AsyncClient, api_keys: list[str], ask: Ask) -> Seen:
    seen = Seen(ask.max_tokens)
    await asyncio.sleep(ask.delay_s)
    for _ in range(_CONNECT_TRIES):
        try:
            await _ask(http, api_keys[ask.tenant], ask, seen)
        except httpx.ConnectError:
            await asyncio.sleep(_RETRY_S)
        except httpx.TransportError:
            seen.fate = "reset"
            return seen
        else:
            return seen
    return seen


async def _ask(http: httpx.AsyncClient, api_key: str, ask: Ask, seen: Seen) -> None:
    body = {
        "model": ask.model,
        "prompt": list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "stream": ask.is_stream,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"authorization": f"Bearer {api_key}"}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            error = json.loads(await answer.aread())["error"]
            seen.fate, seen.code = "error", error["code"]
        elif not ask.is_stream:
            _take(json.loads(await answer.aread()), seen)
            seen.fate = "done"
        else:
            seen.fate = "reset"
            await _read_events(answer, ask, seen)


async def _read_events(answer: httpx.Response, ask: Ask, seen: Seen) -> None:
    num_chunks = 0
    async for line in answer.aiter_lines():
        if num_chunks == ask.leave_after:
            seen.fate = "left"
            return
        if line == "data: [DONE]":
            seen.fate = "done"
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                seen.fate, seen.code = "error", event["error"]["code"]
                return
            _take(event, seen)
            num_chunks += 1


def _take(answer: dict[str, Any], seen: Seen) -> None:
    seen.num_tokens += len(answer["choices"][0]["token_ids"])
