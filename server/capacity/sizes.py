"""A model's sizes, read from its config.json or given by hand: parameters, bytes, KV."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lora.layout import PROJECTIONS, ModelShape
from registry.base.text_config import text_config
from registry.formats.architecture import EXPERT_ARCHITECTURES, refusal, served_architecture

Quantization = Literal["float", "int8", "int4", "awq"]
"""Weights as they are, rounded by the engine to 8 bits or to 4 bits in groups of 32, or 4 bits in
groups of 128 with zeros, as AWQ and GPTQ checkpoints have them."""

_SCALE_BYTES, _ZERO_BYTES = 4, 1


class UnknownModel(ValueError):
    """A model's sizes are not known; str() says what is missing and where."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model.

    shape: with the width of the MLP, or of one expert.   num_experts: 0 for a dense MLP.
    max_model_len: the longest sequence that it was made for.   stored: form of the checkpoint.
    """

    name: str
    shape: ModelShape
    vocab_size: int
    max_model_len: int
    is_tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    stored: Quantization = "float"

    @property
    def adapted_shape(self) -> ModelShape:
        """Shape as the engine's layout has it: adapters change no expert."""
        return replace(self.shape, intermediate_size=0) if self.num_experts else self.shape

    @property
    def used_share(self) -> float:
        """Share of a layer's weights that a token computes with, as of its experts."""
        return self.experts_per_token / self.num_experts if self.num_experts else 1.0

    @property
    def mlp_weights(self) -> int:
        """Weights of one MLP, or of one expert."""
        return 3 * self.shape.hidden_size * self.shape.intermediate_size

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's q, k, v and o."""
        return sum(_product(self.shape.features(p)) for p in range(PROJECTIONS.index("gate_proj")))

    @property
    def layer_weights(self) -> int:
        """Weights of all products of a layer."""
        return self.attention_weights + max(self.num_experts, 1) * self.mlp_weights

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.shape.hidden_size

    @property
    def num_parameters(self) -> int:
        ends = self.head_weights * (1 if self.is_tied else 2)
        return self.shape.num_layers * (self.layer_weights + self._kept) + ends + self._hidden

    @property
    def _hidden(self) -> int:
        return self.shape.hidden_size

    @property
    def _kept(self) -> int:
        """Numbers of a layer that are never rounded: two norms, and a router."""
        return (2 + self.num_experts) * self._hidden

    def product_bytes(self, quantization: Quantization, itemsize: int) -> int:
        """Bytes of a layer's products: codes, scales and zeros.   itemsize: bytes of a number."""
        s = self.shape
        attention = [s.features(p) for p in range(PROJECTIONS.index("gate_proj"))]
        mlp = [(self._hidden, s.intermediate_size)] * 2 + [(s.intermediate_size, self._hidden)]
        count = max(self.num_experts, 1)
        of_attention = sum(_weight_bytes(f, quantization, itemsize) for f in attention)
        return of_attention + count * sum(_weight_bytes(f, quantization, itemsize) for f in mlp)

    def head_bytes(self, quantization: Quantization, itemsize: int) -> int:
        """Bytes of the head, which the engine never rounds to fewer than 8 bits."""
        head: Quantization = {"int4": "int8", "awq": "float"}.get(quantization, quantization)  # type: ignore[assignment]
        return _weight_bytes((self._hidden, self.vocab_size), head, itemsize)

    def weight_bytes(self, quantization: Quantization, itemsize: int, num_shards: int = 1) -> int:
        """Bytes of the weights on the first of `num_shards` ranks, which has both ends."""
        layer = self.product_bytes(quantization, itemsize) // num_shards + self._kept * itemsize
        has_head = not self.is_tied or quantization in ("int8", "int4")
        head = self.head_bytes(quantization, itemsize) if has_head else 0
        embedding = (self.head_weights + self._hidden) * itemsize
        return self.shape.num_layers * layer + head + embedding

    def shards(self) -> list[int]:
        """Numbers of ranks that the engine can cut the model into."""
        widths = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.intermediate_size)
        return [n for n in (1, 2, 4, 8) if not any(width % n for width in widths)]


def _product(features: tuple[int, int]) -> int:
    return features[0] * features[1]


def _weight_bytes(features: tuple[int, int], quantization: Quantization, itemsize: int) -> int:
    """Bytes of one weight, as kernels.quantized.QuantizedWeight counts them."""
    num_inputs, num_outputs = features
    match quantization:
        case "float":
            return num_inputs * num_outputs * itemsize
        case "int8":
            return num_inputs * num_outputs + _SCALE_BYTES * num_outputs
        case "int4":
            return num_outputs * (num_inputs // 2 + _SCALE_BYTES * (num_inputs // 32))
    groups = -(-num_inputs // 128)
    return num_outputs * (num_inputs // 2 + (_SCALE_BYTES + _ZERO_BYTES) * groups)


# ---- where sizes come from ----


def _named(name: str, length: int, vocab: int, tied: bool, *sizes: int) -> ModelSizes:
    return ModelSizes(name, ModelShape(*sizes), vocab, length, tied)


_NAMED = {
    model.name: model
    for model in (
        # layers, hidden, intermediate, heads, kv heads, head_dim
        _named("llama-2-7b", 4096, 32000, False, 32, 4096, 11008, 32, 32, 128),
        _named("llama-3-8b", 8192, 128256, False, 32, 4096, 14336, 32, 8, 128),
        _named("llama-3-70b", 8192, 128256, False, 80, 8192, 28672, 64, 8, 128),
        _named("mistral-7b", 32768, 32000, False, 32, 4096, 14336, 32, 8, 128),
        _named("qwen2.5-7b", 32768, 152064, False, 28, 3584, 18944, 28, 4, 128),
        _named("smollm2-135m", 8192, 49152, True, 30, 576, 1536, 9, 3, 64),
    )
}
NAMED_MODELS = tuple(_NAMED)
"""Names of models whose sizes are known here."""

_FIELDS = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
"""Names of `--sizes` by the fields of ModelShape; vocab is the other one."""


def find_sizes(model: str) -> ModelSizes:
    """Sizes of a named model, of a folder or of a config.json. Raises UnknownModel."""
    if model in _NAMED:
        return _NAMED[model]
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        names = ", ".join(NAMED_MODELS)
        raise UnknownModel(
            f"{model} is no folder with a config.json, and none of {names}"
        ) from None
    except ValueError as error:
        raise UnknownModel(f"{path} is not JSON: {error}") from None
    return parse_sizes(config, path.parent.name or model)


def parse_sizes(config: Any, name: str) -> ModelSizes:
    """Sizes in a config.json. Raises UnknownModel."""
    if not isinstance(config, Mapping):
        raise UnknownModel(f"config.json of {name}: it is no JSON object")
    config = text_config(config)
    if (architecture := served_architecture(config)) is None:
        raise UnknownModel(f"config.json of {name}: {refusal(config)}")
    heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    has_experts = architecture in EXPERT_ARCHITECTURES
    of_expert = has_experts and "moe_intermediate_size" in config
    width = "moe_intermediate_size" if of_expert else "intermediate_size"
    shape = ModelShape(
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_count(config, width),
        num_heads=heads,
        num_kv_heads=_count(config, "num_key_value_heads", heads),
        head_dim=_count(config, "head_dim", hidden // heads),
    )  # fmt: skip
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return ModelSizes(
        name,
        shape,
        _count(config, "vocab_size"),
        _count(config, "max_position_embeddings", 8192),
        bool(config.get("tie_word_embeddings")),
        _count(config, experts, 8) if has_experts else 0,
        _count(config, "num_experts_per_tok", 2) if has_experts else 0,
        _stored(config),
    )


def _stored(config: Mapping[str, Any]) -> Quantization:
    """The form in which a checkpoint has its weights; "float" for all but those of 4 bits."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    return "awq" if method in ("awq", "gptq", "gptq_v2") else "float"


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise UnknownModel(f"config.json: {name} is {value!r}; it must be a positive integer")
    return value


def change_sizes(sizes: ModelSizes | None, text: str) -> ModelSizes:
    """Sizes with those of `text` in their place, as in "layers=32,kv_heads=8".

    sizes: None for a model of which `text` gives all. Raises UnknownModel.
    """
    given: dict[str, int] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name.strip() not in (*_FIELDS, "vocab") or not value.strip().isdigit() or not int(value):
            names = ", ".join((*_FIELDS, "vocab"))
            raise UnknownModel(f"{word!r} is no size; give NAME=NUMBER with a name of {names}")
        given[name.strip()] = int(value)
    if sizes is None:
        if missing := [name for name in (*_FIELDS, "vocab") if name not in given]:
            raise UnknownModel(f"without a model, give {', '.join(missing)} as well")
        sizes = ModelSizes("sizes", ModelShape(1, 1, 1, 1, 1, 1), 1, 8192)
    vocab_size = given.pop("vocab", sizes.vocab_size)
    shape = replace(sizes.shape, **{_FIELDS[name]: value for name, value in given.items()})
    return replace(sizes, shape=shape, vocab_size=vocab_size)
