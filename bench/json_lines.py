"""Files of JSON objects, a line each, to which processes append that may be killed at any time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add a line. If the last line ends early, the new one begins below it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(entry).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines that are whole; nothing if there is no file."""
    entries = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:  # its writer was killed, or the disk was full
            continue
    return entries
