"""Rotary frequencies, for the kinds of rope that the served families have.

The frequencies equal those of transformers (modeling_rope_utils), as tests check.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson

Parameters = ConfigJson
"""Settings of rope in config.json, in the spelling of transformers 5."""


@dataclass(frozen=True, slots=True)
class RopeRules:
    """Rules by which a family reads the settings of its rope.

    is_partial: whether partial_rotary_factor may leave a part of each head as it is.
    aliases: other names of rope types.   original_length: default of
    original_max_position_embeddings; None for max_position_embeddings.   theta: default of
    rope_theta.
    """

    is_partial: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    original_length: int | None = None
    theta: float = 10_000.0


_PLAIN_RULES = RopeRules()


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotary embedding of a model, which rotates the first `dim` features of each head.

    frequencies: [dim / 2] float32, radians per position.   attention_factor: factor of cos and sin.
    longest: length of the longest sequence that has these frequencies, None if all have them.
    beyond: the rope of longer sequences; None if it would differ from length to length.
    """

    frequencies: torch.Tensor
    attention_factor: float = 1.0
    longest: int | None = None
    beyond: "Rope | None" = None

    @classmethod
    def parse(cls, config: ConfigJson, head_dim: int, rules: RopeRules = _PLAIN_RULES) -> "Rope":
        """Parse either spelling: `rope_parameters` (transformers 5), or `rope_theta` and
        `rope_scaling`. Raises UnsupportedModel.
        """
        parameters = _parameters(config, rules)
        kind, theta = parameters["rope_type"], float(parameters["rope_theta"])
        if kind not in _KINDS:
            raise UnsupportedModel(f"rope_type {kind} is not served")
        dim = _rotary_dim(head_dim, parameters["partial_rotary_factor"], rules)
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        try:
            return _KINDS[kind](1.0 / theta**exponents, parameters)
        except KeyError as missing:
            raise UnsupportedModel(f"rope_type {kind} has no {missing} in config.json") from None

    def at_length(self, max_model_len: int) -> "Rope":
        """The rope of a server whose sequences have at most this length.

        Keys in the cache serve sequences of all lengths, so all of them have one rope: that of the
        longest. Raises UnsupportedModel if there is no such rope.
        """
        if self.longest is None or max_model_len <= self.longest:
            return self
        if self.beyond is None:
            raise UnsupportedModel(
                f"max_model_len {max_model_len} is above {self.longest}: from there on the "
                "frequencies of rope_type dynamic follow the sequence's length, keys in the cache "
                f"cannot; set max_model_len to at most {self.longest}"
            )
        return self.beyond

    def tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [num_positions, dim / 2] float32."""
        angles = torch.outer(torch.arange(num_positions).float(), self.frequencies)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def _rotary_dim(head_dim: int, factor: float, rules: RopeRules) -> int:
    """Number of features of a head that are rotated. Raises UnsupportedModel."""
    dim = int(head_dim * factor)
    if factor != 1.0 and not rules.is_partial:
        raise UnsupportedModel("partial_rotary_factor is not served for this architecture")
    if dim % 2 or not 0 < dim <= head_dim:
        raise UnsupportedModel(f"partial_rotary_factor {factor} of heads of {head_dim} features")
    return dim


def _parameters(config: ConfigJson, rules: RopeRules) -> Parameters:
    """Read rope settings in either spelling. Raises UnsupportedModel."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModel("rope_parameters that differ by layer are not served")
    given = {key: value for key, value in scaling.items() if value is not None}
    longest = config.get("max_position_embeddings")
    parameters = {
        "rope_type": given.get("type", "default"),
        "rope_theta": config.get("rope_theta") or rules.theta,
        "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
        "original_max_position_embeddings": rules.original_length or longest,
        "max_position_embeddings": longest,
        **given,
    }
    # A value beside the dict takes precedence over the one in it, as in transformers.
    if original := config.get("original_max_position_embeddings"):
        parameters["original_max_position_embeddings"] = original
    kind = parameters["rope_type"]
    parameters["rope_type"] = rules.aliases.get(kind, kind)
    return parameters


def _default(frequencies: torch.Tensor, parameters: Parameters) -> Rope:
    return Rope(frequencies)


def _linear(frequencies: torch.Tensor, parameters: Parameters) -> Rope:
    return Rope(frequencies / parameters["factor"])


def _dynamic(frequencies: torch.Tensor, parameters: Parameters) -> Rope:
    """Frequencies that longer sequences would change."""
    return Rope(frequencies, longest=parameters["max_position_embeddings"])


def _longrope(frequencies: torch.Tensor, parameters: Parameters) -> Rope:
    """Each frequency has a divisor of its own, and another one in long sequences.

    Source: arXiv 2402.13753.
    """
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        stretch = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + stretch)

    def divided(name: str) -> torch.Tensor:
        divisors = torch.tensor(parameters[name], dtype=torch.float32)
        if divisors.shape != frequencies.shape:
            raise UnsupportedModel(f"{name} has {len(divisors)} numbers, not {len(frequencies)}")
        return frequencies / divisors

    long = Rope(divided("long_factor"), float(attention_factor))
    return Rope(divided("short_factor"), float(attention_factor), longest=original, beyond=long)


def _llama3(frequencies: torch.Tensor, parameters: Parameters) -> Rope:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return Rope(_interpolate(frequencies, parameters["factor"], keep))


def _yarn(frequencies: torch.Tensor, parameters: Parameters) -> Rope:
    """Same as llama3, with a ramp linear in the index of the wave; arXiv 2309.00071, sec. 3.2."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / original
    dim = 2 * len(frequencies)

    def index(turns: float) -> float:
        """Index of the wave that makes so many turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    theta = float(parameters["rope_theta"])
    low, high = index(parameters.get("beta_fast") or 32), index(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = ((torch.arange(len(frequencies)) - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    rescaled = _interpolate(frequencies, factor, 1.0 - slowed)
    return Rope(rescaled, _yarn_attention_factor(factor, parameters))


def _yarn_attention_factor(factor: float, parameters: Parameters) -> float:
    """The given factor, or the paper's for `factor`, which DeepSeek's configs weigh by mscale."""
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def _interpolate(frequencies: torch.Tensor, factor: float, keep: torch.Tensor) -> torch.Tensor:
    """Slow waves down. keep: [dim / 2], 1 if a frequency stays, 0 to divide it by `factor`."""
    return (1.0 - keep) * frequencies / factor + keep * frequencies


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "longrope": _longrope,
    "llama3": _llama3,
    "yarn": _yarn,
}
