"""`python -m bench.neighbours`: what others' attacks do to a well-behaved tenant.

One server (demo model, SQLite, a folder as the store, one engine thread) runs all of it: first the
quiet, then each attack, and at the end the audit of the bill.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.measurement import Figures, Measurement, main
from bench.neighbours import attacks, good
from bench.neighbours.attacks import PART
from bench.process_tree import find_children
from bench.product import CHORALE, Product, serving
from bench.report import ratio, rounded

_MODEL = Path(__file__).parents[2] / "demo" / "model"
_LEAD_S = 2.0
_LEDGER_S = 6.0  # the ledger has each request within 5 s
_ATTACKER = {"requests_per_minute": 5, "tokens_per_minute": 1000, "max_concurrency": 1}
_SETTINGS: dict[str, Any] = {"model_name": "demo", "threads": 1, "device": "cpu"}

Attack = Callable[[], Coroutine[Any, Any, None]]
Watch = Callable[[], good.Watched]


@dataclass(frozen=True, kw_only=True)
class Neighbours(Measurement):
    """A well-behaved tenant's requests.   seconds: of the quiet and of each attack."""

    seconds: float = 20.0

    def setup(self) -> Figures:
        return {"server": {"model": "demo", **_SETTINGS}, "seconds": self.seconds}

    def measure(self, folder: Path) -> Figures:
        with (
            ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
            serving({"model": str(_MODEL), **_SETTINGS}, folder) as product,
        ):
            return _measure(product, pool, self.seconds) | {"audit": _audit(folder / "data")}


def _measure(product: Product, pool: ProcessPoolExecutor, seconds: float) -> dict[str, Any]:
    key = product.create_tenant("good")
    greedy = [product.create_tenant(f"greedy-{i}") for i in range(2)]
    limited = product.create_tenant("limited", **_ATTACKER)
    own, *others = [_open_upload(product, k) for k in (key, *greedy)]
    url = product.url
    complete: Watch = partial(good.complete, url, key, seconds)
    send: Watch = partial(good.send_parts, url, key, seconds, own, PART)
    seen: list[good.Watched] = []

    def during(attack: Attack | None, watch: Watch) -> dict[str, Any]:
        watched = asyncio.run(_during(attack, pool, watch))
        seen.append(watched)
        return watched.figures()

    seen.append(good.complete(url, key, 2.0))  # warm
    quiet = {"completions": during(None, complete), "parts": during(None, send)}
    rows = {
        "spaces": during(partial(attacks.spaces, url, [limited]), complete),
        "answers": during(partial(attacks.answers, url, greedy), complete),
        "connections": during(partial(attacks.connections, url, greedy), complete),
        "sign_ins": during(partial(attacks.sign_ins, url, greedy), complete),
        "parts": during(partial(attacks.parts, url, greedy, others), send),
    }
    for name, row in rows.items():
        before = quiet["parts" if name == "parts" else "completions"]
        row["p99_to_quiet"] = ratio(row["p99"], before["p99"]) if row["p99"] else None
    stopped = _stop_engine(product, key, seen)
    return {
        "quiet": quiet,
        "during": rows,
        "stopped_engine": stopped,
        "received_tokens": sum(watched.num_tokens for watched in seen),
        "billed_tokens": _billed_tokens(product, key),
    }


def _billed_tokens(product: Product, key: str) -> int:
    """Completion tokens of the tenant by the ledger."""
    time.sleep(_LEDGER_S)
    lines = product.call("GET", "/v1/usage", key)["data"]
    return sum(line["completion_tokens"] for line in lines)


async def _during(attack: Attack | None, pool: ProcessPoolExecutor, watch: Watch) -> good.Watched:
    attacking = asyncio.create_task(attack()) if attack else None
    await asyncio.sleep(_LEAD_S)
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, watch)
    finally:
        if attacking:
            attacking.cancel()
            await asyncio.gather(attacking, return_exceptions=True)
            await asyncio.sleep(_LEAD_S)


def _stop_engine(product: Product, key: str, seen: list[good.Watched]) -> dict[str, Any]:
    """Stop the engine with SIGSTOP; seconds until a request has an answer, and a good one.

    The process gets SIGCONT at the end, for a server that leaves it as it is.
    """
    (pid,) = find_children(product.process.pid, "-m engine ")
    os.kill(pid, signal.SIGSTOP)
    began, first = time.perf_counter(), None
    try:
        while (since := time.perf_counter() - began) < 100:
            watched = good.complete(product.url, key, good.INTERVAL_S)
            seen.append(watched)
            now = time.perf_counter() - began
            first = first or {"first_answer_s": rounded(now), "errors": watched.errors}
            if watched.seconds:
                return {**first, "served_again_s": rounded(now)}
            time.sleep(0.2)
        return {**(first or {}), "served_again_s": None, "gave_up_s": rounded(since)}
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _open_upload(product: Product, key: str) -> str:
    """Open an upload; return the path of a file of it that parts may be sent to."""
    digest = hashlib.sha256(PART).hexdigest()
    files = {
        "adapter_config.json": {"size_bytes": len(PART), "sha256": digest},
        "adapter_model.safetensors": {"size_bytes": 1000, "sha256": digest},
    }
    upload = product.call("POST", "/v1/adapters/voice/uploads", key, json={"files": files})
    return f"/v1/uploads/{upload['id']}/files/adapter_config.json"


def _audit(data_dir: Path) -> dict[str, Any]:
    """The audit's findings after all of it: journal, ledger, holds and receipts agree if none."""
    done = subprocess.run(
        (*CHORALE, "audit", "--data-dir", str(data_dir), "--json"), capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    return {
        "findings": report["num_findings"],
        "rows": sum(check["num_rows"] for check in report["checks"]),
    }


if __name__ == "__main__":
    main("bench.neighbours", {"neighbours": Neighbours()}, __doc__)
