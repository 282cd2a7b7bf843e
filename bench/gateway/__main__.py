"""`python -m bench.gateway`: prints JSON lines with the cost of the gateway, and of a peer.

Databases and the journal are under TMPDIR. Set it to a folder on a real disk: in a folder in memory
every commit is free.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bench.billing.measurement import Measurement
from bench.experiment import replace_rows
from bench.gateway.commits import Commits
from bench.gateway.overhead import Overhead
from bench.gateway.processes import Processes
from bench.gateway.streams import Streams
from bench.gateway.traced import Traced
from bench.gateway.watched import Watched
from bench.report import describe_machine, json_line


def measurements(litellm_env: str | None) -> Mapping[str, Measurement]:
    return {
        "commits": Commits(),
        "overhead": Overhead(litellm_env=litellm_env),
        "streams": Streams(litellm_env=litellm_env),
        "processes": Processes(),
        "watched": Watched(),
        "traced": Traced(),
    }


def main() -> None:
    named = measurements(None)
    parser = argparse.ArgumentParser(prog="bench.gateway", description=__doc__)
    parser.add_argument(
        "--only", choices=named, action="append", help="run just this; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="file in which rows of the same name are replaced")
    parser.add_argument(
        "--litellm-env",
        help="folder of a virtual environment with LiteLLM's proxy; made if it does not exist",
    )
    options = parser.parse_args()
    named = measurements(options.litellm_env)
    lines = []
    for name in options.only or named:
        lines.append(row(name, named[name]))
        sys.stdout.write(lines[-1])
        sys.stdout.flush()
    if options.out:
        replace_rows(options.out, lines)


def row(name: str, measurement: Measurement) -> str:
    """Runs a measurement and returns its row, a JSON line."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result = measurement.measure(Path(folder))
    setup = asdict(measurement)
    if "litellm_env" in setup:
        setup["litellm_env"] = setup["litellm_env"] is not None
    return json_line(f"gateway.{name}", describe_machine(), setup, result) + "\n"


if __name__ == "__main__":
    main()
