"""Largest value and norm of an uploaded tensor, found in one pass over its bytes."""

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, BinaryIO

from registry.formats.peft_format import TensorInfo, file_fault, read_tensor_chunks

# Functions import numpy when they are called: the gateway imports this module and calls none.
if TYPE_CHECKING:
    import numpy as np

MAX_VALUE = 65504.0
"""The largest float16. A larger value is infinite on an engine that serves in float16, and a
passport is valid for the base model, not only for the number format that it is served in today."""


@dataclass(frozen=True, slots=True)
class TensorValues:
    """Figures of a tensor. max_value: largest absolute value.   norm: Frobenius, in float32."""

    max_value: float
    norm: float


def scan_tensor(file: BinaryIO, name: str, tensor: TensorInfo) -> TensorValues:
    """Scan a tensor of a served dtype. Raises InvalidAdapter: not_finite, value_too_large."""
    import numpy as np

    max_value, sum_squares = 0.0, 0.0
    for chunk in read_tensor_chunks(file, tensor):
        values = decode(chunk, tensor.dtype)
        # A NaN is both the max() and the min() of its chunk, so two passes find every fault.
        largest = max(float(values.max()), -float(values.min()))
        if not isfinite(largest):
            raise file_fault("not_finite", f"Tensor {name} has a NaN or an infinity; train again")
        if largest > MAX_VALUE:
            message = f"Tensor {name} has the value {largest:g}; the limit is {MAX_VALUE:g}, "
            raise file_fault("value_too_large", f"{message}the largest of float16; train again")
        max_value = max(max_value, largest)
        # The norm is only an estimate, so underflow and rounding in float32 do not matter.
        sum_squares += float(np.dot(values, values))
    return TensorValues(max_value, sqrt(sum_squares))


def decode(chunk: bytes, dtype: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Values of a served dtype as float32."""
    import numpy as np

    if dtype == "BF16":
        # A bfloat16, which numpy lacks, is the upper half of a float32.
        return (np.frombuffer(chunk, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(chunk, "<f2" if dtype == "F16" else "<f4").astype(np.float32, copy=False)


def round_to(
    values: "np.ndarray[Any, np.dtype[np.float32]]", dtype: str
) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """The values as a tensor of this served dtype would hold them, rounded to nearest even."""
    import numpy as np

    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32)
    with np.errstate(over="ignore"):
        return values.astype("<f2" if dtype == "F16" else "<f4").astype(np.float32)
