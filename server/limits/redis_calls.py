"""Calls of the script, sent in batches: calls that come during one batch are the next batch.

A batch takes one round trip: a burst of 200 requests takes a few batches on one connection, where
otherwise 200 connections would first have to be made.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import NoScriptError, RedisError

SCRIPT = resources.files("server.limits").joinpath("limits.lua").read_text()

T = TypeVar("T")

_MAX_BATCH = 64
_LAST_LOOKS = 4
_MAX_DEADLINES = 5
"""Most deadlines that one call waits for while other calls are answered."""
_PATIENCE = 10
"""Deadlines for calls that no request waits for: a connection may have to be made first."""


class StateUnavailable(Exception):
    """No call was answered within the deadline, or there is no connection; the call may or may not
    have been run.
    """


@dataclass(frozen=True, slots=True)
class _Call:
    keys: list[str]
    arguments: list[str | int]
    reply: asyncio.Future[Any]


class RedisCalls:
    """Calls of the script on one Redis.   deadline_s: seconds that one call may take."""

    def __init__(self, url: str, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # Batches take one connection, other commands a second one.
        self._redis = redis.asyncio.Redis.from_url(url, max_connections=4, protocol=2)
        self._sha = self._redis.register_script(SCRIPT).sha
        self._waiting: deque[_Call] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._answered_at_s = 0.0

    async def evaluate(
        self, keys: list[str], arguments: list[str | int], *, is_patient: bool = False
    ) -> Any:
        """Run the script. Returns its reply. Raises StateUnavailable.

        is_patient: make the call by itself, with more time, since no request waits for it.
        """
        call = _Call(keys, arguments, asyncio.get_running_loop().create_future())
        if is_patient:
            (reply,) = await self._in_time(self._execute([call]), patience=_PATIENCE)
            if isinstance(reply, Exception):
                raise StateUnavailable from reply
            return reply
        self._waiting.append(call)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await self._in_time(call.reply)

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
                if not call.reply.done():  # otherwise its caller waited too long and has left
                    batch.append(call)
            if batch:
                await self._send_batch(batch)

    async def _send_batch(self, batch: list[_Call]) -> None:
        try:
            # The timeout is the longest that any caller waits; then the connection is given up.
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
        """Replies of a batch; the reply of a call that failed is its error."""
        pipeline = self._redis.pipeline(transaction=False)
        for call in batch:
            pipeline.evalsha(self._sha, len(call.keys), *call.keys, *call.arguments)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            # Redis was restarted or wiped, and none of the calls was run.
            await self._redis.script_load(SCRIPT)
            return await self._execute(batch)
        return replies

    async def _in_time(self, answer: Awaitable[T], *, patience: int = 1) -> T:
        """Return the answer. Raises StateUnavailable if Redis does not give it in time.

        The deadline is extended while other calls are answered, `_MAX_DEADLINES` times in all:
        Redis then works, and this gateway's calls only queue up.   patience: factor of a deadline.
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
                    # Maybe this process was late and not Redis, whose answer may be in the socket.
                    await asyncio.sleep(0)
                if self._answered_at_s < asked_at_s:
                    break
            raise StateUnavailable
        except (RedisError, OSError) as error:
            raise StateUnavailable from error
        finally:
            task.cancel()
