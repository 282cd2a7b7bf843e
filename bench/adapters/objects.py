"""Canonical adapter objects of one rank with random weights, each made in a millisecond."""

import hashlib
from collections.abc import Sequence

import numpy as np

from bench.adapters.s3_server import S3Server
from engine.models.checkpoint import projection_name
from lora.layout import PROJECTIONS, ModelShape
from registry.formats.peft_format import (
    CanonicalAdapter,
    ModuleScale,
    TensorInfo,
    canonical_header,
    lora_names,
)
from registry.ref import AdapterRef

_SIGN_AND_MANTISSA, _EXPONENT = 0x83FF, 0x2000
"""Bits of float16 that are kept and set: every value is finite, +-2**-7 to +-2**-6."""


class RandomObjects:
    """float16 adapters of one rank on the `targets` of every layer; they share the header."""

    def __init__(self, shape: ModelShape, rank: int, targets: Sequence[str]) -> None:
        self.rank = rank
        tensors, scales = {}, {}
        for layer in range(shape.num_layers):
            for name in targets:
                projection = PROJECTIONS.index(name)
                module = projection_name(layer, projection)
                scales[module] = ModuleScale(rank, 2.0)
                width_in, width_out = shape.features(projection)
                for tensor, size in zip(
                    lora_names(module), [(rank, width_in), (width_out, rank)], strict=True
                ):
                    tensors[tensor] = TensorInfo("F16", size, 0, 2 * size[0] * size[1])
        self._header = canonical_header(CanonicalAdapter(scales, tensors))
        self._data_bytes = sum(tensor.size_bytes for tensor in tensors.values())

    @property
    def size_bytes(self) -> int:
        return len(self._header) + self._data_bytes

    def make(self, seed: int) -> tuple[AdapterRef, bytes]:
        """Return an adapter version and the bytes of its object."""
        bits = np.frombuffer(np.random.default_rng(seed).bytes(self._data_bytes), "<u2")
        data = self._header + (bits & _SIGN_AND_MANTISSA | _EXPONENT).tobytes()
        digest = hashlib.sha256(data).hexdigest()
        key = f"tenants/bench/{digest}"
        return AdapterRef(f"adapter-{seed}", 1, digest, key, self.rank, len(data)), data

    def put(self, s3: S3Server, count: int) -> list[AdapterRef]:
        """Put `count` adapters into the store."""
        made = [self.make(seed) for seed in range(count)]
        for ref, data in made:
            s3.put(ref.object_key, data)
        return [ref for ref, _ in made]
