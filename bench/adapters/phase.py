"""Measures an engine step by step: gaps, processor time, and how long its thread waited."""

import os
import time
from pathlib import Path
from statistics import mean

import numpy as np

from bench.adapters.engine_loop import EngineLoop
from bench.cpu_time import cpu_seconds, spent
from bench.report import rounded


class Phase:
    """Measures from its creation to `end`. num_rows: requests in each step.

    loads, load_bytes: adapters fetched from the store onto disk.   children_cpu_s: processor
    seconds of child processes, by module.
    """

    def __init__(self, engine: EngineLoop) -> None:
        self.num_rows: list[int] = []
        self._engine = engine
        self._itl_s: list[float] = []
        self._step_cpu_s: list[float] = []
        disk = engine.adapters.counts.disk
        self._disk_before = (disk.loads, disk.load_bytes)
        self._children_before = cpu_seconds(os.getpid())
        self._cpu_before_s, self._queued_before_s = time.thread_time(), _queued_s()
        self._last = time.perf_counter()

    def step(self) -> None:
        start_s = time.thread_time()
        self._engine.step()
        self._step_cpu_s.append(time.thread_time() - start_s)
        last, self._last = self._last, time.perf_counter()
        self._itl_s.append(self._last - last)
        self.num_rows.append(len(self._engine.log.last.rows))

    def end(self) -> None:
        self.seconds = sum(self._itl_s)
        self.queued_s = _queued_s() - self._queued_before_s
        self.blocked_s = self.seconds - (time.thread_time() - self._cpu_before_s) - self.queued_s
        self.children_cpu_s = spent(self._children_before, cpu_seconds(os.getpid()))
        disk = self._engine.adapters.counts.disk
        self.loads = disk.loads - self._disk_before[0]
        self.load_bytes = disk.load_bytes - self._disk_before[1]

    def figures(self) -> dict[str, float]:
        """Return the figures of the phase.

        itl: time from the end of one step to the end of the next, sending requests included.
        """
        p50_s, p99_s = np.percentile(self._itl_s, (50, 99))
        return {
            "itl_p50_ms": rounded(p50_s * 1000),
            "itl_p99_ms": rounded(p99_s * 1000),
            "step_cpu_ms": rounded(mean(self._step_cpu_s) * 1000),
        }

    def waits(self) -> dict[str, float]:
        """How long the engine's thread waited per step.

        queued_ms: while another thread or process had the processor.   blocked_ms: for the GIL, a
        lock, a page; queueing is included where the kernel does not report it separately.
        """
        per_step_ms = 1000 / len(self._itl_s)
        return {
            "queued_ms": rounded(self.queued_s * per_step_ms),
            "blocked_ms": rounded(max(self.blocked_s, 0.0) * per_step_ms),
        }


def _queued_s() -> float:
    """Seconds this thread has waited for a processor; 0 where the kernel does not report it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
