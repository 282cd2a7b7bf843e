"""Cost of traces: processor time of a request that is traced, and of the code when it is off."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from bench.billing.measurement import Measurement
from bench.databases import DATABASES
from bench.gateway import ours
from bench.gateway.load import run_rate
from bench.report import ratio, rounded
from server.traces import spans

_NUM_CALLS = 7
"""Traced calls of a request: admission with five within it, and engine."""
_NUM_NOTES = 5
_LOOPS = 20_000


@dataclass(frozen=True, kw_only=True)
class Traced(Measurement):
    """A gateway that sends each request's spans to a collector, and one that makes none, by turns.

    Each run starts its gateway anew.

    rate: requests per second.   rounds: of one run of each.
    """

    rate: float = 20.0
    duration_s: float = 10.0
    rounds: int = 5
    max_tokens: int = 16
    database: str = "postgresql"

    def measure(self, folder: Path) -> dict[str, Any]:
        runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
        with _collector() as (url, num_bodies):
            for name in [*runs, *list(runs) * self.rounds]:  # the first two are to warm up
                runs[name].append(self._run(folder / f"{name}-{len(runs[name])}", name, url))
            assert num_bodies, "the collector got no spans"
        cpu_us = {
            name: [run["server_cpu_us_per_request"] for run in all_runs[1:]]
            for name, all_runs in runs.items()
        }
        off_us = 1e6 * asyncio.run(_seconds_off())
        return {
            "cpu_us_per_request": cpu_us,
            "latency_p50_ms": {
                name: [run["latency_ms"]["p50"] for run in all_runs[1:]]
                for name, all_runs in runs.items()
            },
            "on_to_off": ratio(median(cpu_us["on"]), median(cpu_us["off"])),
            "code_us_when_off": rounded(off_us),
            "code_when_off_to_request": ratio(off_us, median(cpu_us["off"])),
        }

    def _run(self, folder: Path, name: str, url: str) -> dict[str, Any]:
        folder.mkdir()
        changes = {"otlp_endpoint": url} if name == "on" else {}
        with (
            DATABASES[self.database](folder / "db") as database_url,
            ours.serving(folder, database_url, **changes) as gateway,
        ):
            target = gateway.target(self.max_tokens)
            run_rate(target, self.rate, 1.0)
            result = run_rate(target, self.rate, self.duration_s, gateway.pid)
        assert not result["errors"], result["errors"]
        return result


@contextmanager
def _collector() -> Iterator[tuple[str, list[int]]]:
    """Run a collector that reads what it is sent. Yields its URL and the sizes of bodies."""
    sizes: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sizes.append(len(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sizes
        finally:
            server.shutdown()
            thread.join()


async def _seconds_off() -> float:
    """Seconds that the code for spans adds to a request when nothing is traced."""

    async def work() -> None:
        pass

    traced = spans.traced("work")(work)

    async def with_spans() -> None:
        for _ in range(_NUM_CALLS):
            await traced()
        for _ in range(_NUM_NOTES):
            spans.note(request_model="a model")
        spans.traceparent()

    async def without() -> None:
        for _ in range(_NUM_CALLS):
            await work()

    seconds = []
    for run in (with_spans, without):
        began_s = time.process_time()
        for _ in range(_LOOPS):
            await run()
        seconds.append((time.process_time() - began_s) / _LOOPS)
    return seconds[0] - seconds[1]
