"""The weights of a Hugging Face folder, read one by one, without transformers."""

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import UnsupportedModel
from engine.models.formats.module import Module, Part
from engine.models.formats.quantization import Format, format_of
from engine.models.rounding import WeightRounding, rounded
from engine.models.tensor_files import ALL, TensorFiles
from kernels.quantized import QuantizedWeight, Rounding, Weight, as_numbers, rounded_rows
from lora.layout import CUT_BY_INPUTS, FUSED, PROJECTIONS
from lora.shard import Shard
from registry.base.text_config import text_config
from registry.formats.architecture import composite_class

CPU = torch.device("cpu")


def load_config(model_dir: Path) -> dict[str, object]:
    """Read config.json; of a checkpoint that also takes images, the text model's part of it."""
    config: dict[str, object] = json.loads((model_dir / "config.json").read_text())
    stored = TensorFiles(model_dir).names if composite_class(config) else ()
    return text_config(config, stored)


def open_weights(model_dir: Path, dtype: torch.dtype | None) -> "StoredWeights":
    """Open a folder's weights in the format that its config.json names. Raises UnsupportedModel."""
    return StoredWeights(model_dir, dtype, format_of(load_config(model_dir)))


@dataclass(frozen=True, slots=True)
class _FusedPart:
    """Rows of a stored weight."""

    name: str
    rows: range


class StoredWeights(Mapping[str, Weight]):
    """All weights of all files, by name; each is read when it is asked for, and not kept.

    So a model that packs its weights as it reads them never holds them twice. A quantised module
    has one weight in place of the tensors that make it up; all others are tensors of `dtype`, or as
    they are stored if it is None. Projections that are stored as one weight have the names of
    separate ones. Raises FileNotFoundError if the folder has no weights.
    """

    def __init__(
        self, model_dir: Path, dtype: torch.dtype | None, form: Format | None = None
    ) -> None:
        self.dtype = dtype
        self._files = TensorFiles(model_dir)
        self._form = form
        self._modules: dict[str, Module] = {}
        self._parts: dict[str, _FusedPart] = {}
        names = set(self._files.names)
        if form is not None:
            ending = f".{form.marker}"
            modules = [name.removesuffix(ending) for name in names if name.endswith(ending)]
            self._modules = {f"{name}.weight": Module(self._files, name) for name in modules}
            names -= {f"{name}.{kind}" for name in modules for kind in form.parts}
        names |= set(self._modules)
        fused = {name for name in names if _projection(name) in FUSED}
        self._parts = {part: place for name in fused for part, place in self._parts_of(name)}
        self._names = names - fused | set(self._parts)

    def _parts_of(self, name: str) -> Iterator[tuple[str, _FusedPart]]:
        """Names and places of the projections that a fused weight consists of."""
        fused = _projection(name)
        num_rows, projections = self.shape(name)[0], FUSED[fused]
        first = num_rows // len(projections)
        if fused == "qkv_proj":  # q has as many outputs as o has inputs
            first = self.shape(name.replace(fused, "o_proj"))[1]
        width, start = (num_rows - first) // (len(projections) - 1), 0
        for projection in projections:
            end = start + width if start else first
            yield name.replace(fused, PROJECTIONS[projection]), _FusedPart(name, range(start, end))
            start = end

    @property
    def is_quantized(self) -> bool:
        return bool(self._modules)

    @property
    def rounding(self) -> Rounding | None:
        """How most quantised modules were rounded; None if there are none."""
        return self._form.rounding if self._form else None

    def __getitem__(self, name: str) -> Weight:
        return self.part(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if part := self._parts.get(name):
            return len(part.rows), *self.shape(part.name)[1:]
        if self._form is not None and name in self._modules:
            return self._form.shape(self._modules[name])
        return self._files.shape(name)

    def part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Weight:
        """Read some rows and columns of a weight, and nothing else of it."""
        if fused := self._parts.get(name):
            own = fused.rows[rows]
            return self.part(fused.name, slice(own.start, own.stop), columns)
        if self._form is None or name not in self._modules:
            return self._typed(self._files.read(name, rows, columns))
        num_outputs, num_inputs = self.shape(name)
        wanted = Part(range(num_outputs)[rows], range(num_inputs)[columns])
        weight = self._form.read(self._modules[name], wanted)
        return self._typed(weight) if isinstance(weight, torch.Tensor) else weight

    def _typed(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.dtype or weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _projection(name: str) -> str:
    """The projection whose weight a tensor is, such as "q_proj"; "" for other tensors."""
    module, _, kind = name.rpartition(".")
    return module.rpartition(".")[2] if kind == "weight" else ""


class ServedNumbers:
    """The numbers that are served, in float32: weights as the checkpoint or `rounding` has them.

    rounds_rows_of: see Backend.   there: the device on which the numbers are. Weights go to it as
    they are stored, which is half of the bytes, and are rounded there.
    """

    def __init__(
        self,
        model_dir: Path,
        rounding: WeightRounding,
        rounds_rows_of: Sequence[int] = (),
        there: torch.device = CPU,
    ) -> None:
        self._weights = open_weights(model_dir, None)
        self._rounding = rounding
        self._rounds_rows_of = rounds_rows_of
        self.there = there

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint itself has codes in place of floating-point weights."""
        return self._weights.is_quantized

    def __getitem__(self, name: str) -> torch.Tensor:
        return as_numbers(self._weights[name].to(self.there)).float()

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Rows [start, end) of a weight; the others are not read."""
        return as_numbers(self._rows(name, start, end)).float()

    def inputs(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The part of x, [T, in], that a product with this weight reads."""
        weight = self._rows(name, 0, 1)
        bits = weight.rounding.bits if isinstance(weight, QuantizedWeight) else 0
        return rounded_rows(x) if bits in self._rounds_rows_of else x

    def _rows(self, name: str, start: int, end: int) -> Weight:
        weight = self._weights.part(name, slice(start, end)).to(self.there)
        if _projection(name) in PROJECTIONS:
            return rounded(weight, self._rounding.projections)
        return rounded(weight, self._rounding.head) if name == "lm_head.weight" else weight


class ShardedWeights(Mapping[str, Weight]):
    """Tensors as one rank needs them: its part of every projection, and all of the others.

    A projection that is cut by inputs is summed over the ranks, so its bias is zero on all but the
    first. Raises UnsupportedModel for a projection that cannot be cut into equal parts.
    """

    def __init__(self, weights: StoredWeights, shard: Shard) -> None:
        self._weights = weights
        self._shard = shard

    def __getitem__(self, name: str) -> Weight:
        module, _, kind = name.rpartition(".")
        projection = module.rpartition(".")[2]
        if projection not in PROJECTIONS:
            return self._weights[name]
        by_inputs = PROJECTIONS.index(projection) in CUT_BY_INPUTS
        if by_inputs and kind == "bias":
            bias = as_numbers(self._weights[name])
            return bias if self._shard.index == 0 else torch.zeros_like(bias)
        if by_inputs:
            return self._weights.part(name, columns=self._own(name, 1))
        return self._weights.part(name, self._own(name, 0))

    def _own(self, name: str, dim: int) -> slice:
        shape = self._weights.shape(name)
        if len(shape) <= dim or shape[dim] % self._shard.size:
            raise UnsupportedModel(
                f"the tensor {name} is {list(shape)}: it cannot be cut into {self._shard.size}"
            )
        return self._shard.part(shape[dim])

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
