"""`python -m bench.gpu kernels` or `engine`: rows to a file as they are measured, tables and goals
last. A row of the same commit, device and setup is not measured again.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_BUDGET_S = 450.0
"""No row is begun later."""


def main() -> int:
    start = time.monotonic()
    options = parse_options(sys.argv[1:])
    if options.dry:
        # Triton reads it where a kernel is defined: before anything here is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    command = importlib.import_module("bench.gpu.command")
    return int(command.run(options.what, options.dry, options.out, start + _BUDGET_S))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    parser.add_argument("what", choices=("kernels", "engine"))
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU: figures mean nothing")
    parser.add_argument("--out", type=Path, help="default: bench/results/gpu-DEVICE.jsonl")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
