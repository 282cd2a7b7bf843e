"""`python -m bench.gpu [PART ...]`: writes rows to a file as they are measured, then prints tables
and goals.

A row that is in the file for the same sources, device and setup is not measured again: the same
command, given once more, goes on where it stopped.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main() -> int:
    options = parse_options(sys.argv[1:])
    if options.dry:
        # Triton reads the variable where a kernel is defined, so it is set before the import below.
        os.environ["TRITON_INTERPRET"] = "1"
    command = importlib.import_module("bench.gpu.command")
    names = list(command.parts_of({}))
    if unknown := set(options.parts) - set(names):
        sys.exit(f"there is no part {', '.join(sorted(unknown))}: take {', '.join(names)}")
    parts = options.parts or names
    return int(command.run(parts, options.dry, options.out, _switches(options)))


def _switches(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that were given as options, by their names."""
    names = ("enforce_eager", "lora_overlap", "reference_kernels")
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all, one by one")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU: figures mean nothing")
    parser.add_argument("--enforce-eager", action="store_true", help="run engines without graphs")
    parser.add_argument("--lora-overlap", choices=("shrink", "none"))
    parser.add_argument("--reference-kernels", nargs="+", help="replace these kernels by torch")
    parser.add_argument("--out", type=Path, help="default: bench/results/gpu-DEVICE.jsonl")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
