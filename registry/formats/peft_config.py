"""Parser of PEFT's adapter_config.json; it refuses unsupported options by name."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from registry.errors import InvalidAdapter, TooLarge, shown
from registry.formats.architecture import text_name
from registry.formats.module_pattern import SUFFIX, ModulePattern, read_pattern
from registry.formats.peft_format import EMBEDDING, HEAD, file_fault
from registry.strict_json import parse_object

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 64 << 10

MAX_INVOCATION_TOKENS = 64
# The largest models that are served have 882 modules.
MAX_PATTERNS = 1024
_MAX_RANK = 1 << 20
_ENDS = {name.rpartition(".")[2] for name in (EMBEDDING, HEAD)}
# PEFT's rule for the number of a layer, and its rule where layers_pattern says what is before it.
_LAYER = r".*?\.[^.]*\.(?P<layer>\d+)\."
_LAYER_OF = r"(?:^|.*?\.){}\.(?P<layer>\d+)\."

ALL_LINEAR = "all-linear"

# Options that change the computation in ways that are not served.
_UNSUPPORTED = frozenset(
    {
        "arrow_config",
        "kasa_config",
        "layer_replication",
        "lora_bias",
        "megatron_config",
        "target_parameters",
        "use_bdlora",
        "use_dora",
        "use_qalora",
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
CONVERTIBLE_OPTIONS = frozenset({"kasa_config", "use_dora", "use_qalora"})
# Options of how a model is loaded, how an adapter begins and how it is trained. An initialization
# that changes more than the adapter has its name in init_lora_weights.
_IGNORED = frozenset(
    {
        "corda_config",
        "eva_config",
        # PEFT itself sets it to false for the linear layers that all served models have.
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_dtype",
        "lora_ga_config",
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_core",
        "monteclora_config",
        "params_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "velora_config",
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
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "trainable_token_indices",
        "use_rslora",
    }
)
# Keys of auto_mapping, in which PEFT notes the class that it wrapped; Unsloth adds the last.
_CLASS_KEYS = frozenset({"base_model_class", "parent_library", "unsloth_fixed"})
MLX_KEYS = frozenset({"fine_tune_type", "lora_parameters"})
"""Keys of the config that mlx-lm writes."""
# Other initializations (pissa, olora, corda, loftq, mica) change the base weights or the formula.
_PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Settings of an adapter_config.json that decide the effect on each module.

    target_modules, exclude_modules: names or name endings, or one pattern; "all-linear" is the
    pattern ".*".   is_all_linear: then the model's ends are not targeted.
    saved_modules: names, or parts of them, of modules that are saved whole and have no adapter.
    rank_pattern, alpha_pattern: the first pattern that matches a module wins, as in PEFT.
    layers: layers with an adapter; None for all.   layer_patterns: expressions that find the number
    of a layer in a module's name.
    ties_ends: an embedding that is also the head has one LoRA for both, see `targets`.
    token_indices: trained tokens of the embedding and the head, by module.
    invocation_tokens: an activated LoRA applies from their last occurrence in the prompt on; None
    for an ordinary LoRA.
    not_compared: keys whose patterns cannot be matched in linear time. They announce which modules
    have tensors, and the tensors themselves decide.
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
    layer_patterns: tuple[ModulePattern, ...]
    ties_ends: bool
    token_indices: Mapping[str, tuple[int, ...]]
    invocation_tokens: tuple[int, ...] | None
    base_model_name: str | None
    task_type: str | None
    not_compared: tuple[str, ...]

    @classmethod
    def parse(cls, raw: bytes) -> "PeftConfig":
        """Parse the file. Raises InvalidAdapter with the key at fault as `param`; TooLarge."""
        if len(raw) > MAX_CONFIG_BYTES:
            raise TooLarge.of(CONFIG_FILE, len(raw), MAX_CONFIG_BYTES)
        config = parse_object(raw, param=CONFIG_FILE)
        _refuse_what_is_not_served(config)
        targets = config.get("target_modules")
        layers = _layers(config.get("layers_to_transform"))
        if layers is not None and isinstance(targets, str):
            raise config_fault("layers_to_transform", "needs target_modules to be a list")
        not_compared = [] if targets is not None else ["target_modules"]
        ranks = _patterns("rank_pattern", config.get("rank_pattern"), _rank)
        if None in (pattern for _, pattern, _ in ranks):
            not_compared.append("rank_pattern")
        base_model_name, task_type = config.get("base_model_name_or_path"), config.get("task_type")
        return cls(
            r=_rank("r", config.get("r")),
            lora_alpha=_alpha("lora_alpha", config.get("lora_alpha")),
            use_rslora=_flag("use_rslora", config.get("use_rslora")),
            rank_pattern=tuple((p, rank) for _, p, rank in ranks if p is not None),
            alpha_pattern=_alphas(config.get("alpha_pattern")),
            target_modules=_modules("target_modules", targets or [], not_compared),
            exclude_modules=_modules(
                "exclude_modules", config.get("exclude_modules") or [], not_compared
            ),
            is_all_linear=targets == ALL_LINEAR,
            saved_modules=_names("modules_to_save", config.get("modules_to_save") or []),
            layers=layers,
            layer_patterns=_layer_patterns(config.get("layers_pattern"), not_compared),
            ties_ends=_flag("ensure_weight_tying", config.get("ensure_weight_tying")),
            token_indices=_token_indices(config.get("trainable_token_indices")),
            invocation_tokens=_invocation_tokens(config.get("alora_invocation_tokens")),
            base_model_name=base_model_name if isinstance(base_model_name, str) else None,
            task_type=task_type if isinstance(task_type, str) else None,
            not_compared=tuple(not_compared),
        )

    @property
    def announces_modules(self) -> bool:
        """Whether `targets` is known; else the tensors alone say which modules change."""
        return not {"target_modules", "exclude_modules", "layers_pattern"} & {*self.not_compared}

    def rank(self, module: str) -> int | None:
        """Rank of a module, by the name that it has in the trainer's model; None if not known."""
        if "rank_pattern" in self.not_compared:
            return None
        return _first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str, rank: int) -> float:
        """Scale of a module of this rank, by the name that it has in the trainer's model.

        It is alpha / r, or alpha / sqrt(r) with rsLoRA, in float32.
        """
        import numpy as np  # here, as in registry.formats.tensor_values

        alpha = _first_match(self.alpha_pattern, module, self.lora_alpha)
        return float(np.float32(alpha / (math.sqrt(rank) if self.use_rslora else rank)))

    def saves(self, module: str) -> bool:
        """Whether PEFT trains and saves a whole copy of this module (modules_to_save)."""
        return any(module.endswith(name) for name in self.saved_modules)

    def targets(self, module: str) -> bool:
        """Whether PEFT would put an adapter on this module (check_target_module_exists)."""
        is_end = module.rpartition(".")[2] in _ENDS
        if _matches(self.exclude_modules, module) or (is_end and self.is_all_linear):
            return False
        if any(f".{name}." in f".{module}." for name in self.saved_modules):
            return False
        if not _matches(self.target_modules, module):
            return False
        if self.layers is None or self._layer(module) in self.layers:
            return True
        # PEFT ignores layers_to_transform for a module that target_modules names in full.
        return isinstance(self.target_modules, frozenset) and module in self.target_modules

    def _layer(self, module: str) -> int | None:
        """Number of the layer, as layers_to_transform means it; None outside layers."""
        numbers = (pattern.layer(module) for pattern in self.layer_patterns)
        return next((number for number in numbers if number is not None), None)


def endings(module: str) -> Iterator[str]:
    """Names by which a list may mean a module: "q_proj", "self_attn.q_proj", to the full name."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in reversed(range(len(parts))))


def _matches(modules: frozenset[str] | ModulePattern, module: str) -> bool:
    if isinstance(modules, ModulePattern):
        return modules.matches(module)
    return any(ending in modules for ending in endings(module))


def _first_match(patterns: tuple[tuple[ModulePattern, T], ...], module: str, default: T) -> T:
    return next((value for key, value in patterns if key.matches(module)), default)


def _refuse_what_is_not_served(config: Mapping[str, Any]) -> None:
    # peft_type is checked first, since the keys of other methods would all be unknown.
    if config.get("peft_type") is None:
        raise _of_no_type(config)
    if config["peft_type"] != "LORA":
        raise _unsupported("peft_type", config["peft_type"])
    for key, value in config.items():
        if _asks_for_nothing(key, value):
            continue
        if key in _UNSUPPORTED:
            raise _unsupported(key, value)
        if key == "auto_mapping":
            _check_class(value)
        elif key not in _READ | _IGNORED:
            message = f"{CONFIG_FILE} has the key {shown(key)}, which is not known; remove it"
            raise file_fault("unknown_config_key", message, shown(key))
    if config.get("bias") not in (None, "none"):
        raise _unsupported("bias", config["bias"])
    init = config.get("init_lora_weights")
    if not any(
        init is plain or (isinstance(init, str) and init == plain) for plain in _PLAIN_INITS
    ):
        raise _unsupported("init_lora_weights", init)


def _asks_for_nothing(key: str, value: object) -> bool:
    """Whether an option changes nothing: null, false, empty, or an object or a list of such."""
    if key == "use_bdlora" and isinstance(value, dict):
        return bool(value.get("nblocks", 1) == 1)  # one block is the whole matrix
    if isinstance(value, dict):
        return all(_asks_for_nothing("", item) for item in value.values())
    if isinstance(value, list):
        return all(_asks_for_nothing("", item) and item != 0 for item in value)
    return not value


def _check_class(mapping: object) -> None:
    """Check that auto_mapping names a class, and no code to load. Raises InvalidAdapter."""
    if not isinstance(mapping, dict):
        raise config_fault("auto_mapping", "must be an object")
    for key in mapping.keys() - _CLASS_KEYS:
        raise _unsupported(f"auto_mapping.{key}", mapping[key])


def _rank(key: str, value: object) -> int:
    # AdapterLimits has a lower limit; this one keeps computations with the rank finite.
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise config_fault(key, f"must be a whole number from 1 to {_MAX_RANK}")
    return value


def _alpha(key: str, value: object) -> float:
    # The value is compared before it is converted, since float() could overflow.
    if type(value) not in (int, float) or not 1e-6 <= value <= 1e6:  # type: ignore[operator]
        raise config_fault(key, "must be a number between 1e-6 and 1e6")
    return float(value)  # type: ignore[arg-type]


def _flag(key: str, value: object) -> bool:
    if value not in (None, True, False):
        raise config_fault(key, "must be true or false")
    return bool(value)


def _patterns(
    key: str, value: object, read: Callable[[str, object], T]
) -> list[tuple[str, ModulePattern | None, T]]:
    """Texts, patterns and their numbers; None for one that cannot be matched in linear time."""
    if value is None:
        return []
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise config_fault(key, f"must map at most {MAX_PATTERNS} module names to numbers")
    return [(it, read_pattern(it, key, SUFFIX), read(key, number)) for it, number in value.items()]


def _alphas(value: object) -> tuple[tuple[ModulePattern, float], ...]:
    """Scales depend on every pattern of alpha_pattern, so each has to be matched."""
    found = []
    for text, pattern, alpha in _patterns("alpha_pattern", value, _alpha):
        if pattern is None:
            raise file_fault(
                "unsupported_pattern",
                f"alpha_pattern has {shown(text)}, which scales depend on and which cannot be "
                "matched in linear time (lookaround, references); list the modules by name",
                "alpha_pattern",
            )
        found.append((pattern, alpha))
    return tuple(found)


def _modules(key: str, value: object, not_compared: list[str]) -> frozenset[str] | ModulePattern:
    """Names, or a pattern; notes the key in `not_compared` if it cannot be matched."""
    if isinstance(value, str):
        pattern = read_pattern(".*" if value == ALL_LINEAR else value, key)
        if pattern is None:
            not_compared.append(key)
        return pattern or frozenset()
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return frozenset(value)
    raise config_fault(key, "must be a list of module names or one pattern")


def _layer_patterns(value: object, not_compared: list[str]) -> tuple[ModulePattern, ...]:
    names = [value] if isinstance(value, str) and value else value or []
    forms = [_LAYER_OF.format(name) for name in _names("layers_pattern", names)] or [_LAYER]
    patterns = [read_pattern(form, "layers_pattern") for form in forms]
    if None in patterns:
        not_compared.append("layers_pattern")
    return tuple(pattern for pattern in patterns if pattern is not None)


def _names(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise config_fault(key, "must be a list of module names")


def _layers(value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int for layer in layers):
        raise config_fault("layers_to_transform", "must be a layer number or a list of them")
    return frozenset(layers)


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    key = "trainable_token_indices"
    by_name = value if isinstance(value, dict) else {"embed_tokens": value} if value else {}
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in by_name.items():
        own = text_name(name)
        module = next((end for end in (EMBEDDING, HEAD) if own and end.endswith(own)), None)
        if module is None:
            rule = f"names {shown(name)}; only embed_tokens and lm_head have tokens"
            raise config_fault(key, rule)
        if not isinstance(ids, list) or not all(type(n) is int and n >= 0 for n in ids):
            rule = "must be a list of token ids from 0, or map modules to such lists"
            raise config_fault(key, rule)
        if module in found or len(set(ids)) != len(ids):
            raise config_fault(key, "names a token or a module twice")
        found[module] = tuple(ids)
    return {module: ids for module, ids in found.items() if ids}


def _invocation_tokens(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    # An empty list is refused too, since PEFT would make it an adapter that never applies.
    if not isinstance(value, list) or not 0 < len(value) <= MAX_INVOCATION_TOKENS:
        rule = f"must be a list of 1 to {MAX_INVOCATION_TOKENS} token ids"
        raise config_fault("alora_invocation_tokens", rule)
    if not all(type(token) is int and token >= 0 for token in value):
        raise config_fault("alora_invocation_tokens", "must have whole numbers from 0")
    return tuple(value)


def config_fault(key: str, rule: str, code: str = "invalid_config") -> InvalidAdapter:
    """The fault of a key that does not follow a rule."""
    return file_fault(code, f"{key} of {CONFIG_FILE} {rule}", key)


def _of_no_type(config: Mapping[str, Any]) -> InvalidAdapter:
    if config.keys() & MLX_KEYS:
        remedy = ", as mlx-lm writes it: push the folder with `chorale adapters push`, which "
        remedy += "converts it"
    else:
        remedy = "; send the file that PEFT's save_pretrained wrote"
    return file_fault("invalid_config", f"{CONFIG_FILE} has no peft_type{remedy}", "peft_type")


def _unsupported(key: str, value: object) -> InvalidAdapter:
    what = f"{key}={shown(str(value))} in {CONFIG_FILE}"
    if key == "lora_bias":
        remedy = ", since it adds a bias, which is no product of B and A; train with "
        remedy += "lora_bias=False"
    elif _is_convertible(key, value):
        remedy = "; make a plain LoRA of it with `chorale adapters convert`"
    else:
        remedy = "; train a plain LoRA without it"
    return file_fault("unsupported_feature", f"{what} is not served{remedy}", key)


def _is_convertible(key: str, value: object) -> bool:
    """Whether `chorale adapters convert` makes a plain LoRA of an adapter with this option."""
    if key == "peft_type":
        return isinstance(value, str) and value in CONVERTIBLE_TYPES
    if key == "init_lora_weights":
        return isinstance(value, str) and value.lower().startswith(_CONVERTIBLE_INITS)
    return key in CONVERTIBLE_OPTIONS
