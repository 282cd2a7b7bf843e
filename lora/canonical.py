"""A canonical object as its own matrices: what an adapter is before it is packed into tiles."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lora.errors import AdapterError
from registry.errors import InvalidAdapter
from registry.peft_format import TensorInfo, lora_names, open_canonical

_NUMPY: dict[str, np.dtype[np.floating]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """What one module adds to its weight [out, in]: scale * b @ a.

    a: [rank, in] float32.   b: [out, rank] float32.
    """

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]
    scale: float


class CanonicalWeights:
    """The object at `path`, its digest checked by somebody else; modules are read when asked for.

    invocation_tokens: of an activated LoRA, None for others.
    Raises AdapterError("incompatible") where it is no canonical object.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._adapter = open_canonical(path)
        except InvalidAdapter as error:
            raise AdapterError("incompatible", str(error)) from error
        self._data = np.memmap(path, np.uint8, "r")
        self.invocation_tokens = self._adapter.invocation_tokens

    def delta(self, module: str) -> ModuleDelta | None:
        """By a name such as "model.layers.0.self_attn.q_proj"; None where it has none."""
        effect = self._adapter.modules.get(module)
        if effect is None:
            return None
        a, b = (self._read(self._adapter.tensors[name]) for name in lora_names(module))
        return ModuleDelta(a, b, effect.scale)

    # Not by what lora.packing reads with: it is judged by what comes from here.
    def _read(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        raw = self._data[info.start : info.end]
        if info.dtype == "BF16":  # the upper halves of float32
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(_NUMPY[info.dtype]).astype(np.float32)
        return values.reshape(info.shape)
