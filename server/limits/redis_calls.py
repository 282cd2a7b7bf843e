"""Calls of the script, sent together: those that come while one batch is under way are the next.

One round trip for many: a burst of 200 requests takes a few batches on one connection, where 200
connections would first have to be made.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import NoScriptError, RedisError

T = TypeVar("T")

_MAX_BATCH = 64
_LAST_LOOKS = 4
_MAX_DEADLINES = 5
"""That one call may wait for while others are answered."""
_PATIENCE = 10
"""Deadlines of what no request waits for: a connection may have to be made first."""


class StateUnavailable(Exception):
    """Nobody was answered within the deadline, or there is no connection; what was asked may or may
    not have been done.
    """


@dataclass(frozen=True, slots=True)
class _Call:
    keys: list[str]
    arguments: list[str | int]
    reply: asyncio.Future[Any]


class RedisCalls:
    """One script on one Redis. deadline_s: of one call."""

    def __init__(self, url: str, script: str, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # One for batches, one for what else there is.
        self._redis = redis.asyncio.Redis.from_url(url, max_connections=4, protocol=2)
        self._script = script
        self._sha = self._redis.register_script(script).sha
        self._waiting: deque[_Call] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._answered_at_s = 0.0

    async def evaluate(self, keys: list[str], arguments: list[str | int]) -> Any:
        """Raises StateUnavailable."""
        call = _Call(keys, arguments, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await self._in_time(call.reply)

    async def set_new(self, key: str, value: int) -> None:
        """Unless it is there. Raises StateUnavailable."""
        await self._in_time(self._redis.set(key, value, nx=True), patience=_PATIENCE)

    async def ping(self) -> None:
        """Raises StateUnavailable."""
        await self._in_time(self._redis.ping(), patience=_PATIENCE)

    async def close(self) -> None:
        if self._sending:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        await self._redis.aclose()

    async def _send(self) -> None:
        while self._waiting:
            batch: list[_Call] = []
            while self._waiting and len(batch) < _MAX_BATCH:
                call = self._waiting.popleft()
                if not call.reply.done():  # who waited too long has left
                    batch.append(call)
            if batch:
                await self._send_batch(batch)

    async def _send_batch(self, batch: list[_Call]) -> None:
        try:
            # Longer than anybody waits: a connection that answers nobody is given up.
            async with asyncio.timeout(_MAX_DEADLINES * self._deadline_s):
                replies = await self._execute(batch)
        except (RedisError, OSError, TimeoutError):
            replies = [StateUnavailable()] * len(batch)
        for call, reply in zip(batch, replies, strict=True):
            if call.reply.done():
                continue
            if isinstance(reply, Exception):
                call.reply.set_exception(StateUnavailable())
            else:
                call.reply.set_result(reply)

    async def _execute(self, batch: list[_Call]) -> list[Any]:
        """Their replies; an error of one is its own."""
        pipeline = self._redis.pipeline(transaction=False)
        for call in batch:
            pipeline.evalsha(self._sha, len(call.keys), *call.keys, *call.arguments)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            # Restarted or wiped: none of them was run.
            await self._redis.script_load(self._script)
            return await self._execute(batch)
        return replies

    async def _in_time(self, answer: Awaitable[T], *, patience: int = 1) -> T:
        """The answer within the deadline; a later one while others are answered meanwhile: then the
        calls of this gateway queue up, and Redis does what it can.
        """
        task = asyncio.ensure_future(answer)
        try:
            for _ in range(_MAX_DEADLINES):
                asked_at_s = time.monotonic()
                await asyncio.wait({task}, timeout=patience * self._deadline_s)
                for _ in range(_LAST_LOOKS):
                    if task.done():
                        self._answered_at_s = time.monotonic()
                        return task.result()
                    # This process was late, maybe, not Redis: its answer may lie in the socket.
                    await asyncio.sleep(0)
                if self._answered_at_s < asked_at_s:
                    break
            raise StateUnavailable
        except (RedisError, OSError) as error:
            raise StateUnavailable from error
        finally:
            task.cancel()
