"""`python -m bench.gpu [PART ...]`: writes rows to a file as they are measured, then prints goals.

A row that is in the file for the same sources, device and setup is not measured again: the same
command, given once more, goes on where it stopped.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all, one by one")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU: figures mean nothing")
    parser.add_argument("--enforce-eager", action="store_true", help="run engines without graphs")
    parser.add_argument("--lora-overlap", choices=("shrink", "none"))
    parser.add_argument("--reference-kernels", nargs="+", help="replace these kernels by torch")
    parser.add_argument("--out", type=Path, help="default: bench/results/gpu-DEVICE.jsonl")
    options = parser.parse_args()
    if options.dry:
        # Triton reads the variable where a kernel is defined, so it is set before the import below.
        os.environ["TRITON_INTERPRET"] = "1"
    command = importlib.import_module("bench.gpu.command")
    if unknown := set(options.parts) - set(command.PARTS):
        sys.exit(f"there is no part {', '.join(sorted(unknown))}: take {', '.join(command.PARTS)}")
    # Settings of engines, by their names.
    names = ("enforce_eager", "lora_overlap", "reference_kernels")
    switches = {name: value for name in names if (value := getattr(options, name))}
    parts = options.parts or list(command.PARTS)
    return int(command.main(parts, options.dry, options.out, switches))


if __name__ == "__main__":
    sys.exit(main())
