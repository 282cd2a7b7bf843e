"""Control files: JSON files by which supervisor, placer and gateways of one machine communicate.

HOME/pool/members.json   by the placer: every engine that a gateway connects to, also those that are
                         leaving
HOME/pool/wanted.json    by the gateway: how many engines should run, 0 for none; else the settings
                         do. Of several gateways, number 2 writes wanted-2.json, and the highest
                         number counts
DATA_DIR/bases.json      by the supervisor: every base model that there is, also those whose engines
                         are going
DATA_DIR/models.json     by the gateway: the base models that were added while it ran, and those
                         that are drained

HOME is the folder of a base model. Each file is written whole, so that a reader finds the old or
the new one.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from engine.wire.endpoint import Endpoint
from registry.whole_files import write_whole
from server.text.json_object import JsonObject

logger = logging.getLogger(__name__)

MAX_ENGINES = 64
"""Most engines of one pool."""
_MAX_FILE_BYTES = 1 << 20

Content = TypeVar("Content")


class ControlFileDamaged(Exception):
    """The file was not written by this module, or was edited by hand."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is no control file ({reason}); remove it, it is written anew.")


class ControlFile(Generic[Content]):
    """A control file, followed or written by one process.

    content: what was last read or written; at first, and where there is no file, `empty`.
    content_type: its type, as msgspec takes it.
    """

    def __init__(self, path: Path, empty: Content, content_type: Any) -> None:
        self.path = path
        self.content = self._empty = empty
        self._decoder: msgspec.json.Decoder[Content] = msgspec.json.Decoder(content_type)
        self._seen_at = 0
        self._has_written = False

    @property
    def changed_at(self) -> int:
        """Time of the last change in nanoseconds; 0 for no file."""
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read(self) -> Content:
        """Read the content. Raises ControlFileDamaged, OSError."""
        try:
            with self.path.open("rb") as file:
                return self._decoder.decode(file.read(_MAX_FILE_BYTES))
        except FileNotFoundError:
            return self._empty
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ControlFileDamaged(self.path, str(error)) from error

    def look(self) -> bool:
        """Read the content if the file has changed. Returns whether it was read.

        The former content is kept while the file is damaged.
        """
        if (at := self.changed_at) == self._seen_at:
            return False
        self._seen_at = at
        try:
            self.content = self.read()
        except (ControlFileDamaged, OSError) as error:
            logger.error("%s", error)
            return False
        return True

    def latest(self) -> Content:
        """Look, and return the content."""
        self.look()
        return self.content

    def look_again(self) -> None:
        """Have the next look read the file, although it has not changed."""
        self._seen_at = -1

    def write(self, content: Content) -> None:
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(self.path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        self.content, self._seen_at, self._has_written = content, self.changed_at, True

    def keep(self, content: Content) -> None:
        """Write the content if it is not what was written last, or if the file was deleted."""
        if not self._has_written or content != self.content or not self.changed_at:
            self.write(content)


# ---- the engines of one base model ----


@dataclass(frozen=True, slots=True)
class Member:
    """One engine.   name: "engine", "engine-2" and so on.   address, server_key: see Endpoint."""

    name: str
    address: str
    server_key: str = ""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.address, self.server_key)


def members_file(home: Path) -> ControlFile[tuple[Member, ...]]:
    """The engines of a base model."""
    return ControlFile(home / "pool" / "members.json", (), tuple[Member, ...])


def wanted_file(home: Path, number: int = 1) -> ControlFile[int | None]:
    """How many engines gateway number 1, 2 and so on wants; None before it has said.

    0 is a pool at rest: its base model sleeps, is drained or goes.
    """
    return _wanted_file(home / "pool" / f"{numbered('wanted', number)}.json")


class WantedEngines:
    """How many engines the gateways of a base model want; a damaged file changes nothing."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._files: dict[Path, ControlFile[int | None]] = {}

    def latest(self) -> int | None:
        """The most that a gateway wants; None if none has said."""
        for path in self._paths():
            self._files.setdefault(path, _wanted_file(path))
        wanted = (file.latest() for file in self._files.values())
        return max((number for number in wanted if number is not None), default=None)

    def forget(self) -> None:
        """Delete what the gateways have said."""
        for path in self._paths():
            path.unlink(missing_ok=True)

    def within(self, least: int, most: int) -> int:
        """The number with its bounds, which hold for all but 0."""
        wanted = self.latest()
        return 0 if wanted == 0 else min(max(wanted or 0, least), most)

    def _paths(self) -> Iterator[Path]:
        return self._home.glob("pool/wanted*.json")


def _wanted_file(path: Path) -> ControlFile[int | None]:
    return ControlFile(path, None, Annotated[int, msgspec.Meta(ge=0, le=MAX_ENGINES)] | None)


# ---- all base models ----


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEntry:
    """A base model as the supervisor runs it.

    name: the model's name for clients.   home: folder of its engines and of its control files.
    model_dir: folder of the model; "" while the model is prepared, if it could not be prepared
    (then `problem` says why), and for a base of which nothing but journals is left.
    settings: the settings that are in force for this base model, as `Settings` dumps them.
    origin: whether the settings or the gateway (`models.json`) name it.
    is_former: it was removed or replaced; the gateway decides when its engines go, by writing 0
    into `wanted_file(home)`. The entry goes when all their journals are settled.
    """

    name: str
    home: str
    model_dir: str = ""
    base_revision: str = ""
    settings: JsonObject = field(default_factory=dict)
    origin: Literal["settings", "added"] = "settings"
    is_former: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelChanges:
    """The changes that an operator asked for while the gateway ran.

    added: settings of base models, each as a table of `[[models]]`.   drained: names of those that
    take no requests.
    """

    added: tuple[JsonObject, ...] = ()
    drained: tuple[str, ...] = ()


def bases_file(data_dir: Path) -> ControlFile[Sequence[BaseEntry]]:
    """The base models that there are."""
    return ControlFile(data_dir / "bases.json", (), tuple[BaseEntry, ...])


def changes_file(data_dir: Path) -> ControlFile[ModelChanges]:
    """The changes that an operator asked for."""
    return ControlFile(data_dir / "models.json", ModelChanges(), ModelChanges)


# ---- names ----


def gateway_socket(data_dir: Path, number: int) -> Path:
    """The Unix socket at which a gateway tells its neighbours on this machine its figures."""
    return data_dir / f"{numbered('gateway', number)}.sock"


def numbered(name: str, number: int) -> str:
    """The name of number 1, 2 and so on: "gateway", "gateway-2"."""
    return name if number == 1 else f"{name}-{number}"
