"""The folders of base models, each with its engines, its control files and its adapters' cache.

The first model of the settings lives in the data directory itself, every other one in
`DATA_DIR/bases/SLUG`. The names of processes and of engines begin with "SLUG." there, so that each
is unique on the machine; the folders of engines have the same names everywhere.
"""

import itertools
import os
import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from server.launch.engine_folders import engine_name
from server.launch.errors import ServeError
from server.pool.control_files import numbered

MAX_SOCKET_PATH = 100
"""Most bytes in the path of a Unix socket; Linux has room for 107."""
_SLUG_CHARS = 24


@dataclass(frozen=True, slots=True)
class Home:
    """A base model's folder.   slug: "" for the data directory itself."""

    folder: Path
    slug: str = ""

    @property
    def prefix(self) -> str:
        """The beginning of the names of processes and engines of this home."""
        return f"{self.slug}." if self.slug else ""

    def engine_config(self, number: int) -> Path:
        """The configuration of engine number 1, 2 and so on, named as its log lines name it."""
        return self.folder / f"{self.prefix}{engine_name(number)}.json"

    @property
    def fetcher_socket(self) -> Path:
        return self.folder / "engine" / "fetch.sock"

    def check_sockets(self, most_engines: int) -> None:
        """Raise ServeError if the path of a socket in this home would be too long."""
        engine = self.folder / engine_name(most_engines) / "engine.sock"
        longest = max(len(os.fsencode(path)) for path in (engine, self.fetcher_socket))
        if longest > MAX_SOCKET_PATH:
            raise ServeError(
                f"The path {self.folder} is too long for the sockets in it; choose a shorter "
                "--data-dir."
            )


def home_of(data_dir: Path, name: str, base_revision: str, taken: Container[Path]) -> Home:
    """A home beside the data directory's own, for the model of this name and revision.

    taken: folders of homes that are in use.
    """
    reduced = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_SLUG_CHARS].strip("-") or "model"
    slug = f"{reduced}-{base_revision[:8]}"
    homes = (_home(data_dir, numbered(slug, number)) for number in itertools.count(1))
    return next(home for home in homes if home.folder not in taken)


def all_homes(data_dir: Path) -> list[Home]:
    """The homes that this data directory has had, its own first."""
    folder = data_dir / "bases"
    slugs = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [Home(data_dir), *(_home(data_dir, slug) for slug in slugs)]


def _home(data_dir: Path, slug: str) -> Home:
    return Home(data_dir / "bases" / slug, slug)
