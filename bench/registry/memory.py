"""Peak memory of a gateway and its validators, read from outside."""

import threading
from typing import Any

from bench.process_tree import find_children, forget_peak, peak_mb
from bench.report import rounded

_LOOK_S = 0.01
_VALIDATOR = "registry.validator_process"


class PeakMemory:
    """Watches a gateway within a context. Peaks are in MB of 10^6 bytes, 0 if there was no process.

    A validator's peak is read every 10 ms, so a rise in its last milliseconds is not seen.
    """

    def __init__(self, gateway_pid: int) -> None:
        self._pid = gateway_pid
        self._is_over = threading.Event()
        self._watching = threading.Thread(target=self._watch)
        self.before_mb = 0.0
        self.gateway_mb = 0.0
        self.validator_mb = 0.0

    def __enter__(self) -> "PeakMemory":
        forget_peak(self._pid)
        self.before_mb = peak_mb(self._pid)
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watching.join()
        self.gateway_mb = peak_mb(self._pid)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            for pid in find_children(self._pid, _VALIDATOR):
                self.validator_mb = max(self.validator_mb, peak_mb(pid))


def describe(watched: list[PeakMemory]) -> dict[str, Any]:
    """Return the memory of uploads to one gateway: before the first upload, and the peaks."""
    return {
        "gateway_before": rounded(watched[0].before_mb),
        "gateway": rounded(max(one.gateway_mb for one in watched)),
        "validator": rounded(max(one.validator_mb for one in watched)),
    }
