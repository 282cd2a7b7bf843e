"""Cost for tenants of being watched: latencies with the console open and a scrape every second."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.billing.measurement import Measurement
from bench.databases import DATABASES
from bench.gateway import ours
from bench.gateway.load import run_rate
from bench.report import ratio, rounded

_PAGES = {"operator": "/console/operator", "tenant": "/console"}
"""The pages that are open: the first loads itself again, the second has most to sum up."""


@dataclass(frozen=True, kw_only=True)
class Watched(Measurement):
    """Latencies of whole answers, alone and watched by turns.

    rate: requests per second.   rounds: of one run of each.   page_s, scrape_s: seconds from one
    load of each page, and from one scrape, to the next.
    """

    rate: float = 20.0
    duration_s: float = 10.0
    rounds: int = 5
    max_tokens: int = 16
    page_s: float = 2.0
    scrape_s: float = 1.0
    database: str = "postgresql"

    def measure(self, folder: Path) -> dict[str, Any]:
        (folder / "ours").mkdir()
        alone: list[dict[str, Any]] = []
        watched: list[dict[str, Any]] = []
        with (
            DATABASES[self.database](folder / "db") as url,
            ours.serving(folder / "ours", url) as gateway,
        ):
            self._run(gateway)
            for _ in range(self.rounds):
                alone.append(self._run(gateway))
                with self._watching(gateway) as looks:
                    watched.append(self._run(gateway))
                watched[-1]["looks"] = dict(looks)
        before, after = _p50s(alone), _p50s(watched)
        return {
            "alone_p50_ms": before,
            "watched_p50_ms": after,
            "looks": [run["looks"] for run in watched],
            "added_p50_ms": rounded(median(after) - median(before)),
            "spread_alone_ms": rounded(max(before) - min(before)),
            "watched_to_alone": ratio(median(after), median(before)),
        }

    def _run(self, gateway: ours.Ours) -> dict[str, Any]:
        result = run_rate(gateway.target(self.max_tokens), self.rate, self.duration_s)
        assert not result["errors"], result["errors"]
        return result

    @contextmanager
    def _watching(self, gateway: ours.Ours) -> Iterator[dict[str, int]]:
        """Have threads look at the gateway. Yields how often each has looked."""
        url, over = f"http://127.0.0.1:{gateway.port}", threading.Event()
        paths = _PAGES | {"scrape": "/metrics"}
        keys = {"operator": gateway.admin_key, "tenant": gateway.key}
        looks = dict.fromkeys(paths, 0)

        def look(name: str) -> None:
            with httpx.Client(base_url=url, headers={"origin": url}, timeout=60) as client:
                if name in keys:
                    client.post("/console/sign-in", data={"key": keys[name]})
                while not over.is_set():
                    answer = client.get(paths[name])
                    assert answer.status_code == 200, answer.text
                    looks[name] += 1
                    over.wait(self.page_s if name in keys else self.scrape_s)

        with ThreadPoolExecutor(len(paths)) as pool:
            looking = [pool.submit(look, name) for name in paths]
            try:
                yield looks
            finally:
                over.set()
        for one in looking:
            one.result()


def _p50s(runs: list[dict[str, Any]]) -> list[float]:
    return [run["latency_ms"]["p50"] for run in runs]
