"""A machine with a GPU for a while, and the folder in which a command leaves what it finds there,
line by line as it is known.
"""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import json_lines
from bench.gpu.rows import RowFile

_LARGE_BYTES = 32 << 30
_SLOWNESS = 20.0
"""How many times longer a dry run may take: the interpreter is slow, the machine may be busy."""


@dataclass(frozen=True)
class Lease:
    """Circumstances that all parts of a command share.

    folder: has log.txt, with all that the parts print, and a file for each command, such as
    first.jsonl, with a line for each part and each check.   kept: another folder for the latter,
    where the second command finds what the first one left if its own folder is empty.
    rows: file of the measured rows.   large: folder for large files, which are deleted at the end.
    seed: that of the checks.
    """

    command: str
    folder: Path
    kept: Path
    rows: RowFile
    large: Path
    seed: int
    is_dry: bool

    @property
    def entries_path(self) -> Path:
        return self.folder / f"{self.command}.jsonl"

    @property
    def log_path(self) -> Path:
        return self.folder / "log.txt"

    def limit_s(self, seconds: float) -> float:
        return seconds * _SLOWNESS if self.is_dry else seconds

    def say(self, line: str) -> None:
        """Write a line to the log and to this process's output."""
        with self.log_path.open("a") as log:
            log.write(f"{line}\n")
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def note(self, **entry: Any) -> None:
        """Add a line to the command's file, and keep a copy of the file."""
        json_lines.append(self.entries_path, entry)
        self.kept.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.entries_path, self.kept / self.entries_path.name)

    def entries(self, command: str) -> list[dict[str, Any]]:
        """Return the entries of a command's newest run in this folder, or else of the kept one."""
        for folder in (self.folder, self.kept):
            found = json_lines.read(folder / f"{command}.jsonl")
            starts = [number for number, entry in enumerate(found) if "device" in entry]
            if starts:
                return found[starts[-1] :]
        return []


def roomy_folder() -> Path:
    """Return the file system in memory if it can hold the model, else that of temporary files."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > _LARGE_BYTES:
        return shared
    return Path(tempfile.gettempdir())
