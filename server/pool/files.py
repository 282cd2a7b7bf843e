"""The files in `HOME/pool/` through which the placer of a pool and the gateways communicate.

members.json   by the placer: every engine that a gateway connects to, also those that are leaving
wanted.json    by the gateway: how many engines should run, 0 for none; else the settings do. Of
               several gateways, number 2 writes wanted-2.json; the most that one wants counts

Each file is written whole, so that a reader finds the old or the new one. A reader follows the time
of the last change (`changed_at`), and keeps the former content when a file is damaged.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.endpoint import Endpoint

MAX_ENGINES = 64
"""Most engines of one pool."""
_MAX_FILE_BYTES = 1 << 20


class PoolFileDamaged(Exception):
    """The file was not written by this module, or was edited by hand."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        super().__init__(f"{path} is no list of engines ({reason}); remove it, it is written anew.")


@dataclass(frozen=True, slots=True)
class Member:
    """One engine.   name: "engine", "engine-2" and so on.   address, server_key: see Endpoint."""

    name: str
    address: str
    server_key: str = ""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.address, self.server_key)


def members_path(data_dir: Path) -> Path:
    return data_dir / "pool" / "members.json"


def wanted_path(data_dir: Path, number: int = 1) -> Path:
    """The file of gateway number 1, 2 and so on."""
    return data_dir / "pool" / f"{numbered('wanted', number)}.json"


def wanted_paths(data_dir: Path) -> list[Path]:
    """The files of all gateways that have written one."""
    return sorted(data_dir.glob("pool/wanted*.json"))


def gateway_socket(data_dir: Path, number: int) -> Path:
    """The Unix socket at which a gateway tells its neighbours on this machine its figures."""
    return data_dir / f"{numbered('gateway', number)}.sock"


def numbered(name: str, number: int) -> str:
    """The name of number 1, 2 and so on: "gateway", "gateway-2"."""
    return name if number == 1 else f"{name}-{number}"


def changed_at(path: Path) -> int:
    """Time of the last change in nanoseconds, to be compared with an earlier one; 0 for no file."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def read_members(path: Path) -> tuple[Member, ...]:
    """The engines in the file; empty if there is no file yet. Raises PoolFileDamaged."""
    found = read_file(path, {"engines": []})
    try:
        members = tuple(Member(**engine) for engine in found["engines"])
    except (TypeError, KeyError) as error:
        raise PoolFileDamaged(path, repr(error)) from error
    if not all(isinstance(value, str) for member in members for value in asdict(member).values()):
        raise PoolFileDamaged(path, "a member has a name, an address and a key")
    if len({member.name for member in members}) < len(members):
        raise PoolFileDamaged(path, "two members have one name")
    return members


def write_members(path: Path, members: Sequence[Member]) -> None:
    write_file(path, {"engines": [asdict(member) for member in members]})


def read_wanted(path: Path) -> int | None:
    """How many engines should run; None if there is no file. Raises PoolFileDamaged.

    0 is a pool at rest: its base model sleeps, is drained or goes.
    """
    wanted = read_file(path, {"engines": None}).get("engines")
    if wanted is not None and (type(wanted) is not int or not 0 <= wanted <= MAX_ENGINES):
        raise PoolFileDamaged(path, f"engines is {wanted!r}")
    return wanted


def read_wanted_by_all(data_dir: Path) -> int | None:
    """The most engines that a gateway wants; None if there is no file. Raises PoolFileDamaged."""
    found = map(read_wanted, wanted_paths(data_dir))
    return max((number for number in found if number is not None), default=None)


def write_wanted(path: Path, engines: int) -> None:
    write_file(path, {"engines": engines})


def read_file(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    """The JSON object in a file; the default if there is no file. Raises PoolFileDamaged."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_FILE_BYTES))
    except FileNotFoundError:
        return default
    except ValueError as error:
        raise PoolFileDamaged(path, str(error)) from error
    if not isinstance(found, dict):
        raise PoolFileDamaged(path, "it holds no object")
    return found


def write_file(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole, so that a reader finds the old or the new content."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    draft.rename(path)
