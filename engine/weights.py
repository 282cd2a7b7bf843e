"""Reads a Hugging Face folder of safetensors by tensor, without pickle or transformers."""

import ctypes
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from engine.errors import UnsupportedModel
from lora.layout import CUT_BY_INPUTS, FUSED, PROJECTIONS
from lora.shard import Shard


def load_config(model_dir: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((model_dir / "config.json").read_text())
    return config


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [start, end) of a stored tensor."""

    name: str
    start: int
    end: int


class StoredWeights(Mapping[str, torch.Tensor]):
    """All tensors of all files, by name; each is read when it is asked for, and not kept.

    Projections that are stored as one tensor have the names of separate ones.
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
        self._parts: dict[str, _Part] = {}
        for name in names:
            with safe_open(model_dir / name, framework="pt") as shard:
                self._shards |= dict.fromkeys(shard.keys(), model_dir / name)
        fused = [name for name in self._shards if _projection(name) in FUSED]
        self._parts = {part: place for name in fused for part, place in self._parts_of(name)}
        self._names = [*(name for name in self._shards if name not in fused), *self._parts]

    def _parts_of(self, name: str) -> Iterator[tuple[str, _Part]]:
        """Names and places of the projections that a fused tensor consists of."""
        fused = _projection(name)
        num_rows, projections = self.shape(name)[0], FUSED[fused]
        first = num_rows // len(projections)
        if fused == "qkv_proj":  # q has as many outputs as o has inputs
            first = self.shape(name.replace(fused, "o_proj"))[1]
        width, start = (num_rows - first) // (len(projections) - 1), 0
        for projection in projections:
            end = start + width if start else first
            yield name.replace(fused, PROJECTIONS[projection]), _Part(name, start, end)
            start = end

    def __getitem__(self, name: str) -> torch.Tensor:
        if part := self._parts.get(name):
            return self.rows(part.name, part.start, part.end)
        # The file is closed after each tensor, since pages read of it count as memory until then.
        with safe_open(self._shards[name], framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
            return tensor.to(self.dtype, copy=True)

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Read rows [start, end) of a tensor, and nothing else of it."""
        if part := self._parts.get(name):
            return self.rows(part.name, part.start + start, part.start + end)
        with safe_open(self._shards[name], framework="pt") as shard:
            rows: torch.Tensor = shard.get_slice(name)[start:end]
            return rows.to(self.dtype, copy=True)

    def shape(self, name: str) -> tuple[int, ...]:
        if part := self._parts.get(name):
            return part.end - part.start, *self.shape(part.name)[1:]
        with safe_open(self._shards[name], framework="pt") as shard:
            return tuple(shard.get_slice(name).get_shape())

    def columns(self, name: str, start: int, end: int) -> torch.Tensor:
        """Read columns [start, end) of a tensor, and nothing else of it."""
        with safe_open(self._shards[name], framework="pt") as shard:
            columns: torch.Tensor = shard.get_slice(name)[:, start:end]
            return columns.to(self.dtype, copy=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _projection(name: str) -> str:
    """The projection whose weight a tensor is, such as "q_proj"; "" for other tensors."""
    module, _, kind = name.rpartition(".")
    return module.rpartition(".")[2] if kind == "weight" else ""


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
