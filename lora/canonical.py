"""Matrices of a canonical object, read from the file as they are before packing into tiles."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lora.errors import AdapterError
from registry.errors import InvalidAdapter
from registry.formats.peft_format import TensorInfo, lora_names, open_canonical

_NUMPY: dict[str, np.dtype[np.generic]] = {
    "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4")
}  # fmt: skip


_Stored = npt.NDArray[np.generic]
"""Values in float32, float16, or uint16 for the bits of bfloat16, mapped from the file."""


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """The update of one module's weight [out, in]: scale * b @ a.

    a: [rank, in].   b: [out, rank].   Both are as stored, since one side of the embedding and of
    the head is large: `as_float32` reads them, or a part of them.
    """

    a: _Stored
    b: _Stored
    scale: float


class CanonicalWeights:
    """Reads the canonical object at `path` module by module; the caller has checked its digest.

    invocation_tokens: token ids that switch on an activated LoRA; None for an ordinary LoRA.
    vocab_size: number of token ids, if the adapter adds some; else None.
    Raises AdapterError("incompatible") if the file is no canonical object.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._adapter = open_canonical(path)
        except InvalidAdapter as error:
            raise AdapterError("incompatible", str(error)) from error
        self._data = np.memmap(path, np.uint8, "r")
        self.invocation_tokens = self._adapter.invocation_tokens
        self.vocab_size = self._adapter.vocab_size

    def delta(self, module: str, outputs: slice = slice(None)) -> ModuleDelta | None:
        """The update of a module such as "model.layers.0.self_attn.q_proj", or None without one.

        outputs: those of the module's outputs to return the update of.
        """
        effect = self._adapter.modules.get(module)
        if effect is None:
            return None
        a, b = (self._read(self._adapter.tensors[name]) for name in lora_names(module))
        return ModuleDelta(a, b[outputs], effect.scale)

    def _read(self, info: TensorInfo) -> _Stored:
        return self._data[info.start : info.end].view(_NUMPY[info.dtype]).reshape(info.shape)


# Shares no code with lora.packing, since the proof checks packed adapters against this.
def as_float32(values: _Stored) -> npt.NDArray[np.float32]:
    """Read stored values into memory."""
    if values.dtype == _NUMPY["BF16"]:  # a bfloat16 is the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
