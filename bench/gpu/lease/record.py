"""The folder in which a command leaves what it finds, line by line as it is known."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench import json_lines
from bench.child import Ended


@dataclass(frozen=True)
class Record:
    """The output folder of a command.

    log.txt has everything that the parts print; a file for each command, such as first.jsonl, has a
    line for each part and each check.

    kept: another folder for the latter, where the second command reads what the first one found if
    its own folder is empty.
    """

    folder: Path
    command: str
    kept: Path | None = None

    def open_log(self) -> IO[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return (self.folder / "log.txt").open("a")

    def say(self, line: str) -> None:
        """Write a line to the log and to this command's own output."""
        with self.open_log() as log:
            log.write(f"{line}\n")
        say(line)

    def begin(self, device: str, seed: int) -> None:
        """Note that a run of the command begins."""
        self.note(device=device, seed=seed)

    def note(self, **entry: Any) -> None:
        """Add a line to the command's file."""
        path = self.folder / _file_of(self.command)
        json_lines.append(path, entry)
        if self.kept is not None:
            self.kept.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.kept / path.name)

    def note_check(self, name: str, ended: Ended, **entry: Any) -> None:
        seconds = round(ended.seconds, 1)
        self.note(check=name, ended=ended.how, seconds=seconds, why=ended.failure, **entry)

    def entries(self, command: str) -> list[dict[str, Any]]:
        """Return the entries of a command's newest run in this folder, or else of the kept one."""
        for folder in filter(None, (self.folder, self.kept)):
            found = json_lines.read(folder / _file_of(command))
            starts = [number for number, entry in enumerate(found) if "device" in entry]
            if starts:
                return found[starts[-1] :]
        return []


def _file_of(command: str) -> str:
    return f"{command}.jsonl"


def say(line: str) -> None:
    """Write a line to the output of this process, which of a part is the log."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
