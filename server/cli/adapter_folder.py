"""The folder of an adapter as a trainer wrote it: where the adapter is, and what is sent of it."""

import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote

from registry.errors import InvalidAdapter
from server.client.files import CONFIG_FILE, TOKENIZER_FILES, WEIGHTS_FILE, NotAnAdapter, Unreadable
from server.client.http import ClientError
from server.text.json_object import JsonObject

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"

_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors")
# Forms of the weights, of which the first that is there is taken: PEFT's, its shards, mlx-lm's,
# PEFT's before safetensors, torchtune's.
_FORMS = (
    re.compile(r"adapter_model\.safetensors"),
    _SHARD,
    re.compile(r"adapters\.safetensors"),
    re.compile(r"adapter_model\.bin"),
    re.compile(r"adapter_model\.pt|adapter_\d{1,6}\.pt"),
)
# What else trainers write: the first pattern that matches says what it is.
_KINDS = {
    "other weights": ("*.safetensors*", "adapter_*", "pytorch_model*.bin", "*.gguf"),
    "tokenizer": ("*token*", "vocab*", "merges.txt", "chat_template*"),
    "training state": (
        "*.pt", "*.pth", "*.bin", "*.distcp", "rng_state*", "train*", "global_step*", "latest",
        "zero_*", "optimizer*", "scheduler*", "recipe_state*", "runs/", "*.tfevents*",
    ),
    "other files": ("*",),
}  # fmt: skip
_MAX_FILES = 10_000
_MAX_DEPTH = 3
"""How many folders down an adapter is looked for."""
_MAX_LISTED = 8


class NotSendable(ClientError):
    """A folder has no adapter that can be chosen, or no weights of which one file can be made."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of an adapter among a trainer's files.

    folder: its path below the root, such as "checkpoint-100"; "" for the root.   used: names of its
    files: the config, one file of weights or all shards, the index of shards, and those of the
    tokenizer.   left_out: names of what else is there, by kind; a folder's ends in a slash.
    """

    folder: str
    used: tuple[str, ...]
    left_out: dict[str, list[str]]

    def notes(self, root: str) -> list[str]:
        """Lines to tell the user; none if the root has nothing but what is sent."""
        notes = [f"The adapter is in {root}/{self.folder}."] if self.folder else []
        if self.left_out:
            kinds = (f"{kind} ({_shortened(names)})" for kind, names in self.left_out.items())
            notes.append(f"Left out: {', '.join(kinds)}.")
        return notes


def locate(paths: Collection[str], root: str) -> Layout:
    """Find the adapter among the files of a root: the root itself, or the only one nearest to it.

    paths: relative to the root, with slashes.   root: its name in messages.
    Raises NotAnAdapter, NotSendable.
    """
    folders: dict[str, list[str]] = {"": []}
    for path in sorted(paths, key=_natural):
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    used = {folder: _used(names) for folder, names in folders.items()}
    adapters = [each for each, files in used.items() if CONFIG_FILE in files and len(files) > 1]
    depth = min(map(_depth, adapters), default=None)
    if depth is None:
        missing = WEIGHTS_FILE if CONFIG_FILE in used[""] else CONFIG_FILE
        raise NotAnAdapter(root, missing, is_partial=bool(used[""]))
    if depth > 0 and len(paths) > _MAX_FILES:
        raise NotSendable(f"{root} has over {_MAX_FILES:,} files; give the adapter's own folder.")
    nearest = [folder for folder in adapters if _depth(folder) == depth]
    if len(nearest) > 1:
        more = "... " if len(nearest) > _MAX_LISTED else ""
        raise NotSendable(
            f"{root} has {len(nearest)} adapters: {more}{', '.join(nearest[-_MAX_LISTED:])}. Push "
            f"one: chorale adapters push {quote(f'{root}/{nearest[-1]}')} --name NAME"
        )
    [found] = nearest
    names = folders[found]
    files = (*used[found], *(name for name in TOKENIZER_FILES if name in names))
    return Layout(found, files, _left_out(found, folders, files, adapters))


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter on this machine.   folder: the one with the files of the layout."""

    folder: Path
    layout: Layout

    @classmethod
    def find(cls, root: Path) -> "AdapterFolder":
        """The adapter in a folder, or in a folder of it. Raises NotAnAdapter, NotSendable."""
        layout = locate(_files_in(root), str(root))
        return cls(root / layout.folder, layout)

    @property
    def size_bytes(self) -> int:
        """Bytes of the files that are read; a missing file counts 0."""
        paths = [self.folder / name for name in self.layout.used]
        return sum(path.stat().st_size for path in paths if path.is_file())

    @contextmanager
    def as_sent(self) -> Iterator[Path]:
        """A folder with the files of an upload; a temporary one if the weights are converted.

        Raises NotSendable, Unreadable.
        """
        from server.cli.mlx_adapter import read_config

        mlx_config = read_config(self.folder / CONFIG_FILE)
        if self.layout.used[1] == WEIGHTS_FILE and mlx_config is None:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="chorale-") as made:
            try:
                self._convert(mlx_config, Path(made))
            except (InvalidAdapter, NotSendable) as error:
                raise NotSendable(f"{self.folder}: {error}") from error
            except OSError as error:
                raise Unreadable(Path(error.filename or made), error) from error
            yield Path(made)

    def _convert(self, mlx_config: JsonObject | None, made: Path) -> None:
        """Write the files of an upload to `made`. Raises NotSendable, InvalidAdapter, OSError."""
        from server.cli import mlx_adapter, weight_shards

        paths = [self.folder / name for name in self.layout.used]
        for path in paths:
            if path.name in (CONFIG_FILE, *TOKENIZER_FILES):
                shutil.copyfile(path, made / path.name)
        first = paths[1]
        if mlx_config is not None:
            mlx_adapter.convert(mlx_config, first, made)
            return
        if first.suffix in (".bin", ".pt"):
            _convert_pickle(first, made / WEIGHTS_FILE)
        elif _SHARD.fullmatch(first.name):
            shards = [path for path in paths if _SHARD.fullmatch(path.name)]
            index = self.folder / INDEX_FILE if INDEX_FILE in self.layout.used else None
            weight_shards.join(shards, index, made / WEIGHTS_FILE)
        else:  # it is named as mlx-lm does, beside a config of PEFT's
            shutil.copyfile(first, made / WEIGHTS_FILE)


def _convert_pickle(path: Path, out: Path) -> None:
    try:
        from server.cli.pickled_weights import convert
    except ImportError as error:
        raise NotSendable(f"{path.name} is a pickle, for which install torch.") from error
    convert(path, out)


def _files_in(root: Path) -> list[str]:
    """Paths of the files in a folder, `_MAX_DEPTH` folders down, without hidden ones."""
    files: list[str] = []
    for parent, folders, names in os.walk(root):
        below = Path(parent).relative_to(root)
        is_deepest = len(below.parts) == _MAX_DEPTH
        folders[:] = [] if is_deepest else [name for name in folders if name[0] != "."]
        files += [(below / name).as_posix() for name in names if name[0] != "."]
        if len(files) > _MAX_FILES:
            break
    return files


def _used(names: list[str]) -> tuple[str, ...]:
    """The files that are read of a folder's sorted names: config, weights, index."""
    matches = ([name for name in names if form.fullmatch(name)] for form in _FORMS)
    weights = next(filter(None, matches), [])
    is_sharded = bool(weights) and _SHARD.fullmatch(weights[0])
    config = [CONFIG_FILE] if CONFIG_FILE in names else []
    index = [INDEX_FILE] if is_sharded and INDEX_FILE in names else []
    return (*config, *(weights if is_sharded else weights[-1:]), *index)


def _left_out(
    found: str, folders: dict[str, list[str]], used: Collection[str], adapters: Collection[str]
) -> dict[str, list[str]]:
    """List what is beside an adapter's files, by kind.   folders: names of files by folder."""
    start = f"{found}/" if found else ""
    below = [folder for folder in folders if folder.startswith(start) and folder]
    top = {folder: f"{folder.removeprefix(start).partition('/')[0]}/" for folder in below}
    others = {top[folder] for folder in below if folder in adapters}
    left_out: dict[str, list[str]] = defaultdict(list)
    for name in [*folders[found], *dict.fromkeys(top.values())]:
        if name not in used:
            left_out["other adapters" if name in others else _kind(name)].append(name)
    return left_out


def _kind(name: str) -> str:
    return next(
        kind
        for kind, patterns in _KINDS.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def _shortened(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def _depth(folder: str) -> int:
    return folder.count("/") + bool(folder)


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts checkpoint-900 before checkpoint-1000."""
    return [(int(digits or 0), text) for digits, text in re.findall(r"(\d*)(\D*)", path)]
