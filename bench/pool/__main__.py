"""`python -m bench.pool`: measures routing in modelled pools, by load, by what gateways know, by
size; and over three real engines.

The plot is drawn beside the file of `--out`, and needs the extra `bench`.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.billing.measurement import Measurement
from bench.experiment import replace_rows
from bench.pool.modelled import Modelled
from bench.pool.real import Real
from bench.report import describe_machine, json_line

MEASUREMENTS: dict[str, Measurement] = {
    "load": Modelled(loads=(0.6, 0.8, 0.95)),
    "knowledge": Modelled(gateways=(1, 4), lags_s=(0.0, 0.25, 1.0)),
    "prefix": Modelled(shared_tokens=(256,)),
    "scale": Modelled(sizes=((30, 3000), (100, 10_000)), measured_s=20.0, seeds=(0,)),
    "real": Real(),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.pool", description=__doc__)
    parser.add_argument(
        "--only", choices=MEASUREMENTS, action="append", help="run just this; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="file in which rows of the same name are replaced")
    options = parser.parse_args()
    lines = []
    for name in options.only or MEASUREMENTS:
        lines.append(row(name, MEASUREMENTS[name]))
        sys.stdout.write(lines[-1])
        sys.stdout.flush()
    if options.out:
        replace_rows(options.out, lines)
        # Imported here, since measuring does not need matplotlib.
        from bench.pool.plots import draw_all

        draw_all(options.out)


def row(name: str, measurement: Measurement) -> str:
    """Run a measurement and return its row, a JSON line."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result = measurement.measure(Path(folder))
    return json_line(f"pool.{name}", describe_machine(), asdict(measurement), result) + "\n"


if __name__ == "__main__":
    main()
