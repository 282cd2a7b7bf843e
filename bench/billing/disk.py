"""Time of a small write and fdatasync, which every durable commit waits for."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.billing.measurement import Measurement
from bench.report import percentiles_ms


@dataclass(frozen=True, kw_only=True)
class Disk(Measurement):
    """Writes one block after another to the end of a file, with fdatasync after each."""

    writes: int = 200
    size_bytes: int = 4096

    def measure(self, folder: Path) -> dict[str, Any]:
        seconds = []
        with (folder / "file").open("wb", buffering=0) as file:
            for _ in range(self.writes):
                file.write(os.urandom(self.size_bytes))
                start = time.perf_counter()
                os.fdatasync(file.fileno())
                seconds.append(time.perf_counter() - start)
        return {"fdatasync_ms": percentiles_ms(seconds)}
