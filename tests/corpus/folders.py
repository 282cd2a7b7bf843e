"""The files of an adapter in memory, and the ways in which trainers write them otherwise than PEFT.

A change is a function of a Folder that changes it in place.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE


@dataclass
class Folder:
    """An adapter's config, tensors by their names, and the metadata of the file of tensors."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> "Folder":
        with safe_open(path / WEIGHTS_FILE, "pt") as file:
            metadata = file.metadata()
        config = json.loads((path / CONFIG_FILE).read_text())
        return cls(config, load_file(path / WEIGHTS_FILE), metadata)

    def save(self, path: Path) -> Path:
        path.mkdir()
        (path / CONFIG_FILE).write_text(json.dumps(self.config))
        save_file(self.tensors, path / WEIGHTS_FILE, self.metadata)
        return path


Change = Callable[[Folder], None]


def config(**values: Any) -> Change:
    """Set keys of the config."""
    return lambda folder: folder.config.update(values)


def only(*keys: str) -> Change:
    """Leave these keys in the config, and no others."""

    def change(folder: Folder) -> None:
        folder.config = {key: folder.config[key] for key in keys}

    return change


def names(pattern: str, replacement: str) -> Change:
    """Replace a regular expression once in the name of every tensor; it must be in one of them."""

    def change(folder: Folder) -> None:
        renamed = {
            re.sub(pattern, replacement, name, count=1): tensor
            for name, tensor in folder.tensors.items()
        }
        assert renamed.keys() != folder.tensors.keys()
        folder.tensors = renamed

    return change


def add(**tensors: torch.Tensor) -> Change:
    """Add tensors; a name has "__" for each dot."""

    def change(folder: Folder) -> None:
        folder.tensors |= {name.replace("__", "."): t.clone() for name, t in tensors.items()}

    return change


def emptied(folder: Folder) -> None:
    """Take the values out of every tensor."""
    folder.tensors = {name: torch.empty(0) for name in folder.tensors}


def pair(module: str, in_features: int, out_features: int, *, trained: bool) -> Change:
    """Add an A and a B of a module of any name, whose B is zero if it was not trained."""

    def change(folder: Folder) -> None:
        chance = torch.Generator().manual_seed(7)
        a = torch.randn(4, in_features, generator=chance)
        b = torch.randn(out_features, 4, generator=chance) * trained
        folder.tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}

    return change


def once_more(folder: Folder) -> None:
    """Add the first tensor a second time, as a state dict names it, with other values."""
    name, tensor = next(iter(folder.tensors.items()))
    folder.tensors[name.replace(".weight", ".default.weight")] = tensor * 2
