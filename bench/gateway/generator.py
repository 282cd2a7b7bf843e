"""`python -m bench.gateway.generator`: sends load from a process of its own; JSON in, JSON out.

    {"target": {...}, "kind": "rate", "rate", "duration_s"}     whole answers, each sent when due
    {"target": {...}, "kind": "streams", "count", "window_s"}   streams at once, all of one length

A target is {"port", "path", "body", "key"} for HTTP, or {"socket", "prompt_tokens", "max_tokens"}
for the engine itself. The loop is open: a request leaves when it is due, however many are still
under way.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import uvloop

from bench.gateway.http_client import HttpClient
from bench.gateway.plain_client import PlainClient
from bench.report import percentiles_ms, rate, rounded

_WARM_UP = 20
_POLL_S = 0.02


class Target(Protocol):
    async def ask(self, on_event: Callable[[int], None] = lambda _: None) -> str | None: ...

    async def close(self) -> None: ...


class EngineTarget:
    """The engine's socket, without HTTP."""

    def __init__(self, client: PlainClient, prompt_tokens: int, max_tokens: int) -> None:
        self._client = client
        self._sizes = (prompt_tokens, max_tokens)

    async def ask(self, on_event: Callable[[int], None] = lambda _: None) -> str | None:
        await self._client.generate(*self._sizes, lambda _: on_event(1))
        return None

    async def close(self) -> None:
        await self._client.close()


async def run_rate(target: Target, per_s: float, duration_s: float) -> dict[str, Any]:
    """Send requests at a rate. Latencies count from when a request was due: a generator that is
    late must not look like a fast server.
    """
    errors: Counter[str] = Counter()
    latencies_s: list[float] = []
    lags_s: list[float] = []
    for _ in range(_WARM_UP):
        await target.ask()

    async def send(due: float) -> None:
        lags_s.append(time.perf_counter() - due)
        error = await target.ask()
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
    return {
        "requests": count,
        "errors": dict(errors),
        "done_per_s": rate(count, time.perf_counter() - start),
        "latency_ms": percentiles_ms(latencies_s),
        "lag_ms_p99": percentiles_ms(lags_s)["p99"],
        "generator_cpu_us_per_request": rounded(1e6 * (time.process_time() - cpu_s) / count),
    }


async def run_streams(target: Target, count: int, window_s: float) -> dict[str, Any]:
    """Return the tokens per second of all streams, counted in a window in which each has begun and
    none has ended.
    """
    events, started, errors = [0], [0], Counter[str]()

    async def one() -> None:
        seen = 0

        def on_event(number: int) -> None:
            nonlocal seen
            started[0] += not seen
            seen += number
            events[0] += number

        if error := await target.ask(on_event):
            errors[error] += 1

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    while started[0] < count and not any(task.done() for task in tasks):
        await asyncio.sleep(_POLL_S)
    start, before, cpu_s = time.perf_counter(), events[0], time.process_time()
    _say({"window": "begins"})
    while time.perf_counter() - start < window_s and not any(task.done() for task in tasks):
        await asyncio.sleep(_POLL_S)
    seconds, counted = time.perf_counter() - start, events[0] - before
    cpu_s = time.process_time() - cpu_s
    _say({"window": "ends"})
    was_whole = not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "streams": count,
        "errors": dict(errors),
        "was_whole": was_whole,
        "seconds": rounded(seconds),
        "events": counted,
        "events_per_s": rate(counted, seconds),
        "generator_cpu_us_per_event": rounded(1e6 * cpu_s / max(1, counted)),
    }


async def _run(job: dict[str, Any]) -> dict[str, Any]:
    asked = job["target"]
    if "socket" in asked:
        client = PlainClient(Path(asked["socket"]))
        await client.start()
        target: Target = EngineTarget(client, asked["prompt_tokens"], asked["max_tokens"])
    else:
        body = asked["body"].encode()
        target = HttpClient("127.0.0.1", asked["port"], asked["path"], body, asked["key"])
    try:
        if job["kind"] == "rate":
            return await run_rate(target, job["rate"], job["duration_s"])
        return await run_streams(target, job["count"], job["window_s"])
    finally:
        await target.close()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    _say(uvloop.run(_run(json.loads(sys.stdin.readline()))))


if __name__ == "__main__":
    main()
