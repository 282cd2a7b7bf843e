"""The two files in `DATA_DIR/` through which the supervisor and the gateway speak of base models.

bases.json    by the supervisor: every base model that there is, also those whose engines are going
models.json   by the gateway: the base models that were added while it ran, and those that are
              drained

Each file is written whole, and read as those of `server.pool.files` are.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from server.pool.files import PoolFileDamaged, read_file, write_file
from server.text.json_object import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEntry:
    """A base model as the supervisor runs it.

    name: the model's name for clients.   home: folder of its engines and of its pool's files.
    model_dir: folder of the model; "" while the model is prepared, if it could not be prepared
    (then `problem` says why), and for a base of which nothing but journals is left.
    settings: the settings that are in force for this base model, as `Settings` dumps them.
    origin: whether the settings or the gateway (`models.json`) name it.
    is_former: it was removed or replaced; the gateway decides when its engines go, by
    `server.pool.files.write_wanted(home, 0)`. The entry goes when all their journals are settled.
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


def bases_path(data_dir: Path) -> Path:
    return data_dir / "bases.json"


def changes_path(data_dir: Path) -> Path:
    return data_dir / "models.json"


def read_bases(path: Path) -> tuple[BaseEntry, ...]:
    """The base models in the file; empty if there is no file yet. Raises PoolFileDamaged."""
    found = read_file(path, {"bases": []})
    try:
        return tuple(BaseEntry(**entry) for entry in found["bases"])
    except (TypeError, KeyError) as error:
        raise PoolFileDamaged(path, repr(error)) from error


def write_bases(path: Path, bases: Sequence[BaseEntry]) -> None:
    write_file(path, {"bases": [asdict(entry) for entry in bases]})


def read_changes(path: Path) -> ModelChanges:
    """The changes in the file; none if there is no file. Raises PoolFileDamaged."""
    found = read_file(path, {})
    try:
        return ModelChanges(tuple(found.get("added", ())), tuple(found.get("drained", ())))
    except TypeError as error:
        raise PoolFileDamaged(path, repr(error)) from error


def write_changes(path: Path, changes: ModelChanges) -> None:
    write_file(path, {"added": list(changes.added), "drained": list(changes.drained)})
