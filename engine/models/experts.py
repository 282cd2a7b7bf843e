"""Mixtures of experts by layer, as the families read them from config.json.

A router gives each token a number for each expert. A softmax over all experts makes weights of the
numbers, and the experts with the largest weights are the token's. All families that are served have
this order; they differ in whether the weights of the chosen are then divided by their sum.
"""

from dataclasses import dataclass, replace

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson, none_by_layer

# Defaults of transformers for what config.json leaves out.
_DEFAULT_QWEN3_EXPERTS, _DEFAULT_QWEN3_PER_TOKEN, _DEFAULT_QWEN3_WIDTH = 128, 8, 768
_DEFAULT_MIXTRAL_EXPERTS, _DEFAULT_MIXTRAL_PER_TOKEN = 8, 2


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer.

    per_token: how many of them a token goes through.   width: features between an expert's gate
    and up and its down.   norms_weights: whether the weights of a token's experts sum up to 1.
    """

    count: int
    per_token: int
    width: int
    norms_weights: bool

    def shard(self, num_shards: int) -> "Experts":
        """The parts of the experts that one of `num_shards` ranks computes."""
        return replace(self, width=self.width // num_shards)


LayerExperts = tuple[Experts | None, ...]
"""Experts of the MLP by layer; None where the MLP is dense."""


def mixtral_experts(config: ConfigJson) -> LayerExperts:
    """Layers of Mixtral: all have experts."""
    experts = Experts(
        count=config.get("num_local_experts", _DEFAULT_MIXTRAL_EXPERTS),
        per_token=config.get("num_experts_per_tok", _DEFAULT_MIXTRAL_PER_TOKEN),
        width=config["intermediate_size"],
        norms_weights=True,
    )
    num_layers: int = config["num_hidden_layers"]
    return (_checked(experts),) * num_layers


def qwen3_moe_experts(config: ConfigJson) -> LayerExperts:
    """Layers of Qwen3-MoE: each `decoder_sparse_step`-th has experts, unless it is named dense."""
    # transformers 5 writes the first name, transformers 4 the second.
    count = config.get("num_local_experts", config.get("num_experts", _DEFAULT_QWEN3_EXPERTS))
    if count == 0:
        return none_by_layer(config)
    experts = Experts(
        count=count,
        per_token=config.get("num_experts_per_tok", _DEFAULT_QWEN3_PER_TOKEN),
        width=config.get("moe_intermediate_size", _DEFAULT_QWEN3_WIDTH),
        norms_weights=bool(config.get("norm_topk_prob", False)),
    )
    _checked(experts)
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return tuple(
        experts if layer not in dense and (layer + 1) % step == 0 else None
        for layer in range(config["num_hidden_layers"])
    )


def _checked(experts: Experts) -> Experts:
    if not 1 <= experts.per_token <= experts.count:
        raise UnsupportedModel(
            f"num_experts_per_tok {experts.per_token} of {experts.count} experts is not served"
        )
    return experts
