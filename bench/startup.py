"""`python -m bench.startup`: the time until `chorale demo` is ready, at first and later starts."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.measurement import Figures, Measurement, main
from bench.product import CHORALE, ProductFailed, free_port, started, wait_ready
from bench.report import rounded

_DEMO_TIMEOUT_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Startup(Measurement):
    """The time of a start.   repeats: starts after the first one, on its data."""

    command: str = "chorale demo"
    repeats: int = 3

    def measure(self, folder: Path) -> Figures:
        first_s, *later_s = (_seconds_until_ready(folder) for _ in range(1 + self.repeats))
        return {
            "first_start_s": rounded(first_s),
            "second_start_s": rounded(median(later_s)),
            "second_starts_s": [rounded(seconds) for seconds in later_s],
        }


def _seconds_until_ready(folder: Path) -> float:
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
    main("bench.startup", {"startup": Startup()}, __doc__)
