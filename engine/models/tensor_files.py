"""The safetensors files of a Hugging Face folder, read by tensor, without pickle."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from registry.formats.architecture import text_name

ALL = slice(None)

_MIXTRAL_NAMES = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


@dataclass(frozen=True, slots=True)
class _Stored:
    """The place of a tensor, and its name there."""

    path: Path
    name: str


class TensorFiles:
    """All tensors of a text model in all files, by name, as they are stored.

    They have the names that they have in a checkpoint without towers for images, whose tensors are
    left out. Those of Mixtral's experts have the names that other families give to theirs.

    A file is closed after each tensor, since pages read of it count as memory until then.
    Raises FileNotFoundError if the folder has no weights.
    """

    def __init__(self, model_dir: Path) -> None:
        index = model_dir / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files: dict[str, _Stored] = {}
        for name in names:
            with safe_open(model_dir / name, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118, since it is no dict
                    if (own := text_name(stored)) is not None:
                        files[_served_name(own)] = _Stored(model_dir / name, stored)
        self._files: Mapping[str, _Stored] = files

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._files[name]
        with safe_open(stored.path, framework="pt") as file:
            return tuple(file.get_slice(stored.name).get_shape())

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """Read a tensor, or a part of it and nothing else. Only a matrix has columns."""
        stored = self._files[name]
        with safe_open(stored.path, framework="pt") as file:
            if rows == ALL and columns == ALL:
                whole: torch.Tensor = file.get_tensor(stored.name)
                return whole.clone()
            part = file.get_slice(stored.name)
            found: torch.Tensor = part[rows] if columns == ALL else part[rows, columns]
            return found.clone()


def _served_name(name: str) -> str:
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for theirs, ours in _MIXTRAL_NAMES.items():
        name = name.replace(theirs, ours)
    return name
