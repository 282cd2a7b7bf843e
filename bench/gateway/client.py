"""The load on a gateway, from a process of its own, and what the server used meanwhile."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bench.process_tree import cpu_seconds, peak_mb
from bench.report import rounded

PROMPT = "What does the gateway cost? Say it in as many words as you are asked for, please. "

Target = dict[str, Any]
"""A target of bench.gateway.generator."""

HELD_P99_MS = 1000.0
"""Highest P99 of a rate that is held; besides, no request may fail."""
_REFINEMENTS = 3


def http_target(port: int, key: str, model: str, max_tokens: int, *, stream: bool) -> Target:
    """Return the target of a gateway that speaks OpenAI's API, ours or another."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    return {"port": port, "path": "/v1/chat/completions", "body": json.dumps(body), "key": key}


def run_rate(
    target: Target, per_s: float, duration_s: float, server_pid: int | None = None
) -> dict[str, Any]:
    """Run whole answers at a rate. server_pid: process whose time per request is measured."""
    job = {"target": target, "kind": "rate", "rate": per_s, "duration_s": duration_s}
    before = cpu_seconds(server_pid) if server_pid else 0.0
    (result,) = _generate(job)
    if server_pid:
        spent_s = cpu_seconds(server_pid) - before
        result["server_cpu_us_per_request"] = rounded(1e6 * spent_s / result["requests"])
    return result


def run_streams(
    target: Target, count: int, window_s: float, server_pid: int | None = None
) -> dict[str, Any]:
    """Run streams. server_pid: process whose processor time per token and memory are measured."""
    job = {"target": target, "kind": "streams", "count": count, "window_s": window_s}
    cpu_s: list[float] = []

    def note(_: dict[str, Any]) -> None:
        cpu_s.append(cpu_seconds(server_pid) if server_pid else 0.0)

    result = _generate(job, note)[-1]
    if server_pid:
        spent_s = cpu_s[1] - cpu_s[0]
        result["server_cpu_us_per_event"] = rounded(1e6 * spent_s / max(1, result["events"]))
        result["server_peak_rss_mb"] = rounded(peak_mb(server_pid))
    return result


def find_held_rate(target: Target, first_per_s: float, duration_s: float) -> dict[str, Any]:
    """Find the highest rate held, by doubling and then bisection. Returns all attempts, too."""
    attempts: list[dict[str, Any]] = []

    def is_held(per_s: float) -> bool:
        result = run_rate(target, per_s, duration_s)
        p99 = result["latency_ms"]["p99"]
        held = not result["errors"] and p99 is not None and p99 <= HELD_P99_MS
        attempts.append({"rate": rounded(per_s), "p99_ms": p99, "held": held})
        return held

    low, high = 0.0, first_per_s
    while is_held(high):
        low, high = high, 2 * high
    for _ in range(_REFINEMENTS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_held(middle) else (low, middle)
    return {"held_per_s": rounded(low), "attempts": attempts}


def _generate(
    job: dict[str, Any], note: Callable[[dict[str, Any]], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run the generator; return the messages it prints, a line each. The last is its result."""
    command, pipe = (sys.executable, "-m", "bench.gateway.generator"), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.close()
        said = []
        for line in process.stdout:
            said.append(json.loads(line))
            note(said[-1])
    if process.returncode:
        raise RuntimeError(f"the generator ended with {process.returncode}")
    return said
