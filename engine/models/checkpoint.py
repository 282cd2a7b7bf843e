"""Gives a checkpoint's tensors the places that a decoder has for them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.models.experts import Experts
from engine.models.layer_norms import LayerNorms
from engine.models.rounding import NO_ROUNDING, WeightRounding, rounded
from kernels.quantized import Weight, as_numbers
from lora.layout import PROJECTIONS

_MODULES = (
    *(f"self_attn.{name}" for name in PROJECTIONS[:4]),
    *(f"mlp.{name}" for name in PROJECTIONS[4:]),
)
_GATE_UP_DOWN = (4, 5, 6)
_KV_SCALES = (("k_scale", "k_proj.output_scale"), ("v_scale", "v_proj.output_scale"))
"""Names of a layer's scales of FP8 KV: of k and of v, newer and older ones."""
# Old checkpoints contain the rope's frequencies, which are not read.
_COMPUTED = ".rotary_emb.inv_freq"


def projection_name(layer: int, projection: int) -> str:
    """Name of a module, such as "model.layers.0.self_attn.q_proj".

    projection: its place in PROJECTIONS.
    """
    return f"model.layers.{layer}.{_MODULES[projection]}"


def router_name(layer: int) -> str:
    """Name of the module that chooses a layer's experts."""
    return f"model.layers.{layer}.mlp.gate"


def expert_projection_name(layer: int, expert: int, projection: int) -> str:
    """Name of a module of an expert.   projection: its place in PROJECTIONS."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{PROJECTIONS[projection]}"


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Tensors of a layer's experts.

    router: [experts, hidden], never rounded.   experts: gate, up and down of each, [out, in],
    rounded or as stored; an expert is read when the iterator comes to it.
    """

    router: torch.Tensor
    experts: Iterator[tuple[Weight, ...]]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Tensors of a layer.

    qk_norms: norms of q and of k, [head_dim] each, or [heads * head_dim] where they go over all
    heads; None without norms.
    projections: [out, in], rounded or as stored, biases: [out], as in PROJECTIONS; only those of
    attention if the MLP consists of experts.
    experts: of the MLP, to be iterated before the next layer is taken; None if the MLP is dense.
    window: see DecoderConfig.   kv_scales: what 1 stands for in FP8 KV, of k and of v.
    """

    norms: LayerNorms[torch.Tensor]
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    projections: tuple[Weight, ...]
    biases: tuple[torch.Tensor | None, ...]
    experts: ExpertWeights | None
    window: int | None
    kv_scales: tuple[float, float]


class Checkpoint:
    """Weights by name, each taken once; one left over is an error, as it would change the answer.

    norm: [hidden], of the last layer's output; its weights include the factor of the logits.
    rounding: how projections and the head are rounded as they are taken.
    num_bytes: size of what was taken so far.
    Raises UnsupportedModel when a tensor is missing, has another shape, or has no place in the
    decoder; for tensors of layers, when the layers are taken.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        rounding: WeightRounding = NO_ROUNDING,
    ) -> None:
        self.config = config
        self.rounding = rounding
        self.num_bytes = 0
        self._weights = weights
        self._left = set(weights)
        self.embedding = self._take("model.embed_tokens.weight", *self._vocabulary)
        self.norm = self._take_norm("model.norm", config.shape.hidden_size)
        if config.multipliers.logits != 1.0:
            # Products of 16-bit weights and the factor need not be 16-bit numbers.
            self.norm = self.norm.float() * config.multipliers.logits

    @cached_property
    def lm_head(self) -> Weight:
        """The output head, taken when asked for, since only the first of several ranks needs it."""
        if self.config.tie_word_embeddings:
            return rounded(self.embedding, self.rounding.head)
        head = rounded(self._take_weight("lm_head.weight", *self._vocabulary), self.rounding.head)
        self.num_bytes += head.nbytes
        return head

    @property
    def _vocabulary(self) -> tuple[int, int]:
        return self.config.vocab_size, self.config.shape.hidden_size

    def layers(self) -> Iterator[LayerWeights]:
        """Yield the layers one after the other, keeping none of them."""
        for index in range(self.config.shape.num_layers):
            yield self._take_layer(index)
        for name in self._left:
            if name.startswith("model.") and not name.endswith(_COMPUTED):
                raise UnsupportedModel(f"the tensor {name} has no place in this architecture")

    def _take_layer(self, index: int) -> LayerWeights:
        shape, prefix = self.config.shape, f"model.layers.{index}"
        experts = self.config.experts[index]
        modules = _MODULES if experts is None else _MODULES[: _GATE_UP_DOWN[0]]
        features = [self.config.features(projection) for projection in range(len(modules))]
        return LayerWeights(
            norms=self.config.norms.map(
                lambda name: self._take_norm(f"{prefix}.{name}", shape.hidden_size)
            ),
            qk_norms=self._take_qk_norms(f"{prefix}.self_attn"),
            projections=tuple(
                self._take_projection(f"{prefix}.{module}.weight", out_features, in_features)
                for module, (in_features, out_features) in zip(modules, features, strict=True)
            ),
            biases=tuple(
                self._take(f"{prefix}.{module}.bias", out_features) if has_bias else None
                for module, (_, out_features), has_bias in zip(
                    modules, features, self.config.biases[: len(modules)], strict=True
                )
            ),
            experts=None if experts is None else self._take_experts(index, experts),
            window=self.config.windows[index],
            kv_scales=self._take_kv_scales(f"{prefix}.self_attn"),
        )

    def _take_experts(self, layer: int, experts: Experts) -> ExpertWeights:
        hidden, width = self.config.shape.hidden_size, experts.width
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        return ExpertWeights(
            self._take(f"{router_name(layer)}.weight", experts.count, hidden),
            (
                tuple(
                    self._take_projection(
                        f"{expert_projection_name(layer, expert, projection)}.weight", *shape
                    )
                    for projection, shape in zip(_GATE_UP_DOWN, shapes, strict=True)
                )
                for expert in range(experts.count)
            ),
        )

    def _take_kv_scales(self, prefix: str) -> tuple[float, float]:
        """Scales that a quantised checkpoint gives for FP8 KV; 1 without them."""
        k, v = (
            next(
                (
                    self._take_scale(f"{prefix}.{name}")
                    for name in names
                    if f"{prefix}.{name}" in self._left
                ),
                1.0,
            )
            for names in _KV_SCALES
        )
        return k, v

    def _take_scale(self, name: str) -> float:
        scale = as_numbers(self._weights[name])
        self._left.remove(name)
        if scale.numel() != 1 or not scale > 0:
            raise UnsupportedModel(f"the tensor {name} is not one positive number")
        return scale.item()

    def _take_qk_norms(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        sizes = self.config.qk_norm_sizes
        if sizes is None:
            return None
        q, k = (
            self._take_norm(f"{prefix}.{name}_norm", size)
            for name, size in zip(("q", "k"), sizes, strict=True)
        )
        return q, k

    def _take_norm(self, module: str, size: int) -> torch.Tensor:
        weight = self._take(f"{module}.weight", size)
        return weight.float() + self.config.norm_offset if self.config.has_wide_norms else weight

    def _take_projection(self, name: str, *shape: int) -> Weight:
        weight = rounded(self._take_weight(name, *shape), self.rounding.projections)
        self.num_bytes += weight.nbytes
        return weight

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._take_weight(name, *shape)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModel(f"the weight {name} is quantised; only projections may be")
        self.num_bytes += tensor.nbytes
        return tensor

    def _take_weight(self, name: str, *shape: int) -> Weight:
        if name not in self._left:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        self._left.remove(name)
        weight = self._weights[name]
        if weight.shape != shape:
            raise UnsupportedModel(
                f"the tensor {name} is {list(weight.shape)}, by config.json it is {list(shape)}"
            )
        return weight
