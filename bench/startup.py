"""`python -m bench.startup`: prints a JSON line with the time until `chorale demo` is ready."""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.ports import free_port
from bench.product import CHORALE, ProductFailed, started, wait_ready
from bench.report import describe_machine, json_line

_DEMO_TIMEOUT_S = 60.0
_POLL_S = 0.05


def main() -> None:
    # SIGTERM raises SystemExit, so that started processes are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parse_options(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        first_s = seconds_until_ready(folder)
        later_s = [seconds_until_ready(folder) for _ in range(options.repeats)]
    result = {
        "first_start_s": round(first_s, 2),
        "second_start_s": round(sorted(later_s)[len(later_s) // 2], 2),
        "second_starts_s": [round(seconds, 2) for seconds in later_s],
    }
    line = json_line("startup", describe_machine(), {"command": "chorale demo"}, result) + "\n"
    sys.stdout.write(line)
    if options.append:
        with options.append.open("a") as file:
            file.write(line)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.startup", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="starts after the first one")
    parser.add_argument("--append", type=Path, help="also write the row to this file")
    return parser.parse_args(arguments)


def seconds_until_ready(folder: Path) -> float:
    """Return the time from starting the command until /ready answers 200 and demo.json exists."""
    data_dir, log, port = folder / "data", folder / "chorale.log", free_port()
    announced = data_dir / "demo.json"
    announced.unlink(missing_ok=True)
    command = (*CHORALE, "demo", "--data-dir", str(data_dir), "--port", str(port))
    started_at = time.perf_counter()
    with started(command, log, {}) as process:
        wait_ready(f"http://127.0.0.1:{port}", process, log)
        deadline = time.monotonic() + _DEMO_TIMEOUT_S
        while not announced.exists():
            if time.monotonic() > deadline:
                raise ProductFailed(f"{announced} was not written:\n{log.read_text()[-4000:]}")
            time.sleep(_POLL_S)
        return time.perf_counter() - started_at


if __name__ == "__main__":
    main()
