"""Loads of other tenants that took the house down: each runs until it is cancelled."""

import asyncio
import contextlib
import json
import resource
import socket
from typing import Any

import httpx

PART = b'{"peft_type": "LORA"}'
"""The bytes of a small file of an upload."""
_SPACES = " " * 3_500_000
_NUM_SPACES = 12
_NUM_ANSWERS = 50
_NUM_STALLED = 16
_NUM_HELD = 4200


async def spaces(url: str, keys: list[str]) -> None:
    """Send prompts of 3.5 MB of spaces, 12 at a time, as a tenant with small limits."""
    body = json.dumps({"model": "demo", "prompt": _SPACES, "max_tokens": 1}).encode()
    await _repeat(url, keys[0], _NUM_SPACES, body)


async def answers(url: str, keys: list[str]) -> None:
    """Keep 50 requests with 16 answers each under way."""
    ask = {"model": "demo", "prompt": "Hello", "n": 16, "max_tokens": 200, "ignore_eos": True}
    await _repeat(url, keys[0], _NUM_ANSWERS, json.dumps(ask).encode())


async def parts(url: str, keys: list[str], paths: list[str]) -> None:
    """Begin 16 parts of uploads of two tenants, send 3 bytes of each, and stall.

    A part that is ended is begun again.
    """
    host, port = url.removeprefix("http://").split(":")

    async def stall(key: str, path: str) -> None:
        head = f"PUT {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head.encode() + f"content-length: {len(PART)}\r\n\r\n".encode())
                writer.write(PART[:3])
                await reader.read()
                writer.close()
            await asyncio.sleep(0.05)

    each = [(keys[i % 2], paths[i % 2]) for i in range(_NUM_STALLED)]
    await asyncio.gather(*(stall(key, path) for key, path in each))


async def connections(url: str, keys: list[str], said: bytes = b"") -> None:
    """Keep 4,200 connections open that say nothing but `said`; one that is closed is made again."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()

    async def hold() -> None:
        while True:
            with contextlib.suppress(OSError), socket.socket() as held:
                held.setblocking(False)
                await loop.sock_connect(held, (host, int(port)))
                await loop.sock_sendall(held, said)
                while await loop.sock_recv(held, 1000):
                    pass
            await asyncio.sleep(0.5)

    await asyncio.gather(*(hold() for _ in range(_NUM_HELD)))


async def sign_ins(url: str, keys: list[str]) -> None:
    """Keep 4,200 connections open, each with a form for signing in of which one byte has come."""
    head = b"POST /console/sign-in HTTP/1.1\r\nhost: x\r\norigin: http://x\r\n"
    await connections(url, keys, head + b"content-length: 99\r\n\r\nk")


async def _repeat(url: str, key: str, num: int, body: bytes) -> None:
    """Send a request again and again, `num` at a time."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    limits: Any = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=120.0, limits=limits, trust_env=False
    ) as client:

        async def loop() -> None:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    await client.post("/v1/completions", content=body)
                await asyncio.sleep(0.05)

        await asyncio.gather(*(loop() for _ in range(num)))
