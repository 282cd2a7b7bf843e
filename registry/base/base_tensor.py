"""A base model's tensor outside its projections, and copies of it in uploaded files.

PEFT saves whole tensors for `modules_to_save`, and the weight below an adapter of the embedding or
the head. A copy that equals the base model's tensor changes nothing.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from registry.formats.peft_format import ADAPTER_DTYPES, TensorInfo, read_tensor_chunks
from registry.formats.tensor_values import decode


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A stored tensor.   digest: sha256 of its dtype, shape and bytes, hex; see `digest_of`."""

    dtype: str
    shape: tuple[int, ...]
    digest: str

    def equals(self, file: BinaryIO, tensor: TensorInfo) -> bool:
        """Whether a tensor of an uploaded file has exactly the same values, in its own dtype."""
        dtypes = {self.dtype, tensor.dtype}
        if self.shape != tuple(tensor.shape) or not dtypes <= ADAPTER_DTYPES:
            return False
        digest = hashlib.sha256(_head(self.dtype, self.shape))
        for chunk in read_tensor_chunks(file, tensor):
            if (raw := _as_stored(chunk, tensor.dtype, self.dtype)) is None:
                return False
            digest.update(raw)
        return digest.hexdigest() == self.digest


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a stored tensor's bytes.   path: of its file, or the number of the file, if it is
    open.   start: its first byte.
    """

    path: Path | int
    start: int

    def read(self, start: int, end: int) -> bytes:
        """Read bytes [start, end) of the tensor. Raises OSError, also if the file has lost them."""
        with open(self.path, "rb", closefd=not isinstance(self.path, int)) as file:
            # An open file has one position, which others may move.
            found = os.pread(file.fileno(), end - start, self.start + start)
        if len(found) < end - start:
            raise OSError("a file of the base model is shorter than it was")
        return found


def digest_of(dtype: str, shape: Iterable[int], chunks: Iterable[bytes]) -> str:
    """sha256 of a tensor, hex. Equal bytes of another dtype or shape are another tensor."""
    digest = hashlib.sha256(_head(dtype, shape))
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _head(dtype: str, shape: Iterable[int]) -> bytes:
    return f"{dtype} {list(shape)}\n".encode()


def _as_stored(chunk: bytes, dtype: str, stored: str) -> bytes | None:
    """The values in another dtype, or None if it cannot hold them exactly."""
    if dtype == stored:
        return chunk
    import numpy as np  # here, as in registry.formats.tensor_values

    values = decode(chunk, dtype)
    if stored == "BF16":  # a bfloat16 is the upper half of a float32
        bits = values.view(np.uint32)
        return None if (bits & 0xFFFF).any() else (bits >> 16).astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        converted = values.astype("<f2" if stored == "F16" else "<f4")
    return converted.tobytes() if np.array_equal(converted, values) else None
