"""Sends load from a process of its own. The loop is open: a request leaves when it is due, however
many are still under way.
"""

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import uvloop

from bench.gateway.http_client import HttpTarget
from bench.measurement import Figures
from bench.process_tree import cpu_seconds, peak_mb
from bench.report import percentiles_ms, rate, rounded
from engine.errors import EngineDeadError
from engine.wire.client import EngineClient
from engine.wire.endpoint import Endpoint
from engine.wire.messages import AddRequest, SamplingParams

_HELD_P99_MS = 1000.0
"""Highest P99 of a rate that is held; besides, no request may fail."""
_REFINEMENTS = 3
_WARM_UP = 20
_POLL_S = 0.02
_READY_S = 60.0
_DRAIN_S = 0.25
_RECORDS = 1024


class Client(Protocol):
    async def ask(self, on_event: Callable[[int], None] = lambda _: None) -> str | None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class EngineTarget:
    """The engine's socket, without HTTP."""

    socket: Path
    prompt_tokens: int
    max_tokens: int

    async def open(self) -> "_OwnClient":
        client = EngineClient(Endpoint.of_socket(self.socket))
        await client.start()
        async with asyncio.timeout(_READY_S):
            while client.welcome is None:
                await asyncio.sleep(_POLL_S)
        return _OwnClient(self, client, client.welcome.engine_id)


class _OwnClient:
    """A client of the engine. The engine's journal is read, since it would fill up otherwise, and
    dropped.
    """

    def __init__(self, target: EngineTarget, client: EngineClient, engine_id: str) -> None:
        self._client = client
        self._prompt = tuple(100 + i % 100 for i in range(target.prompt_tokens))
        self._max_tokens = target.max_tokens
        self._is_closed = False
        self._draining = asyncio.create_task(self._drain(engine_id))

    async def ask(self, on_event: Callable[[int], None] = lambda _: None) -> str | None:
        request = AddRequest(
            request_id=uuid.uuid4().hex,
            tenant_id="ten_bench",
            prompt_token_ids=self._prompt,
            sampling_params=SamplingParams(max_tokens=self._max_tokens, ignore_eos=True),
            token_lease=self._max_tokens,
            deadline_s=600.0,
            first_token_timeout_s=600.0,
        )
        await self._client.generate(request, lambda _: on_event(1))
        return None

    async def close(self) -> None:
        # The task is not cancelled: Python 3.11's wait_for ignores a cancellation that comes at the
        # moment of its answer.
        self._is_closed = True
        await self._draining
        await self._client.close()

    async def _drain(self, engine_id: str) -> None:
        settled_seq = 0
        while not self._is_closed:
            with contextlib.suppress(EngineDeadError):
                found = await self._client.read_journal(engine_id, settled_seq, _RECORDS)
                settled_seq = max([settled_seq, *(record.seq for record in found.records)])
            await asyncio.sleep(_DRAIN_S)


Target = HttpTarget | EngineTarget


def run_rate(
    target: Target, per_s: float, duration_s: float, server_pid: int | None = None
) -> Figures:
    """Run whole answers at a rate. server_pid: process whose time per request is measured.

    Latencies count from when a request was due: a generator that is late must not look like a fast
    server.
    """
    return _in_child(_rate, target, per_s, duration_s, server_pid)


def run_streams(
    target: Target, count: int, window_s: float, server_pid: int | None = None
) -> Figures:
    """Return the tokens per second of all streams, counted in a window in which each has begun and
    none has ended. server_pid: process whose processor time per token and memory are measured.
    """
    return _in_child(_streams, target, count, window_s, server_pid)


def find_held_rate(target: Target, first_per_s: float, duration_s: float) -> Figures:
    """Find the highest rate held, by doubling and then bisection. Returns all attempts, too."""
    attempts: list[Figures] = []

    def is_held(per_s: float) -> bool:
        result = run_rate(target, per_s, duration_s)
        p99 = result["latency_ms"]["p99"]
        held = not result["errors"] and p99 is not None and p99 <= _HELD_P99_MS
        attempts.append({"rate": rounded(per_s), "p99_ms": p99, "held": held})
        return held

    low, high = 0.0, first_per_s
    while is_held(high):
        low, high = high, 2 * high
    for _ in range(_REFINEMENTS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_held(middle) else (low, middle)
    return {"held_per_s": rounded(low), "attempts": attempts}


def _in_child(run: Callable[..., Coroutine[Any, Any, Figures]], *arguments: Any) -> Figures:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_run, run, *arguments).result()


def _run(
    run: Callable[..., Coroutine[Any, Any, Figures]], target: Target, *arguments: Any
) -> Figures:
    async def on_client() -> Figures:
        client = await target.open()
        try:
            return await run(client, *arguments)
        finally:
            await client.close()

    return uvloop.run(on_client())


async def _rate(client: Client, per_s: float, duration_s: float, server_pid: int | None) -> Figures:
    errors: Counter[str] = Counter()
    latencies_s: list[float] = []
    lags_s: list[float] = []
    server_s = cpu_seconds(server_pid) if server_pid else 0.0
    for _ in range(_WARM_UP):
        await client.ask()

    async def send(due: float) -> None:
        lags_s.append(time.perf_counter() - due)
        error = await client.ask()
        latencies_s.append(time.perf_counter() - due)
        if error:
            errors[error] += 1

    start, count = time.perf_counter(), max(1, round(per_s * duration_s))
    cpu_s = time.process_time()
    tasks = []
    for number in range(count):
        due = start + number / per_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(due)))
    await asyncio.gather(*tasks)
    result = {
        "requests": count,
        "errors": dict(errors),
        "done_per_s": rate(count, time.perf_counter() - start),
        "latency_ms": percentiles_ms(latencies_s),
        "lag_ms_p99": percentiles_ms(lags_s)["p99"],
        "generator_cpu_us_per_request": rounded(1e6 * (time.process_time() - cpu_s) / count),
    }
    if server_pid:
        server_s = cpu_seconds(server_pid) - server_s
        result["server_cpu_us_per_request"] = rounded(1e6 * server_s / count)
    return result


async def _streams(client: Client, count: int, window_s: float, server_pid: int | None) -> Figures:
    events, started, errors = [0], [0], Counter[str]()

    async def one() -> None:
        seen = 0

        def on_event(number: int) -> None:
            nonlocal seen
            started[0] += not seen
            seen += number
            events[0] += number

        if error := await client.ask(on_event):
            errors[error] += 1

    def read() -> tuple[float, float, float, int]:
        server_s = cpu_seconds(server_pid) if server_pid else 0.0
        return server_s, time.process_time(), time.perf_counter(), events[0]

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    while started[0] < count and not any(task.done() for task in tasks):
        await asyncio.sleep(_POLL_S)
    begun = read()
    while time.perf_counter() - begun[2] < window_s and not any(task.done() for task in tasks):
        await asyncio.sleep(_POLL_S)
    server_s, cpu_s, seconds, counted = (b - a for a, b in zip(begun, read(), strict=True))
    was_whole = not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    result = {
        "streams": count,
        "errors": dict(errors),
        "was_whole": was_whole,
        "seconds": rounded(seconds),
        "events": counted,
        "events_per_s": rate(counted, seconds),
        "generator_cpu_us_per_event": rounded(1e6 * cpu_s / max(1, counted)),
    }
    if server_pid:
        result["server_cpu_us_per_event"] = rounded(1e6 * server_s / max(1, counted))
        result["server_peak_rss_mb"] = rounded(peak_mb(server_pid))
    return result
