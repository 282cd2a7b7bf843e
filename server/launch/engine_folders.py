"""The folders of engines: number k lives in `HOME/engine-k`, number 1 in `HOME/engine`.

HOME is the folder of its base model (`server.launch.homes`).
"""

import re
from pathlib import Path

from engine.leaving import is_settled
from server.pool.control_files import numbered

_FOLDER = re.compile(r"engine(?:-([2-9]|[1-9][0-9]+))?")


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
