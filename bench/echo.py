"""`python -m bench.echo`: a JSON line with what the logprobs of a long prompt cost the engine.

The same prompt twice, without its logprobs and with them, in a process each: by how much the peak
of the resident memory is above what there was before, and processor seconds.
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.in_process import EngineFactory
from bench.report import describe_machine, json_line, ratio, rounded
from engine.messages import AddRequest, SamplingParams, StepOutputs

_FOREVER_S = 1e9


def main() -> None:
    options = parse_options(sys.argv[1:])
    sys.stdout.write(row(options.stack, options.prompt_tokens, options.step_tokens) + "\n")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.echo", description=__doc__)
    parser.add_argument("--stack", default="wide", help="a shape of bench.checkpoint")
    parser.add_argument("--prompt-tokens", type=int, default=16_384)
    parser.add_argument("--step-tokens", type=int, default=2_048, help="computed in one step")
    return parser.parse_args(arguments)


def row(stack: str, num_prompt_tokens: int, num_step_tokens: int) -> str:
    setup = {"stack": stack, "prompt_tokens": num_prompt_tokens, "step_tokens": num_step_tokens}
    arms = {}
    for name, prompt_logprobs in (("plain", None), ("scored", 1)):
        # A process each: memory that one has freed would hide what the other takes.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            arms[name] = pool.apply(measure, (setup, prompt_logprobs))
    scored, plain = arms["scored"], arms["plain"]
    result = arms | {"cpu_ratio": ratio(scored["cpu_s"], plain["cpu_s"])}
    return json_line("echo", describe_machine(), setup, result)


def measure(setup: dict[str, Any], prompt_logprobs: int | None) -> dict[str, float]:
    """One request that generates nothing, behind a short one without logprobs."""
    length, step = setup["prompt_tokens"], setup["step_tokens"]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        factory = EngineFactory(setup["stack"], Path(name))
        core = factory.make(
            arena_tokens=length + 2 * step, max_model_len=length + step,
            max_num_batched_tokens=step, prefix_caching=False,
        )  # fmt: skip
        tokens = factory.random_tokens(random.Random(0), length)
        _score(core, "warm", tokens[:step], None)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before_mib, began_s = _mib("VmRSS"), time.process_time()
        num_scored = _score(core, "long", tokens, prompt_logprobs)
        peak_mib, cpu_s = _mib("VmHWM") - before_mib, time.process_time() - began_s
        assert num_scored == (0 if prompt_logprobs is None else length - 1)
    return {"peak_above_mib": rounded(peak_mib), "cpu_s": rounded(cpu_s)}


def _score(core: Any, request_id: str, tokens: tuple[int, ...], prompt_logprobs: int | None) -> int:
    """Run one request to its end, and count the logprobs that come."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=prompt_logprobs)
    message = AddRequest(
        request_id=request_id, tenant_id="bench", prompt_token_ids=tokens, sampling_params=params,
        token_lease=0, deadline_s=_FOREVER_S, first_token_timeout_s=_FOREVER_S,
    )  # fmt: skip
    core.handle("bench", message)
    num_scored = 0
    while core.scheduler.has_work:
        for _, said in core.step():
            outputs = said.outputs if isinstance(said, StepOutputs) else ()
            num_scored += sum(len(output.prompt_logprobs or ()) for output in outputs)
    return num_scored


def _mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


if __name__ == "__main__":
    main()
