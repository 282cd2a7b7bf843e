"""The engines of one machine: as many as are wanted, and stand-ins for those that have left.

Engine number k lives in `HOME/engine-k`, number 1 in `HOME/engine`, where HOME is the folder of its
base model (`server.launch.homes`). The engine with the highest number leaves first. An engine that
left, or was killed while leaving, or ran when more engines were configured, leaves a journal: until
all of it is settled, a process without a model stands in the engine's place (`engine.retired`).
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from engine.leaving import is_settled
from engine.wire.endpoint import Endpoint
from server.launch.supervisor import ChildSpec
from server.pool.control_files import Member, WantedEngines, members_file, numbered

_FOLDER = re.compile(r"engine(?:-([2-9]|[1-9][0-9]+))?")

MakeChild = Callable[[int], ChildSpec]


def engine_folders(data_dir: Path) -> list[Path]:
    """Folders of all engines that ever ran on this machine, by base model, sorted by number."""
    folders = []
    for home in [data_dir, *sorted(data_dir.glob("bases/*"))]:
        found = [(_number(path), path) for path in home.glob("engine*")]
        folders += [path for number, path in sorted(found) if number]
    return [path for path in folders if (path / "identity").exists()]


def unsettled_engines(home: Path) -> list[int]:
    """Numbers of the engines in a base model's folder whose journals are not settled yet."""
    numbers = sorted(filter(None, map(_number, home.glob("engine*"))))
    return [number for number in numbers if not is_settled(home / engine_name(number))]


def engine_name(number: int) -> str:
    """Name of engine number 1, 2 and so on, which its folder and its configuration have as well."""
    return numbered("engine", number)


def _number(folder: Path) -> int:
    """Number of the engine whose folder this is; 0 for any other folder."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1] or 1) if match else 0


class LocalPool:
    """The engines of a base model on this machine; the supervisor calls this at every poll.

    home: the base model's folder.   prefix: what the names of members begin with.
    least, most: bounds of the number of engines, whatever number the gateway wants, but for 0: then
    there is no engine, and stand-ins only until all journals are settled.
    make_engine, make_retired: make the child for a number, with its folder and its configuration;
    each is called once per number.   fetcher: the process of them all, where they have a model.
    is_at_rest: whether no engine was wanted at the last call, and no journal was left to settle.
    """

    def __init__(
        self,
        home: Path,
        *,
        prefix: str = "",
        least: int,
        most: int,
        make_engine: MakeChild,
        make_retired: MakeChild,
        fetcher: ChildSpec | None = None,
    ) -> None:
        self._home = home
        self._prefix = prefix
        self._least = least
        self._most = most
        self._fetchers = [fetcher] if fetcher else []
        self._make_engine = cache(make_engine)
        self._make_retired = cache(make_retired)
        self._wanted = WantedEngines(home)
        self._members = members_file(home)
        self.is_at_rest = False

    def __call__(self) -> list[ChildSpec]:
        """The children that should run now. The list of members for gateways is written first."""
        num_engines = self._wanted.within(self._least, self._most)
        retired = self._unsettled(above=num_engines)
        engines = range(1, num_engines + 1)
        self._members.keep(tuple(map(self._member, (*engines, *retired))))
        self.is_at_rest = not self._members.content
        made = (*map(self._make_engine, engines), *map(self._make_retired, retired))
        return [*self._fetchers, *made]

    def _unsettled(self, above: int) -> list[int]:
        """Numbers of earlier engines above `above` whose journals are not settled yet."""
        return [number for number in unsettled_engines(self._home) if number > above]

    def _member(self, number: int) -> Member:
        name = engine_name(number)
        endpoint = Endpoint.of_socket(self._home / name / "engine.sock")
        return Member(self._prefix + name, endpoint.address)
