"""`python -m tests.gpu`: every check on the first CUDA device; with --dry in Triton's interpreter.

One line a check, the last one says how many passed; the exit status is 1 if any failed.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from tests import interpreter

if TYPE_CHECKING:
    from tests.gpu.setting import Check, Setting


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="without a GPU, on tiny shapes")
    parser.add_argument("--seed", type=int, help="else the clock's; 0 for a dry run")
    parser.add_argument("--only", nargs="+", default=[""], help="checks whose names begin so")
    options = parser.parse_args()
    if options.dry:
        # Before a check is imported, which is when its kernels are defined.
        interpreter.use()
    from tests.gpu import setting
    from tests.gpu.checks import CHECKS

    seed = options.seed
    if seed is None:
        seed = 0 if options.dry else int(time.time())
    say(f"seed {seed}")
    if not options.dry and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --dry needs none")
    make = partial(setting.dry if options.dry else setting.on_gpu, seed)
    starts = tuple(options.only)
    named = {name: check for name, check in CHECKS.items() if name.startswith(starts)}
    if not named:
        parser.error(f"there is no check whose name begins with {' or '.join(starts)}")
    # A device for each: what one has captured does not outlive it.
    failed = sum(not passes(name, check, make) for name, check in named.items())
    say(f"{len(named) - failed} passed, {failed} failed")
    return int(failed > 0)


def passes(name: str, check: "Check", make: "Callable[[], Setting]") -> bool:
    start = time.perf_counter()
    try:
        check(make())
    except Exception:
        say(f"{name}  FAILED\n{traceback.format_exc()}")
        return False
    say(f"{name}  ok  {time.perf_counter() - start:.1f} s")
    return True


def say(line: str) -> None:
    """At once: a run may be cut short."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
