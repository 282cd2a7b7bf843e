"""Parser of PEFT's adapter_config.json; it refuses unsupported options by name."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from registry.errors import InvalidAdapter, TooLarge, shown
from registry.module_pattern import MAX_WORK, ModulePattern
from registry.peft_format import EMBEDDING, HEAD, ModuleScale
from registry.strict_json import parse_object

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 64 << 10

MAX_INVOCATION_TOKENS = 64
# The largest models that are served have 882 modules.
MAX_PATTERNS = 1024
_MAX_RANK = 1 << 20

ALL_LINEAR = "all-linear"

# Options that change the computation in ways that are not served. Null, false and empty values
# are accepted, since they ask for nothing.
_UNSUPPORTED = frozenset(
    {
        "arrow_config",
        "corda_config",
        "fan_in_fan_out",
        "kasa_config",
        "layer_replication",
        "layers_pattern",
        "loftq_config",
        "lora_bias",
        "lora_ga_config",
        "megatron_config",
        "monteclora_config",
        "runtime_config",
        "target_parameters",
        "trainable_token_indices",
        "use_bdlora",
        "use_dora",
        "use_qalora",
        "velora_config",
    }
)
# Types and options of which `chorale adapters convert` makes a plain LoRA.
CONVERTIBLE_TYPES = frozenset(
    {
        "ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "HIRA", "HRA", "IA3", "LOHA", "LOKR",
        "MISS", "OFT", "RANDLORA", "ROAD", "SHIRA", "VBLORA", "VERA", "WAVEFT",
    }
)  # fmt: skip
_CONVERTIBLE_INITS = ("corda", "lora_ga", "mica", "olora", "pissa")
CONVERTIBLE_OPTIONS = frozenset(
    {
        "kasa_config",
        "monteclora_config",
        "trainable_token_indices",
        "use_dora",
        "use_qalora",
        "velora_config",
    }
)
# Options that concern training only, or have an effect only with another key.
_IGNORED = frozenset(
    {
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
    }
)
_READ = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Keys of auto_mapping, in which PEFT notes the class that it wrapped; Unsloth adds the last.
_CLASS_KEYS = frozenset({"base_model_class", "parent_library", "unsloth_fixed"})
TOKENS_NOT_SERVED = (
    "trained tokens are not served; make a plain LoRA of embed_tokens of them with "
    "`chorale adapters convert`, or train embed_tokens with LoRA (target_modules)"
)
# Other initializations (pissa, olora, corda, loftq, mica) change the base weights or the formula.
_PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Settings of an adapter_config.json that decide the effect on each module.

    target_modules, exclude_modules: names or name endings, or one pattern; "all-linear" is the
    pattern ".*".   is_all_linear: then the model's ends are not targeted.
    saved_modules: names, or parts of them, of modules that are saved whole and have no adapter.
    rank_pattern, alpha_pattern: the first pattern that matches a module wins, as in PEFT.
    layers: layers with an adapter; None for all.
    ties_ends: an embedding that is also the head has one LoRA for both, see `targets`.
    invocation_tokens: an activated LoRA applies from their last occurrence in the prompt on; None
    for an ordinary LoRA.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[ModulePattern, int], ...]
    alpha_pattern: tuple[tuple[ModulePattern, float], ...]
    target_modules: frozenset[str] | ModulePattern
    exclude_modules: frozenset[str] | ModulePattern
    is_all_linear: bool
    saved_modules: tuple[str, ...]
    layers: frozenset[int] | None
    ties_ends: bool
    invocation_tokens: tuple[int, ...] | None
    base_model_name: str | None

    @classmethod
    def parse(cls, raw: bytes) -> "PeftConfig":
        """Parse the file. Raises InvalidAdapter with the key at fault as `param`; TooLarge."""
        if len(raw) > MAX_CONFIG_BYTES:
            raise TooLarge(what=CONFIG_FILE, size_bytes=len(raw), limit_bytes=MAX_CONFIG_BYTES)
        config = parse_object(raw, param=CONFIG_FILE)
        _refuse_what_is_not_served(config)
        targets = config.get("target_modules")
        layers = _layers(config.get("layers_to_transform"))
        if layers is not None and isinstance(targets, str):
            raise _invalid("layers_to_transform", "needs target_modules to be a list")
        base_model_name = config.get("base_model_name_or_path")
        return cls(
            r=_rank("r", config.get("r")),
            lora_alpha=_alpha("lora_alpha", config.get("lora_alpha")),
            use_rslora=_flag("use_rslora", config.get("use_rslora")),
            rank_pattern=_patterns("rank_pattern", config.get("rank_pattern"), _rank),
            alpha_pattern=_patterns("alpha_pattern", config.get("alpha_pattern"), _alpha),
            target_modules=_modules("target_modules", targets),
            exclude_modules=_modules("exclude_modules", config.get("exclude_modules") or []),
            is_all_linear=targets == ALL_LINEAR,
            saved_modules=_names("modules_to_save", config.get("modules_to_save") or []),
            layers=layers,
            ties_ends=_flag("ensure_weight_tying", config.get("ensure_weight_tying")),
            invocation_tokens=_invocation_tokens(config.get("alora_invocation_tokens")),
            base_model_name=base_model_name if isinstance(base_model_name, str) else None,
        )

    def effect(self, module: str) -> ModuleScale:
        """Rank and scale of a module. The scale is alpha / r, or alpha / sqrt(r) with rsLoRA, in
        float32.
        """
        import numpy as np  # here, as in registry.tensor_values

        rank = _first_match(self.rank_pattern, module, self.r)
        alpha = _first_match(self.alpha_pattern, module, self.lora_alpha)
        scale = float(np.float32(alpha / (math.sqrt(rank) if self.use_rslora else rank)))
        return ModuleScale(rank, scale)

    def targets(self, module: str) -> bool:
        """Whether PEFT would put an adapter on this module (check_target_module_exists)."""
        is_end = module in (EMBEDDING, HEAD)
        if _matches(self.exclude_modules, module) or (is_end and self.is_all_linear):
            return False
        if any(f".{name}." in f".{module}." for name in self.saved_modules):
            return False
        if not _matches(self.target_modules, module):
            return False
        if self.layers is None or (not is_end and int(module.split(".")[2]) in self.layers):
            return True
        # PEFT ignores layers_to_transform for a module that target_modules names in full.
        return isinstance(self.target_modules, frozenset) and module in self.target_modules


def endings(module: str) -> Iterator[str]:
    """Names by which a list may mean a module: "q_proj", "self_attn.q_proj", to the full name."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in reversed(range(len(parts))))


def _matches(modules: frozenset[str] | ModulePattern, module: str) -> bool:
    if isinstance(modules, ModulePattern):
        return modules.matches_whole(module)
    return any(ending in modules for ending in endings(module))


def _first_match(patterns: tuple[tuple[ModulePattern, T], ...], module: str, default: T) -> T:
    return next((value for key, value in patterns if key.matches_suffix(module)), default)


def _refuse_what_is_not_served(config: Mapping[str, Any]) -> None:
    # peft_type is checked first, since the keys of other methods would all be unknown.
    if config.get("peft_type") != "LORA":
        raise _unsupported("peft_type", config.get("peft_type"))
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _unsupported("task_type", config["task_type"])
    if (mapping := config.get("auto_mapping")) and not _is_causal_lm(mapping):
        raise _unsupported("auto_mapping", mapping)
    for key, value in config.items():
        if key in _UNSUPPORTED and value:
            raise _unsupported(key, value)
        if key not in _READ | _IGNORED | _UNSUPPORTED and value:
            raise InvalidAdapter(
                code="unknown_config_key",
                message=f"{CONFIG_FILE} has the key {shown(key)}, which is not known; remove it.",
                param=shown(key),
            )
    if config.get("bias") not in (None, "none"):
        raise _unsupported("bias", config["bias"])
    init = config.get("init_lora_weights")
    if not any(
        init is plain or (isinstance(init, str) and init == plain) for plain in _PLAIN_INITS
    ):
        raise _unsupported("init_lora_weights", init)


def _is_causal_lm(mapping: object) -> bool:
    """Whether an auto_mapping names the class of a language model and nothing else."""
    if not isinstance(mapping, dict) or mapping.keys() - _CLASS_KEYS:
        return False
    return str(mapping.get("base_model_class")).endswith("ForCausalLM")


def _rank(key: str, value: object) -> int:
    # AdapterLimits has a lower limit; this one keeps computations with the rank finite.
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise _invalid(key, f"must be a whole number from 1 to {_MAX_RANK}")
    return value


def _alpha(key: str, value: object) -> float:
    # The value is compared before it is converted, since float() could overflow.
    if type(value) not in (int, float) or not 1e-6 <= value <= 1e6:  # type: ignore[operator]
        raise _invalid(key, "must be a number between 1e-6 and 1e6")
    return float(value)  # type: ignore[arg-type]


def _flag(key: str, value: object) -> bool:
    if value not in (None, True, False):
        raise _invalid(key, "must be true or false")
    return bool(value)


def _patterns(
    key: str, value: object, read: Callable[[str, object], T]
) -> tuple[tuple[ModulePattern, T], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise _invalid(key, f"must map at most {MAX_PATTERNS} module names to numbers")
    patterns = tuple((ModulePattern(k, param=key), read(key, v)) for k, v in value.items())
    if sum(pattern.work for pattern, _ in patterns) > 4 * MAX_WORK:
        raise _invalid(key, "has too many patterns; list the modules by name")
    return patterns


def _modules(key: str, value: object) -> frozenset[str] | ModulePattern:
    if isinstance(value, str):
        return ModulePattern(".*" if value == ALL_LINEAR else value, param=key)
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return frozenset(value)
    raise _invalid(key, "must be a list of module names or one pattern")


def _names(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise _invalid(key, "must be a list of module names")


def _layers(value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int for layer in layers):
        raise _invalid("layers_to_transform", "must be a layer number or a list of them")
    return frozenset(layers)


def _invocation_tokens(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    # An empty list is refused too, since PEFT would make it an adapter that never applies.
    if not isinstance(value, list) or not 0 < len(value) <= MAX_INVOCATION_TOKENS:
        rule = f"must be a list of 1 to {MAX_INVOCATION_TOKENS} token ids"
        raise _invalid("alora_invocation_tokens", rule)
    if not all(type(token) is int and token >= 0 for token in value):
        raise _invalid("alora_invocation_tokens", "must have whole numbers from 0")
    return tuple(value)


def _invalid(key: str, rule: str) -> InvalidAdapter:
    return InvalidAdapter(
        code="invalid_config", message=f"{key} of {CONFIG_FILE} {rule}.", param=key
    )


def _unsupported(key: str, value: object) -> InvalidAdapter:
    what = f"{key}={shown(str(value))} in {CONFIG_FILE}"
    # Trained tokens are rows of the embedding, so the message for embeddings applies.
    if key == "trainable_token_indices":
        message = f"{what}: {TOKENS_NOT_SERVED}."
    elif key == "lora_bias":
        message = (
            f"{what} is not served, since it adds a bias, which is no product of B and A; train "
            "with lora_bias=False."
        )
    elif _is_convertible(key, value):
        message = f"{what} is not served; make a plain LoRA of it with `chorale adapters convert`."
    else:
        message = f"{what} is not served; train a plain LoRA for CAUSAL_LM without it."
    return InvalidAdapter(code="unsupported_feature", message=message, param=key)


def _is_convertible(key: str, value: object) -> bool:
    """Whether `chorale adapters convert` makes a plain LoRA of an adapter with this option."""
    if key == "peft_type":
        return isinstance(value, str) and value in CONVERTIBLE_TYPES
    if key == "init_lora_weights":
        return isinstance(value, str) and value.lower().startswith(_CONVERTIBLE_INITS)
    return key in CONVERTIBLE_OPTIONS
