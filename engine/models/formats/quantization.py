"""Finds the format of a checkpoint by the `quantization_config` of its config.json."""

from collections.abc import Callable
from typing import Protocol

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson
from engine.models.formats.awq import Awq
from engine.models.formats.compressed_tensors import CompressedTensors
from engine.models.formats.fp8 import Fp8
from engine.models.formats.gptq import Gptq
from engine.models.formats.module import Module, Part
from kernels.quantized import Rounding, Weight


class Format(Protocol):
    """Reads the weights of modules.

    marker: the kind of tensor that only quantised modules have.   parts: kinds of tensors that make
    up a module's weight.   rounding: of most modules; None if their numbers are floating-point.
    """

    @property
    def marker(self) -> str: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def rounding(self) -> Rounding | None: ...

    def shape(self, module: Module) -> tuple[int, int]:
        """[out, in] of the module's weight."""
        ...

    def read(self, module: Module, part: Part) -> Weight:
        """Read a part of the module's weight. Raises UnsupportedModel."""
        ...


_FORMATS: dict[str, Callable[[ConfigJson], Format]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
}
_CONVERT = (
    "with llm-compressor (scheme W4A16, W8A8 or FP8), or serve the original with quantization int4"
)
_ADVICE = {
    "bitsandbytes": "load it with transformers, call model.dequantize() and save_pretrained(), "
    "then serve that with quantization int4",
    "mxfp4": "load it with transformers and Mxfp4Config(dequantize=True), and save_pretrained()",
    "gguf": "load it with transformers (gguf_file=...) and save_pretrained()",
}


def format_of(config: ConfigJson) -> Format | None:
    """The format of a checkpoint, None if its tensors are its weights. Raises UnsupportedModel."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return None
    method = str(quantization.get("quant_method"))
    if method not in _FORMATS:
        advice = _ADVICE.get(method, f"quantise the original model {_CONVERT}")
        raise UnsupportedModel(
            f"quantization_config of {method} is not served; {', '.join(_FORMATS)} are: {advice}"
        )
    try:
        return _FORMATS[method](quantization)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(
            f"quantization_config of {method} cannot be read: {error!r}"
        ) from None
