"""`python -m bench.gateway.generator`: sends load from a process of its own; JSON in, JSON out.

    {"target": {...}, "kind": "rate", "rate", "duration_s"}     whole answers, each sent when due
    {"target": {...}, "kind": "streams", "count", "window_s"}   streams at once, all of one length

A target is {"port", "path", "body", "key"} for HTTP, or {"socket", "prompt_tokens", "max_tokens"}
for the engine itself. The loop is open: a request leaves when it is due, however many are still
under way.
"""

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import uvloop

from bench.gateway.http_client import HttpClient
from bench.report import percentiles_ms, rate, rounded
from engine.client import EngineClient
from engine.endpoint import Endpoint
from engine.errors import EngineDeadError
from engine.messages import AddRequest, SamplingParams

_WARM_UP = 20
_POLL_S = 0.02
_READY_S = 60.0
_DRAIN_S = 0.25
_RECORDS = 1024


class Target(Protocol):
    async def ask(self, on_event: Callable[[int], None] = lambda _: None) -> str | None: ...
    async def close(self) -> None: ...


class EngineTarget:
    """The engine's socket, without HTTP.

    The engine's journal is read, since it would fill up otherwise, and dropped.
    """

    def __init__(self, socket: Path, prompt_tokens: int, max_tokens: int) -> None:
        self._client = EngineClient(Endpoint.of_socket(socket))
        self._prompt = tuple(100 + i % 100 for i in range(prompt_tokens))
        self._max_tokens = max_tokens
        self._is_closed = False

    async def start(self) -> None:
        await self._client.start()
        welcome = await self._client.wait_ready(_READY_S)
        self._draining = asyncio.create_task(self._drain(welcome.engine_id))

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
        engine = EngineTarget(Path(asked["socket"]), asked["prompt_tokens"], asked["max_tokens"])
        await engine.start()
        target: Target = engine
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
