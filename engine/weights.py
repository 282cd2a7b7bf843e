"""Reads a Hugging Face folder of safetensors by tensor, without pickle or transformers."""

import ctypes
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from engine.errors import UnsupportedModel
from lora.layout import CUT_BY_INPUTS, PROJECTIONS
from lora.shard import Shard


def load_config(model_dir: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((model_dir / "config.json").read_text())
    return config


class StoredWeights(Mapping[str, torch.Tensor]):
    """All tensors of all files, by name; each is read when it is asked for, and not kept.

    So a model that packs its weights as it reads them never holds them twice.
    Raises FileNotFoundError if the folder has no weights.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self.dtype = dtype
        index = model_dir / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        self._shards: dict[str, Path] = {}
        for name in names:
            with safe_open(model_dir / name, framework="pt") as shard:
                self._shards |= dict.fromkeys(shard.keys(), model_dir / name)

    def __getitem__(self, name: str) -> torch.Tensor:
        # The file is closed after each tensor, since pages read of it count as memory until then.
        with safe_open(self._shards[name], framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
            return tensor.to(self.dtype, copy=True)

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Read rows [start, end) of a tensor, and nothing else of it."""
        with safe_open(self._shards[name], framework="pt") as shard:
            rows: torch.Tensor = shard.get_slice(name)[start:end]
            return rows.to(self.dtype, copy=True)

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._shards[name], framework="pt") as shard:
            return tuple(shard.get_slice(name).get_shape())

    def columns(self, name: str, start: int, end: int) -> torch.Tensor:
        """Read columns [start, end) of a tensor, and nothing else of it."""
        with safe_open(self._shards[name], framework="pt") as shard:
            columns: torch.Tensor = shard.get_slice(name)[:, start:end]
            return columns.to(self.dtype, copy=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


class ShardedWeights(Mapping[str, torch.Tensor]):
    """Tensors as one rank needs them: its part of every projection, and all of the others.

    A projection that is cut by inputs is summed over the ranks, so its bias is zero on all but the
    first. Raises UnsupportedModel for a projection that cannot be cut into equal parts.
    """

    def __init__(self, weights: StoredWeights, shard: Shard) -> None:
        self._weights = weights
        self._shard = shard

    def __getitem__(self, name: str) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        projection = module.rpartition(".")[2]
        if projection not in PROJECTIONS:
            return self._weights[name]
        by_inputs = PROJECTIONS.index(projection) in CUT_BY_INPUTS
        if by_inputs and kind == "bias":
            bias = self._weights[name]
            return bias if self._shard.index == 0 else torch.zeros_like(bias)
        if by_inputs:
            return self._weights.columns(name, *self._part(name, 1))
        return self._weights.rows(name, *self._part(name, 0))

    def _part(self, name: str, dim: int) -> tuple[int, int]:
        shape = self._weights.shape(name)
        if len(shape) <= dim or shape[dim] % self._shard.size:
            raise UnsupportedModel(
                f"the tensor {name} is {list(shape)}: it cannot be cut into {self._shard.size}"
            )
        part = self._shard.part(shape[dim])
        return part.start, part.stop

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def give_back_memory() -> None:
    """Return freed memory to the system, if the C library can do that (glibc).

    After weights are packed, 100 to 250 MB of 870 would stay between the packed ones (135M shape).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
