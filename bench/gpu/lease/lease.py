"""A machine with a GPU for a while, and where a command leaves what it finds there."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.lease.record import Record

_LARGE_BYTES = 20 << 30
_SLOWNESS = 20.0
"""How many times longer a dry run may take: the interpreter is slow, the machine may be busy."""


@dataclass(frozen=True)
class Lease:
    """Circumstances that all parts of a command share.

    rows: file of the measured rows.   folder: for large files, which are deleted at the end.
    device: the GPU's name.   arch: its compute capability, 90 for 9.0.   seed: that of the checks.
    """

    record: Record
    rows: Path
    folder: Path
    device: str
    arch: int
    seed: int
    is_dry: bool

    def limit_s(self, seconds: float) -> float:
        return seconds * _SLOWNESS if self.is_dry else seconds


def roomy_folder() -> Path:
    """Return the file system in memory if it can hold the model, else that of temporary files."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > _LARGE_BYTES:
        return shared
    return Path(tempfile.gettempdir())
