"""The safetensors files of a Hugging Face folder, read by tensor, without pickle."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

ALL = slice(None)


class TensorFiles:
    """All tensors of all files, by name, as they are stored.

    A file is closed after each tensor, since pages read of it count as memory until then.
    Raises FileNotFoundError if the folder has no weights.
    """

    def __init__(self, model_dir: Path) -> None:
        index = model_dir / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files: dict[str, Path] = {}
        for name in names:
            with safe_open(model_dir / name, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), model_dir / name)
        self._files: Mapping[str, Path] = files

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """Read a tensor, or a part of it and nothing else. Only a matrix has columns."""
        with safe_open(self._files[name], framework="pt") as file:
            if rows == ALL and columns == ALL:
                whole: torch.Tensor = file.get_tensor(name)
                return whole.clone()
            part = file.get_slice(name)
            found: torch.Tensor = part[rows] if columns == ALL else part[rows, columns]
            return found.clone()
