"""Checks whether two uploaded files are an adapter of this base model, and makes its passport.

No model is run or imported: the checks need only numpy and the files' bytes.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from registry.base.base_model import BaseModel
from registry.checks.passport import (
    Passport,
    config_warnings,
    copy_warnings,
    make_passport,
    tensor_warnings,
    weight_warnings,
)
from registry.checks.tensor_names import UploadedTensors, changed_together, hint, name_tensors
from registry.checks.token_rows import (
    END_WEIGHTS,
    TOKEN_TENSORS,
    UploadedWeights,
    add_rows,
    find_rows,
)
from registry.errors import TooLarge, shown
from registry.formats.architecture import may_change
from registry.formats.peft_config import CONFIG_FILE, PeftConfig, config_fault
from registry.formats.peft_format import (
    ADAPTER_DTYPES,
    EMBEDDING,
    HEAD,
    MAX_TENSORS,
    MAX_UPLOAD_HEADER_BYTES,
    WEIGHTS_FILE,
    CanonicalAdapter,
    Header,
    ModuleScale,
    TensorInfo,
    file_fault,
    lora_names,
    read_header,
    read_tensor_chunks,
    split_lora_name,
)
from registry.formats.tensor_values import TensorValues, scan_tensor

# Functions import numpy when they are called, as in registry.formats.tensor_values.
if TYPE_CHECKING:
    import numpy as np

# The copies that PEFT writes for modules_to_save, and below an adapter of an embedding or a head.
_COPY = re.compile(
    r"base_model\.model\.([A-Za-z0-9_.]+?)(?:\.(?:modules_to_save|original_module))?"
    r"(?:\.token_adapter)?(?:\.base_layer)?\.(weight|bias)"
)


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of one adapter.

    max_scale: limit of a module's scale, alpha / r; training at 1000 times the usual scale is
    unheard of.   max_adapter_bytes: limit of adapter_model.safetensors.
    """

    max_rank: int = 256
    max_scale: float = 1024.0
    max_adapter_bytes: int = 2 << 30
    max_header_bytes: int = MAX_UPLOAD_HEADER_BYTES
    max_tensors: int = MAX_TENSORS


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter that passed the checks, as its canonical object will have it."""

    passport: Passport
    adapter: CanonicalAdapter


def check_adapter(
    config_bytes: bytes, file: BinaryIO, base: BaseModel, limits: AdapterLimits
) -> CheckedAdapter:
    """Check the two uploaded files.

    file: the weights, open at any place. Raises InvalidAdapter, TooLarge.
    """
    config = PeftConfig.parse(config_bytes)
    _check_invocation_tokens(config, base)
    uploaded = name_tensors(read_weights_header(file, limits))
    _check_towers(file, uploaded)
    copies = find_copies(uploaded.header, base)
    rows = find_rows(UploadedWeights(file, uploaded.header, base), copies, config, limits.max_rank)
    others = {name: copied for name, copied in copies.items() if copied not in END_WEIGHTS}
    _check_copies(file, uploaded, others, base)
    uploaded = uploaded.without(copies.keys() | TOKEN_TENSORS)
    header = uploaded.header
    names = _paired_modules(uploaded, base)
    targeted = _targeted(config, uploaded, base)
    _check_targets(names, targeted)
    _check_embedding(names, config)
    features = _features(base, rows.vocab_size)
    modules = _effects(names, config, uploaded, features, limits)
    if _ties_ends(config, base) and HEAD in modules:
        _check_tied(file, header)
    weights = UploadedWeights(file, header, base)
    header, with_rows = add_rows(weights, modules, rows, limits.max_rank)
    values = {name: scan_tensor(file, name, tensor) for name, tensor in header.tensors.items()}
    norms = _norms(with_rows, values)
    warnings = [
        *config_warnings(config, uploaded, names, targeted, base),
        *copy_warnings(copies.values(), rows),
        *tensor_warnings(uploaded),
        *weight_warnings(modules, {name: norms[name] for name in modules}),
    ]
    max_value = max(tensor.max_value for tensor in values.values())
    adapter = CanonicalAdapter(with_rows, header.tensors, config.invocation_tokens, rows.vocab_size)
    passport = make_passport(adapter, max_value, config.base_model_name, warnings)
    return CheckedAdapter(passport, adapter)


def read_weights_header(file: BinaryIO, limits: AdapterLimits) -> Header:
    """Read the header of the weights, open at any place. Raises InvalidAdapter, TooLarge."""
    file_size = file.seek(0, 2)
    file.seek(0)
    if file_size > limits.max_adapter_bytes:
        raise TooLarge.of(WEIGHTS_FILE, file_size, limits.max_adapter_bytes)
    return read_header(
        file, file_size, max_header_bytes=limits.max_header_bytes, max_tensors=limits.max_tensors
    )


def _check_invocation_tokens(config: PeftConfig, base: BaseModel) -> None:
    """Refuse invocation tokens outside the vocabulary: such an adapter would never apply."""
    if config.invocation_tokens is None:
        return
    vocab_size = base.config["vocab_size"]
    if max(config.invocation_tokens) >= vocab_size:
        rule = f"must be below {vocab_size}, the vocabulary of {base.model_id}; train on this base "
        raise config_fault("alora_invocation_tokens", f"{rule}model")


def _features(base: BaseModel, vocab_size: int | None) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of all modules.   vocab_size: of an adapter that adds tokens."""
    features = base.all_modules
    if vocab_size is not None:
        hidden = features[EMBEDDING][1]
        features |= {EMBEDDING: (vocab_size, hidden), HEAD: (hidden, vocab_size)}
    return features


def _ties_ends(config: PeftConfig, base: BaseModel) -> bool:
    return config.ties_ends and bool(base.config.get("tie_word_embeddings"))


def _check_tied(file: BinaryIO, header: Header) -> None:
    """Check that the LoRA of a tied head is the embedding's, transposed: PEFT would load one of
    them over the other. Raises InvalidAdapter.
    """
    import numpy as np

    a, b = (_read(file, header.tensors[name]) for name in lora_names(EMBEDDING))
    head_a, head_b = (_read(file, header.tensors[name]) for name in lora_names(HEAD))
    if not (np.array_equal(head_a, b.T) and np.array_equal(head_b, a.T)):
        raise file_fault(
            "unsupported_feature",
            f"ensure_weight_tying in {CONFIG_FILE}: the LoRA of {HEAD} is not that of "
            f"{EMBEDDING}, transposed; save the adapter again, or train without it",
            "ensure_weight_tying",
        )


def _read(file: BinaryIO, tensor: TensorInfo) -> "np.ndarray[Any, np.dtype[np.unsignedinteger]]":
    """Bits of a tensor's values, whose shape was checked."""
    import numpy as np

    raw = b"".join(read_tensor_chunks(file, tensor))
    return np.frombuffer(raw, f"<u{len(raw) // math.prod(tensor.shape)}").reshape(tensor.shape)


def _check_embedding(names: list[str], config: PeftConfig) -> None:
    """Refuse an activated LoRA of the embedding, which PEFT does not have."""
    if config.invocation_tokens is not None and EMBEDDING in names:
        rule = "is not for LoRA on embed_tokens, as in PEFT; train without embed_tokens"
        raise config_fault("alora_invocation_tokens", rule, "unsupported_feature")


def find_copies(header: Header, base: BaseModel) -> dict[str, str]:
    """Uploaded tensors that are named like one of the base model's: its name, by theirs."""
    copies = {}
    for name in header.tensors:
        match = _COPY.fullmatch(name)
        copied = f"{match[1]}.{match[2]}" if match else ""
        if copied in base.tensors or copied in END_WEIGHTS:
            copies[name] = copied
    return copies


def _check_copies(
    file: BinaryIO, uploaded: UploadedTensors, copies: Mapping[str, str], base: BaseModel
) -> None:
    """Check that every copy equals the base model's tensor. Raises InvalidAdapter."""
    for name, copied in copies.items():
        if base.tensors[copied].equals(file, uploaded.header.tensors[name]):
            continue
        raise file_fault(
            "unsupported_feature",
            f"Tensor {uploaded.shown(name)}: modules_to_save trained {copied}, or it was "
            f"saved from another base model than {base.model_id}; weights other than LoRA's are "
            "served only if they equal the base model's. Train embed_tokens and lm_head with LoRA "
            "(target_modules), without modules_to_save, on this base model; or make a plain LoRA "
            "of them with `chorale adapters convert`",
            "modules_to_save",
        )


def _check_towers(file: BinaryIO, uploaded: UploadedTensors) -> None:
    """Check that no tower for images or sound is changed. Raises InvalidAdapter."""
    largest: dict[str, list[float]] = {}
    for name, tensor in uploaded.towers.items():
        is_read = tensor.dtype in ADAPTER_DTYPES
        value = scan_tensor(file, name, tensor).max_value if is_read else math.inf
        largest.setdefault(changed_together(name), []).append(value)
    for name in uploaded.towers:
        if all(largest[changed_together(name)]):
            raise file_fault(
                "unsupported_feature",
                f"Tensor {shown(name)} changes a tower for images or sound, and only text is "
                "served; train the language model's layers alone, or remove the tower's tensors",
            )


def _paired_modules(uploaded: UploadedTensors, base: BaseModel) -> list[str]:
    """Modules that have tensors, in the base model's order. Raises InvalidAdapter on any tensor
    that is not one of a served module's pair.
    """
    known, found = base.all_modules, set()
    tensors = uploaded.header.tensors
    for name, tensor in tensors.items():
        what = f"Tensor {uploaded.shown(name)}"
        named = split_lora_name(name)
        if named is None:
            raise file_fault(
                "unsupported_feature",
                f"{what} is neither lora_A nor lora_B of a layer: {hint(name)}",
            )
        if not may_change(base.config, named[0]):
            raise file_fault(
                "unsupported_feature",
                f"{what} changes an MLP of {base.model_id}, a mixture of experts: "
                "LoRA on experts, on their router and on MLPs beside them is not served; train "
                "with target_modules q_proj, k_proj, v_proj and o_proj",
            )
        if named[0] not in known:
            raise file_fault(
                "unknown_module",
                f"{what} changes a module that {base.model_id} does not have or that "
                "is not served; train on this base model, on its attention and MLP projections, "
                "embed_tokens or lm_head",
            )
        if tensor.dtype not in ADAPTER_DTYPES:
            raise file_fault(
                "unsupported_dtype",
                f"{what} is {tensor.dtype}; save the adapter as F16, BF16 or F32",
            )
        found.add(named[0])
    modules = [module for module in known if module in found]
    for name in (name for module in modules for name in lora_names(module)):
        if name not in tensors:
            raise file_fault("unpaired_tensor", f"{name} is missing beside its pair; save it again")
    if not modules:
        raise file_fault("no_effect", f"{WEIGHTS_FILE} has no LoRA; save the trained adapter")
    return modules


def _targeted(config: PeftConfig, uploaded: UploadedTensors, base: BaseModel) -> list[str] | None:
    """Modules that the config announces; None if that is not compared."""
    if not config.announces_modules:
        return None
    ties = _ties_ends(config, base)
    # PEFT puts the adapter of a tied head where it puts the embedding's.
    return [
        module
        for module in base.all_modules
        if (uploaded.has_head or module != HEAD)
        and config.targets(uploaded.trained_name(EMBEDDING if ties and module == HEAD else module))
    ]


def _check_targets(names: list[str], targeted: list[str] | None) -> None:
    """Check that every announced module has tensors: a file that lost some is another adapter."""
    missing = [module for module in targeted or () if module not in names]
    if missing:
        message = f"{CONFIG_FILE} targets {missing[0]}, which has no tensors"
        raise file_fault("target_mismatch", message)


def _effects(
    names: list[str],
    config: PeftConfig,
    uploaded: UploadedTensors,
    features: Mapping[str, tuple[int, int]],
    limits: AdapterLimits,
) -> dict[str, ModuleScale]:
    """Rank and scale of each module: its tensors have the rank, and the config has the scale.

    features: inputs and outputs of all modules.
    """
    modules = {}
    for name in names:
        trained_name = uploaded.trained_name(name)
        a, b = (uploaded.header.tensors[tensor].shape for tensor in lora_names(name))
        _check_shapes(name, a, b, features[name])
        rank = a[0]
        _check_rank(name, rank, b[1], config.rank(trained_name), limits.max_rank)
        effect = ModuleScale(rank, config.scale(trained_name, rank))
        _check_scale(name, effect, limits.max_scale)
        modules[name] = effect
    return modules


def _check_shapes(
    module: str, a: tuple[int, ...], b: tuple[int, ...], features: tuple[int, int]
) -> None:
    """Check that A is [rank, in_features] and B is [out_features, rank]."""
    in_features, out_features = features
    if len(a) != 2 or len(b) != 2 or a[1] != in_features or b[0] != out_features:
        raise file_fault(
            "wrong_shape",
            f"{module} has A {list(a)} and B {list(b)}; this base model needs A [rank, "
            f"{in_features}] and B [{out_features}, rank]; train on this base model",
        )


def _check_rank(module: str, a: int, b: int, expected: int | None, max_rank: int) -> None:
    """Check that A and B have one rank, that of the config if that is known, within the limit."""
    if not a == b == (expected or a):
        raise file_fault(
            "rank_mismatch",
            f"{module} has A of rank {a} and B of rank {b}, {CONFIG_FILE} says {expected or a}",
        )
    if a > max_rank:
        raise file_fault("rank_too_large", f"{module} has rank {a}; the limit is {max_rank}")


def _check_scale(module: str, effect: ModuleScale, max_scale: float) -> None:
    if effect.scale > max_scale:
        message = f"{module} has the scale {effect.scale:g}, from lora_alpha and its rank; the "
        message += f"limit is {max_scale:g}; train with a smaller lora_alpha"
        raise file_fault("scale_too_large", message, "lora_alpha")


def _norms(modules: dict[str, ModuleScale], values: dict[str, TensorValues]) -> dict[str, float]:
    """Norm bounds by module: scale * |A| * |B| bounds the norm of the module's update.

    Raises InvalidAdapter (no_effect) if every update is zero.
    """
    pairs = {module: [values[name] for name in lora_names(module)] for module in modules}
    if not any(a.max_value and b.max_value for a, b in pairs.values()):
        message = "Every lora_B or lora_A is zero; save the adapter after training"
        raise file_fault("no_effect", message)
    return {name: modules[name].scale * a.norm * b.norm for name, (a, b) in pairs.items()}
