"""`python -m bench.echo`: prints a JSON line with the engine's cost of a long prompt's logprobs.

The same prompt is computed without its logprobs and with them, in a process each and several times
in turn. The figures are processor seconds, and the rise of resident memory at its peak.
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.in_process import EngineFactory
from bench.report import describe_machine, json_line, ratio, rounded
from bench.session import Ask, Session
from engine.core import EngineCore


def main() -> None:
    options = parse_options(sys.argv[1:])
    sys.stdout.write(row(**vars(options)) + "\n")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.echo", description=__doc__)
    parser.add_argument("--stack", default="wide", help="a shape of bench.checkpoint")
    parser.add_argument("--prompt-tokens", type=int, default=16_384)
    parser.add_argument("--step-tokens", type=int, default=2_048, help="tokens computed in a step")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(arguments)


def row(*, stack: str, prompt_tokens: int, step_tokens: int, repeats: int) -> str:
    setup = {"stack": stack, "prompt_tokens": prompt_tokens, "step_tokens": step_tokens}
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "scored": []}
    for _ in range(repeats):
        for arm, prompt_logprobs in (("plain", None), ("scored", 1)):
            # Each run has its own process: memory that one freed would hide what the next takes.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                runs[arm].append(pool.apply(measure, (setup, prompt_logprobs)))
    arms = {arm: _summary(of) for arm, of in runs.items()}
    cpu_ratio = ratio(arms["scored"]["cpu_s"]["p50"], arms["plain"]["cpu_s"]["p50"])
    result = arms | {"cpu_ratio": cpu_ratio}
    return json_line("echo", describe_machine(), setup | {"repeats": repeats}, result)


def measure(setup: dict[str, Any], prompt_logprobs: int | None) -> dict[str, Any]:
    """Measures one request that generates nothing, after a short one without logprobs."""
    length, step = setup["prompt_tokens"], setup["step_tokens"]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        factory = EngineFactory(setup["stack"], Path(name))
        core = factory.make(
            arena_tokens=length + 2 * step, max_model_len=length + step,
            max_num_batched_tokens=step, prefix_caching=False,
        )  # fmt: skip
        tokens = factory.random_tokens(random.Random(0), length)
        _score(core, tokens[:step], None)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before_mib, began_s = _mib("VmRSS"), time.process_time()
        num_scored = _score(core, tokens, prompt_logprobs)
        peak_mib, cpu_s = _mib("VmHWM") - before_mib, time.process_time() - began_s
    return {"num_scored": num_scored, "peak_above_mib": peak_mib, "cpu_s": cpu_s}


def _score(core: EngineCore, tokens: tuple[int, ...], prompt_logprobs: int | None) -> int:
    """Run one request to its end, and return the number of logprobs that came."""
    session = Session(core)
    session.send(Ask(tokens, max_tokens=0, prompt_logprobs=prompt_logprobs))
    while session.num_open:
        session.step()
    return session.num_scored(0)


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"num_scored": min(run["num_scored"] for run in runs)}
    for name in ("peak_above_mib", "cpu_s"):
        values = [run[name] for run in runs]
        spread = {"min": min(values), "p50": median(values), "max": max(values)}
        figures[name] = {which: rounded(value) for which, value in spread.items()}
    return figures


def _mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


if __name__ == "__main__":
    main()
