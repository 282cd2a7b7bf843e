"""Checks whether two uploaded files are an adapter of this base model, and makes its passport.

No model is run or imported: the checks need only numpy and the files' bytes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from registry.architecture import may_change
from registry.base_tensor import BaseTensor
from registry.errors import InvalidAdapter, TooLarge, shown
from registry.peft_config import CONFIG_FILE, TOKENS_NOT_SERVED, PeftConfig, endings
from registry.peft_format import (
    ADAPTER_DTYPES,
    EMBEDDING,
    HEAD,
    WEIGHTS_FILE,
    Header,
    ModuleScale,
    TensorInfo,
    canonical_header,
    lora_names,
    read_header,
    read_tensor_chunks,
    split_lora_name,
)
from registry.tensor_values import TensorValues, scan_tensor

# Functions import numpy when they are called, as in registry.tensor_values.
if TYPE_CHECKING:
    import numpy as np

# Thresholds of warnings, chosen so that ordinary training runs cause none.
_LARGE_SCALE = 64.0
_OUTLIER_RATIO = 100.0
_MAX_NAME = 256
"""Characters of the name of a base model that a passport keeps."""
_MAX_WARNINGS = 20

_TRAINED_TOKENS = ".token_adapter.trainable_tokens_delta"

# The copies that PEFT writes for modules_to_save, and below an adapter of an embedding or a head.
_COPY = re.compile(r"base_model\.model\.([A-Za-z0-9_.]+?)(?:\.base_layer)?\.(weight|bias)")


class Base(Protocol):
    """Properties of a base model that the checks need; registry.base_model documents them."""

    @property
    def model_id(self) -> str: ...
    @property
    def modules(self) -> Mapping[str, tuple[int, int]]: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, BaseTensor]: ...

    @property
    def ends(self) -> Mapping[str, tuple[int, int]]: ...


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of one adapter.

    max_scale: limit of a module's scale, alpha / r; training at 1000 times the usual scale is
    unheard of.   max_adapter_bytes: limit of adapter_model.safetensors.
    """

    max_rank: int = 256
    max_scale: float = 1024.0
    max_adapter_bytes: int = 2 << 30
    max_header_bytes: int = 1 << 20
    max_tensors: int = 20_000


@dataclass(frozen=True, slots=True)
class Passport:
    """Description of an adapter for the base model that it was checked against.

    lora_format: "lora", or "alora" for an activated LoRA.
    rank: the largest rank.   ranks, scales: number of modules by rank, by effective scale.
    max_value: largest absolute value of A and B.   size_bytes: bytes of the canonical object.
    invocation_tokens: tokens of an activated LoRA; None for an ordinary LoRA.
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
    trained_on: str | None
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter that passed the checks, with the data for writing its canonical object."""

    passport: Passport
    header: Header
    modules: dict[str, ModuleScale]
    invocation_tokens: tuple[int, ...] | None


def validate_adapter(
    config_bytes: bytes, weights: Path | BinaryIO, base: Base, limits: AdapterLimits
) -> Passport:
    """Check the two uploaded files; returns their passport. Raises InvalidAdapter, TooLarge."""
    return check_adapter(config_bytes, weights, base, limits).passport


def check_adapter(
    config_bytes: bytes, weights: Path | BinaryIO, base: Base, limits: AdapterLimits
) -> CheckedAdapter:
    """Check the two uploaded files; returns passport, header, and effective ranks and scales.

    Raises InvalidAdapter, TooLarge.
    """
    config = PeftConfig.parse(config_bytes)
    _check_invocation_tokens(config, base)
    with _opened(weights) as (file, file_size):
        header = read_weights_header(file, file_size, limits)
        copies = find_copies(header, base)
        _check_copies(file, header, copies, base)
        header = _without(header, copies)
        names = _paired_modules(header, base)
        _check_targets(names, config, base)
        _check_embedding(names, config)
        features = _modules(base)
        modules = {name: config.effect(name) for name in names}
        for name, effect in modules.items():
            _check_shapes(name, effect, header, features[name], limits.max_rank)
            _check_scale(name, effect, limits.max_scale)
        if _ties_ends(config, base) and HEAD in modules:
            _check_tied(file, header)
        values = {name: scan_tensor(file, name, tensor) for name, tensor in header.tensors.items()}
    norms = _norms(modules, values)
    warnings = [
        *_config_warnings(config, names, base),
        *_copy_warnings(copies.values()),
        *_weight_warnings(modules, norms),
    ]
    max_value = max(tensor.max_value for tensor in values.values())
    passport = _passport(
        header, modules, config.invocation_tokens, max_value, config.base_model_name, warnings
    )
    return CheckedAdapter(passport, header, modules, config.invocation_tokens)


def read_weights_header(file: BinaryIO, file_size: int, limits: AdapterLimits) -> Header:
    """Read the header of the weights, at whose beginning the file is open.

    Raises InvalidAdapter, TooLarge.
    """
    if file_size > limits.max_adapter_bytes:
        raise TooLarge(
            what=WEIGHTS_FILE, size_bytes=file_size, limit_bytes=limits.max_adapter_bytes
        )
    return read_header(
        file, file_size, max_header_bytes=limits.max_header_bytes, max_tensors=limits.max_tensors
    )


@contextmanager
def _opened(weights: Path | BinaryIO) -> Iterator[tuple[BinaryIO, int]]:
    """Open the weights; yields the file at its beginning, and its size in bytes."""
    if isinstance(weights, Path):
        with weights.open("rb") as file:
            yield file, weights.stat().st_size
    else:
        size = weights.seek(0, 2)
        weights.seek(0)
        yield weights, size


def _check_invocation_tokens(config: PeftConfig, base: Base) -> None:
    """Refuse invocation tokens outside the vocabulary: such an adapter would never apply."""
    if config.invocation_tokens is None:
        return
    vocab_size = base.config["vocab_size"]
    if max(config.invocation_tokens) >= vocab_size:
        raise InvalidAdapter(
            code="invalid_config",
            message=f"alora_invocation_tokens of {CONFIG_FILE} must be below {vocab_size}, the "
            f"vocabulary of {base.model_id}; train on this base model.",
            param="alora_invocation_tokens",
        )


def _modules(base: Base) -> dict[str, tuple[int, int]]:
    """All modules that an adapter may change, with their inputs and outputs."""
    return {**base.modules, **base.ends}


def _ties_ends(config: PeftConfig, base: Base) -> bool:
    return config.ties_ends and bool(base.config.get("tie_word_embeddings"))


def _check_tied(file: BinaryIO, header: Header) -> None:
    """Check that the LoRA of a tied head is the embedding's, transposed: PEFT would load one of
    them over the other. Raises InvalidAdapter.
    """
    import numpy as np

    a, b = (_read(file, header.tensors[name]) for name in lora_names(EMBEDDING))
    head_a, head_b = (_read(file, header.tensors[name]) for name in lora_names(HEAD))
    if not (np.array_equal(head_a, b.T) and np.array_equal(head_b, a.T)):
        raise InvalidAdapter(
            code="unsupported_feature",
            message=f"ensure_weight_tying in {CONFIG_FILE}: the LoRA of {HEAD} is not that of "
            f"{EMBEDDING}, transposed; save the adapter again, or train without it.",
            param="ensure_weight_tying",
        )


def _read(file: BinaryIO, tensor: TensorInfo) -> "np.ndarray[Any, np.dtype[np.unsignedinteger]]":
    """Bits of a tensor's values, whose shape was checked."""
    import numpy as np

    raw = b"".join(read_tensor_chunks(file, tensor))
    return np.frombuffer(raw, f"<u{len(raw) // prod(tensor.shape)}").reshape(tensor.shape)


def _check_embedding(names: list[str], config: PeftConfig) -> None:
    """Refuse an activated LoRA of the embedding, which PEFT does not have."""
    if config.invocation_tokens is not None and EMBEDDING in names:
        raise InvalidAdapter(
            code="unsupported_feature",
            message=f"alora_invocation_tokens of {CONFIG_FILE} is not for LoRA on embed_tokens, "
            "as in PEFT; train without embed_tokens.",
            param="alora_invocation_tokens",
        )


def find_copies(header: Header, base: Base) -> dict[str, str]:
    """Uploaded tensors that are named like one of the base model's: its name, by theirs."""
    copies = {}
    for name in header.tensors:
        match = _COPY.fullmatch(name)
        if match and (copied := f"{match[1]}.{match[2]}") in base.tensors:
            copies[name] = copied
    return copies


def _check_copies(file: BinaryIO, header: Header, copies: Mapping[str, str], base: Base) -> None:
    """Check that every copy equals the base model's tensor. Raises InvalidAdapter."""
    for name, copied in copies.items():
        if base.tensors[copied].equals(file, header.tensors[name]):
            continue
        raise InvalidAdapter(
            code="unsupported_feature",
            message=f"Tensor {shown(name)}: modules_to_save trained {copied}, or it was saved from "
            f"another base model than {base.model_id}; weights other than LoRA's are served only "
            "if they equal the base model's. Train embed_tokens and lm_head with LoRA "
            "(target_modules), without modules_to_save, on this base model; or make a plain LoRA "
            "of them with `chorale adapters convert`.",
            param="modules_to_save",
        )


def _without(header: Header, names: Mapping[str, str]) -> Header:
    left = {name: tensor for name, tensor in header.tensors.items() if name not in names}
    return replace(header, tensors=left)


def _paired_modules(header: Header, base: Base) -> list[str]:
    """Modules that have tensors, in the base model's order. Raises InvalidAdapter on any tensor
    that is not one of a served module's pair.
    """
    known, found = _modules(base), set()
    for name, tensor in header.tensors.items():
        if name.endswith(_TRAINED_TOKENS):
            raise _fault("unsupported_feature", f"Tensor {shown(name)}: {TOKENS_NOT_SERVED}")
        parts = split_lora_name(name)
        if parts is None:
            raise _fault(
                "unsupported_feature",
                f"Tensor {shown(name)} is neither lora_A nor lora_B of a layer; train without it",
            )
        if not may_change(base.config, parts[0]):
            raise _fault(
                "unsupported_feature",
                f"Tensor {shown(name)} changes an MLP of {base.model_id}, a mixture of experts: "
                "LoRA on experts, on their router and on MLPs beside them is not served; train "
                "with target_modules q_proj, k_proj, v_proj and o_proj",
            )
        if parts[0] not in known:
            raise _fault(
                "unknown_module",
                f"Tensor {shown(name)} changes a module that {base.model_id} does not have or that "
                "is not served; train on this base model, on its attention and MLP projections, "
                "embed_tokens or lm_head",
            )
        if tensor.dtype not in ADAPTER_DTYPES:
            raise _fault(
                "unsupported_dtype",
                f"Tensor {shown(name)} is {tensor.dtype}; save the adapter as F16, BF16 or F32",
            )
        found.add(parts[0])
    modules = [module for module in known if module in found]
    for name in (name for module in modules for name in lora_names(module)):
        if name not in header.tensors:
            raise _fault("unpaired_tensor", f"{name} is missing beside its pair; save it again")
    if not modules:
        raise _fault("no_effect", f"{WEIGHTS_FILE} has no tensors; save the trained adapter")
    return modules


def _check_targets(names: list[str], config: PeftConfig, base: Base) -> None:
    """Check that config and tensors agree, since PEFT would drop a tensor that is not targeted."""
    ties = _ties_ends(config, base)
    # PEFT puts the adapter of a tied head where it puts the embedding's.
    targeted = [
        module
        for module in _modules(base)
        if config.targets(EMBEDDING if ties and module == HEAD else module)
    ]
    if not targeted:
        raise InvalidAdapter(
            code="target_mismatch",
            message=f"target_modules of {CONFIG_FILE} matches no served module of {base.model_id}.",
            param="target_modules",
        )
    for name in names:
        if name not in targeted:
            raise _fault(
                "target_mismatch", f"{name} has tensors, but {CONFIG_FILE} does not target it"
            )
    missing = [module for module in targeted if module not in names]
    if missing:
        raise _fault("target_mismatch", f"{CONFIG_FILE} targets {missing[0]}, which has no tensors")


def _check_shapes(
    module: str, effect: ModuleScale, header: Header, features: tuple[int, int], max_rank: int
) -> None:
    """Check that A is [rank, in_features], B is [out_features, rank], and rank <= max_rank."""
    in_features, out_features = features
    a, b = (header.tensors[name].shape for name in lora_names(module))
    if len(a) != 2 or len(b) != 2 or a[1] != in_features or b[0] != out_features:
        raise _fault(
            "wrong_shape",
            f"{module} has A {list(a)} and B {list(b)}; this base model needs A [rank, "
            f"{in_features}] and B [{out_features}, rank]; train on this base model",
        )
    if not a[0] == b[1] == effect.rank:
        raise _fault(
            "rank_mismatch",
            f"{module} has A of rank {a[0]} and B of rank {b[1]}, {CONFIG_FILE} says {effect.rank}",
        )
    if effect.rank > max_rank:
        raise _fault("rank_too_large", f"{module} has rank {effect.rank}; the limit is {max_rank}")


def _check_scale(module: str, effect: ModuleScale, max_scale: float) -> None:
    if effect.scale > max_scale:
        raise InvalidAdapter(
            code="scale_too_large",
            message=f"{module} has the scale {effect.scale:g}, from lora_alpha and its rank; the "
            f"limit is {max_scale:g}; train with a smaller lora_alpha.",
            param="lora_alpha",
        )


def _norms(modules: dict[str, ModuleScale], values: dict[str, TensorValues]) -> dict[str, float]:
    """Norm bounds by module: scale * |A| * |B| bounds the norm of the module's update.

    Raises InvalidAdapter (no_effect) if every update is zero.
    """
    pairs = {module: [values[name] for name in lora_names(module)] for module in modules}
    if not any(a.max_value and b.max_value for a, b in pairs.values()):
        raise _fault("no_effect", "Every lora_B or lora_A is zero; save the adapter after training")
    return {name: modules[name].scale * a.norm * b.norm for name, (a, b) in pairs.items()}


def _config_warnings(config: PeftConfig, names: list[str], base: Base) -> Iterator[str]:
    if base.config.get("tie_word_embeddings") and not base.ends.keys().isdisjoint(names):
        yield (
            "The base model's head is its embedding. LoRA changes only the one that it names, as "
            "in training; PEFT's merge would change both."
        )
    trained_on = config.base_model_name
    if trained_on and trained_on.rstrip("/").split("/")[-1] != base.model_id.split("/")[-1]:
        yield (
            f"The config says that the adapter was trained on {shown(trained_on)}; "
            f"served here is {base.model_id}."
        )
    if isinstance(config.target_modules, frozenset):
        known = {ending for module in _modules(base) for ending in endings(module)}
        for target in sorted(config.target_modules - known):
            yield f"target_modules has {shown(target)}, which matches no served module."
    for key, patterns in (
        ("rank_pattern", config.rank_pattern),
        ("alpha_pattern", config.alpha_pattern),
    ):
        for pattern, _ in patterns:
            if not any(pattern.matches_suffix(name) for name in names):
                yield f"{key} has {shown(pattern.pattern)}, which matches no module."


def _copy_warnings(copied: Iterable[str]) -> Iterator[str]:
    for name in copied:
        yield f"The files have a copy of the base model's {name}, which was not trained; left out."


def _weight_warnings(modules: dict[str, ModuleScale], norms: dict[str, float]) -> Iterator[str]:
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


def _passport(
    header: Header,
    modules: dict[str, ModuleScale],
    invocation_tokens: tuple[int, ...] | None,
    max_value: float,
    trained_on: str | None,
    warnings: list[str],
) -> Passport:
    ranks = Counter(effect.rank for effect in modules.values())
    scales = Counter(effect.scale for effect in modules.values())
    data_bytes = sum(tensor.size_bytes for tensor in header.tensors.values())
    if len(warnings) > _MAX_WARNINGS:
        hidden = len(warnings) - _MAX_WARNINGS
        warnings = [*warnings[:_MAX_WARNINGS], f"There are {hidden} more warnings."]
    return Passport(
        lora_format="alora" if invocation_tokens else "lora",
        rank=max(ranks),
        ranks={str(rank): count for rank, count in sorted(ranks.items())},
        scales={f"{scale:.6g}": count for scale, count in sorted(scales.items())},
        num_modules=len(modules),
        targets=list(dict.fromkeys(module.rpartition(".")[2] for module in modules)),
        dtype="+".join(sorted({tensor.dtype for tensor in header.tensors.values()})),
        num_parameters=sum(prod(tensor.shape) for tensor in header.tensors.values()),
        max_value=max_value,
        size_bytes=len(canonical_header(header, modules, invocation_tokens)) + data_bytes,
        invocation_tokens=list(invocation_tokens) if invocation_tokens else None,
        trained_on=trained_on[:_MAX_NAME] if trained_on else None,
        warnings=warnings,
    )


def _fault(code: str, message: str) -> InvalidAdapter:
    return InvalidAdapter(code=code, message=f"{message}.", param=WEIGHTS_FILE)
