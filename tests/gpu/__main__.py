"""`python -m tests.gpu`: every check on the first CUDA device; with --dry in Triton's interpreter.

Each check runs in a process of its own. Every check prints a line, and below it comes its output;
the last line says how many passed. The exit status is 1 if any failed. `python -m
tests.gpu.compiling` before it compiles the kernels side by side.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from bench import json_lines
from tests import interpreter

_TIMEOUT_S, _DRY_TIMEOUT_S = 60.0, 900.0
_AT_ONCE, _DRY_AT_ONCE = 4, 2


def main() -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="tests.gpu", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="run without a GPU, on tiny shapes")
    parser.add_argument("--seed", type=int, help="default: the time; 0 for a dry run")
    parser.add_argument("--quick", action="store_true", help="with fewer cases and repetitions")
    parser.add_argument("--only", nargs="+", default=[""], help="prefixes of the checks to run")
    parser.add_argument("--record", type=Path, help="file that gets a line of JSON for each check")
    parser.add_argument(
        "--sanitize", action="store_true", help="run failed checks again under compute-sanitizer"
    )
    parser.add_argument(
        "--in-process", action="store_true", help="start no processes, for debuggers and sanitizers"
    )
    options = parser.parse_args()
    if options.dry:
        # The interpreter is chosen before checks are imported, because imports define the kernels.
        interpreter.use()
    from tests.gpu import setting
    from tests.gpu.checks import CHECKS
    from tests.gpu.harness import Checks, run_check

    seed = options.seed
    if seed is None:
        seed = 0 if options.dry else int(time.time())
    say(f"seed {seed}")
    on_gpu = partial(setting.on_gpu, is_quick=options.quick)
    make = partial(setting.dry if options.dry else on_gpu, seed)
    named = {
        name: partial(run_check, CHECKS[name], make)
        for start_of in options.only
        for name in CHECKS
        if name.startswith(start_of)
    }
    if not named:
        parser.error(f"there is no check whose name begins with {' or '.join(options.only)}")
    if options.in_process:
        for check in named.values():
            check()
        return 0
    if options.dry:
        checks = Checks(_DRY_AT_ONCE, _DRY_TIMEOUT_S, say)
    else:
        if "ranks" in named and _count_devices() < 2:
            del named["ranks"]
            say("ranks  not run: there are no 2 devices here")
        checks = Checks(_AT_ONCE, _TIMEOUT_S, say)
    if options.record:
        checks.note = lambda name, ended: json_lines.append(
            options.record,
            {
                "check": name, "ended": ended.how, "seconds": round(ended.seconds, 1),
                "why": ended.failure, "seed": seed,
            },
        )  # fmt: skip
    checks.run(named)
    if options.sanitize:
        checks.sanitize(("--quick", "--seed", str(seed)))
    seconds = time.monotonic() - start
    say(f"{checks.num_passed} passed, {len(checks.failed)} failed  {seconds:.0f} s")
    return int(bool(checks.failed))


def _count_devices() -> int:
    from bench.gpu.probe import probe

    return probe().count


def say(line: str) -> None:
    """Print a line and flush it, because a run may be killed."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
