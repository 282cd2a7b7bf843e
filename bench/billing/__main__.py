"""`python -m bench.billing`: prints JSON lines with the cost of billing, on the disk of TMPDIR.

Set TMPDIR to a folder on a real disk: in a folder in memory every commit is free.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from bench.billing.disk import Disk
from bench.billing.final_chunk import FinalChunk
from bench.billing.large import Large
from bench.billing.measurement import Measurement
from bench.billing.reading import Reading
from bench.billing.settles import Settles
from bench.experiment import replace_rows
from bench.report import describe_machine, json_line

MEASUREMENTS: Mapping[str, Measurement] = {
    "disk": Disk(),
    "settles": Settles(),
    "final_chunk": FinalChunk(),
    "reading": Reading(),
    "large": Large(),
}
_FULL = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.billing", description=__doc__)
    parser.add_argument(
        "--only", choices=MEASUREMENTS, action="append", help="run just this; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="file in which rows of the same name are replaced")
    parser.add_argument("--full", action="store_true", help="a million entries, ten in `large`")
    options = parser.parse_args()
    measurements = dict(MEASUREMENTS)
    if options.full:
        measurements["reading"] = replace(Reading(), entries=_FULL)
        measurements["large"] = replace(Large(), copies=1000)
    lines = []
    for name in options.only or measurements:
        lines.append(row(name, measurements[name]))
        sys.stdout.write(lines[-1])
        sys.stdout.flush()
    if options.out:
        replace_rows(options.out, lines)


def row(name: str, measurement: Measurement) -> str:
    """Runs a measurement and returns its row, a JSON line."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result = measurement.measure(Path(folder))
    return json_line(f"billing.{name}", describe_machine(), asdict(measurement), result) + "\n"


if __name__ == "__main__":
    main()
