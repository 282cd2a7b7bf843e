"""`python -m bench.gpu.lease first|second [--dry]`: what to run on a GPU of 15 minutes.

Every line is in the folder $OUT as soon as it is known; without $OUT the folder is
bench/results/lease-DATE. The exit status is 1 if a part has failed or was killed.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_KEPT = _ROOT / "build" / "lease"


def main() -> int:
    start_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="bench.gpu.lease", description=__doc__)
    parser.add_argument("command", choices=("first", "second"))
    parser.add_argument("--dry", action="store_true", help="rehearse, tiny, on the CPU")
    options = parser.parse_args()
    if options.dry:
        from tests import interpreter

        interpreter.use()  # before the imports below, which define kernels
    folder = Path(os.environ.get("OUT") or _ROOT / "bench" / "results" / f"lease-{date.today()}")
    return run(options.command, folder, options.dry, start_s)


def run(name: str, folder: Path, is_dry: bool, start_s: float) -> int:
    """Run a command and return its exit status.   start_s: on the monotonic clock."""
    from bench.gpu import command
    from bench.gpu.lease.lease import Lease, roomy_folder
    from bench.gpu.lease.parts import run_parts
    from bench.gpu.lease.record import Record
    from bench.gpu.probe import NoGpu

    record = Record(folder, name, None if is_dry else _KEPT)
    try:
        device, arch = _find_gpu(is_dry)
    except NoGpu as error:
        record.say(str(error))
        return 1
    seed, rows = int(time.time()), command.path_of(device, folder)
    record.begin(device, seed)
    # Only this command's: the second one's need packages of the server's client.
    parts_of = importlib.import_module(f"bench.gpu.lease.{name}").parts_of
    with tempfile.TemporaryDirectory(prefix="lease-", dir=roomy_folder()) as large:
        tempfile.tempdir = large  # of the parts, too; a part that is killed leaves its files there
        lease = Lease(record, rows, Path(large), device, arch, seed, is_dry)
        closing = run_parts(list(parts_of(lease)), lease, start_s)
    for line in (*(command.report(rows, device, is_dry) if rows.exists() else ()), "", *closing):
        record.say(line)
    return 0 if all("  ok  " in line for line in closing) else 1


def _find_gpu(is_dry: bool) -> tuple[str, int]:
    """Return the device's name, and its compute capability as 90 for 9.0. Raises NoGpu."""
    from bench.gpu.machine import dry_name
    from bench.gpu.probe import probe

    if is_dry:
        return dry_name(), 0
    found = probe()
    return found.name, found.arch


if __name__ == "__main__":
    sys.exit(main())
