"""`python -m bench.gpu.lease first|second [--dry]`: what to run on a GPU of 15 minutes.

Every line is in the folder $OUT as soon as it is known; without $OUT the folder is
bench/results/lease-DATE. The exit status is 1 if a part has failed or was killed.
"""

import argparse
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
        os.environ["TRITON_INTERPRET"] = "1"  # before the imports below, which define kernels
    folder = Path(os.environ.get("OUT") or _ROOT / "bench" / "results" / f"lease-{date.today()}")
    folder.mkdir(parents=True, exist_ok=True)
    return run(options.command, folder, options.dry, start_s)


def run(name: str, folder: Path, is_dry: bool, start_s: float) -> int:
    """Run a command and return its exit status.   start_s: on the monotonic clock."""
    from bench.gpu.command import path_of
    from bench.gpu.lease.lease import Lease, roomy_folder
    from bench.gpu.lease.parts import first_parts, run_parts, second_parts
    from bench.gpu.machine import dry_name
    from bench.gpu.probe import NoGpu, probe
    from bench.gpu.rows import RowFile

    try:
        device = dry_name() if is_dry else probe().name
    except NoGpu as error:
        sys.exit(str(error))
    rows, seed = RowFile(path_of(device, folder), device), int(time.time())
    with tempfile.TemporaryDirectory(prefix="lease-", dir=roomy_folder()) as large:
        tempfile.tempdir = large  # of the parts, too; a part that is killed leaves its files there
        kept = Path(large, "kept") if is_dry else _KEPT
        lease = Lease(name, folder, kept, rows, Path(large), seed, is_dry)
        lease.note(device=device, seed=seed)
        parts = first_parts(lease) if name == "first" else list(second_parts(lease))
        return int(not run_parts(parts, lease, start_s))


if __name__ == "__main__":
    sys.exit(main())
