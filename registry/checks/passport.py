"""The passport of an adapter: what it is, and what is odd about it though it is served."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from statistics import median

from registry.base.base_model import BaseModel
from registry.base.base_names import last_name, trained_on_quantised
from registry.checks.tensor_names import UploadedTensors
from registry.checks.token_rows import END_WEIGHTS, TrainedRows
from registry.errors import shown
from registry.formats.peft_config import CONFIG_FILE, PeftConfig, endings
from registry.formats.peft_format import CanonicalAdapter, ModuleScale, canonical_header

# Thresholds of warnings, chosen so that ordinary training runs cause none.
_LARGE_SCALE = 64.0
_OUTLIER_RATIO = 100.0
_MAX_NAME = 256
"""Characters of the name of a base model that a passport keeps."""
_MAX_WARNINGS = 20
_OF_TEXT = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
"""Tasks that train a language model or its layers, and no head of their own."""


@dataclass(frozen=True, slots=True)
class Passport:
    """Description of an adapter for the base model that it was checked against.

    lora_format: "lora", or "alora" for an activated LoRA.
    rank: the largest rank.   ranks, scales: number of modules by rank, by effective scale.
    max_value: largest absolute value of A and B.   size_bytes: bytes of the canonical object.
    invocation_tokens: tokens of an activated LoRA; None for an ordinary LoRA.
    vocab_size: number of token ids, if the adapter adds some to the base model's; else None.
    trained_on: the base model that its config names, such as a repository's name; None without one.
    warnings: sentences; the adapter is served despite them.
    """

    lora_format: str
    rank: int
    ranks: dict[str, int]
    scales: dict[str, int]
    num_modules: int
    targets: list[str]
    dtype: str
    num_parameters: int
    max_value: float
    size_bytes: int
    invocation_tokens: list[int] | None
    vocab_size: int | None
    trained_on: str | None
    warnings: list[str]


def config_warnings(
    config: PeftConfig,
    uploaded: UploadedTensors,
    names: list[str],
    targeted: list[str] | None,
    base: BaseModel,
) -> Iterator[str]:
    """Say what is odd about the config.

    names: modules that have tensors.   targeted: those that the config announces; None if it is
    not compared.
    """
    if base.config.get("tie_word_embeddings") and not base.ends.keys().isdisjoint(names):
        yield (
            "The base model's head is its embedding. LoRA changes only the one that it names, as "
            "in training; PEFT's merge would change both."
        )
    trained_on = config.base_model_name
    if trained_on and last_name(trained_on) != last_name(base.model_id):
        yield (
            f"The config says that the adapter was trained on {shown(trained_on)}; "
            f"served here is {base.model_id}."
        )
        if trained_on_quantised(trained_on):
            yield (
                "By this name, the weights were quantised in training; on other weights the "
                "adapter answers a little differently."
            )
    if config.task_type not in _OF_TEXT:
        yield f"The config says task_type={shown(config.task_type)}; served here is its text alone."
    for key in config.not_compared:
        yield (
            f"not_compared: {key} of {CONFIG_FILE} is not matched in linear time, or is missing; "
            "the tensors say which modules change."
        )
    if targeted is not None:
        yield from _target_warnings(config, uploaded, names, targeted, base)
    for key, patterns in (
        ("rank_pattern", config.rank_pattern),
        ("alpha_pattern", config.alpha_pattern),
    ):
        for pattern, _ in patterns:
            if not any(pattern.matches(uploaded.trained_name(name)) for name in names):
                yield f"{key} has {shown(pattern.text)}, which matches no module."


def _target_warnings(
    config: PeftConfig,
    uploaded: UploadedTensors,
    names: list[str],
    targeted: list[str],
    base: BaseModel,
) -> Iterator[str]:
    if isinstance(config.target_modules, frozenset):
        modules = (uploaded.trained_name(module) for module in base.all_modules)
        known = {ending for module in modules for ending in endings(module)}
        for target in sorted(config.target_modules - known):
            yield f"target_modules has {shown(target)}, which matches no served module."
    if surplus := [name for name in names if name not in targeted]:
        yield (
            f"{CONFIG_FILE} does not target {len(surplus)} of {len(names)} modules that have "
            f"tensors, the first is {surplus[0]}. They are served; PEFT would leave them out."
        )


def copy_warnings(copied: Iterable[str], rows: TrainedRows) -> Iterator[str]:
    """Say which copies of the base model's weights are left out, and which are not whole.

    copied: the base model's tensors that the file has copies of.
    """
    yield from rows.warnings
    for name in dict.fromkeys(copied):
        if END_WEIGHTS.get(name) not in rows.by_module:
            what = f"a copy of the base model's {name}"
            yield f"The files have {what}, which was not trained; left out."


def tensor_warnings(uploaded: UploadedTensors) -> Iterator[str]:
    """Say which tensors of no layer of a text model are left out."""
    for what, names in (
        ("that only training uses", uploaded.of_training),
        ("of a tower for images or sound, which change nothing", tuple(uploaded.towers)),
    ):
        if names:
            first = shown(names[0])
            yield f"The files have {len(names)} tensors {what}, the first is {first}; left out."


def weight_warnings(modules: dict[str, ModuleScale], norms: dict[str, float]) -> Iterator[str]:
    """Say what is odd about the values.   norms: bounds of the norms of the modules' updates."""
    largest = max(modules, key=lambda module: modules[module].scale)
    if modules[largest].scale > _LARGE_SCALE:
        yield f"The scale of {largest} is {modules[largest].scale:g}; alpha is large for its rank."
    zero = [module for module, norm in norms.items() if norm == 0]
    if zero:
        yield f"{len(zero)} of {len(norms)} modules are zero, the first is {zero[0]}."
    # Norms are compared with each other and not with the base model's, which would need a read of
    # all its weights; the engine's proof measures the adapter's real effect on the base.
    middle = median([norm for norm in norms.values() if norm > 0] or [1.0])
    for module, norm in norms.items():
        if norm > _OUTLIER_RATIO * middle:
            yield f"The weights of {module} are {norm / middle:.0f} times the median module's."


def make_passport(
    adapter: CanonicalAdapter, max_value: float, trained_on: str | None, warnings: list[str]
) -> Passport:
    """The passport of an adapter that passed the checks.

    trained_on: the base model that its config names.
    """
    modules, tensors = adapter.modules, adapter.tensors.values()
    ranks = Counter(effect.rank for effect in modules.values())
    scales = Counter(effect.scale for effect in modules.values())
    data_bytes = sum(tensor.size_bytes for tensor in tensors)
    tokens = adapter.invocation_tokens
    if len(warnings) > _MAX_WARNINGS:
        hidden = len(warnings) - _MAX_WARNINGS
        warnings = [*warnings[:_MAX_WARNINGS], f"There are {hidden} more warnings."]
    return Passport(
        lora_format="alora" if tokens else "lora",
        rank=max(ranks),
        ranks={str(rank): count for rank, count in sorted(ranks.items())},
        scales={f"{scale:.6g}": count for scale, count in sorted(scales.items())},
        num_modules=len(modules),
        targets=list(dict.fromkeys(module.rpartition(".")[2] for module in modules)),
        dtype="+".join(sorted({tensor.dtype for tensor in tensors})),
        num_parameters=sum(prod(tensor.shape) for tensor in tensors),
        max_value=max_value,
        size_bytes=len(canonical_header(adapter)) + data_bytes,
        invocation_tokens=list(tokens) if tokens else None,
        vocab_size=adapter.vocab_size,
        trained_on=trained_on[:_MAX_NAME] if trained_on else None,
        warnings=warnings,
    )
