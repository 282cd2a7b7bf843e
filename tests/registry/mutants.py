"""Adapters that are nearly valid, each made from a number so that it can be made again.

A mutant is a valid adapter of the base of tests.tiny_models.save_model with up to four changes, to
the config or the header as JSON or to tensors, and up to three changes of bytes. Some mutants stay
valid and must be served.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from registry.formats.peft_format import lora_names
from tests.registry.factories import Tensor, encode, encode_header, make_tensor

WIDTHS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 160),
    "mlp.up_proj": (64, 160),
    "mlp.down_proj": (160, 64),
}
KEYS = [
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "auto_mapping",
    "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layer_replication",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias",
    "modules_to_save", "peft_type", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_dora",
    "use_rslora", "__class__", "",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 5, 8, 2**31, 2**63, 10**400, 0.5, -0.0, 1e-7, 1e308, "",
    "q_proj", "none", "lora_only", "LORA", "CAUSAL_LM", "all-linear", "pissa", "eva", ".*",
    "(a+)+$", "[", "\\", r"model\.layers\.0\..*", "(.*)*x", "q_proj|v_proj", "../../etc/passwd",
    "\x00", "\ud800", "é" * 9, "x" * 3000, [], [0], [1], [0, 1], ["q_proj"], ["v_proj", "q_proj"],
    ["lm_head"], [[]], [None], [7, 8, 9], [291], [292], {}, {"q_proj": 4}, {"q_proj": 0},
    {"v_proj": 3, ".*": 4}, {"": 4}, {"^model.layers.0": 4}, {"a": {"b": {"c": {"d": 1}}}},
    {"cache_file": "/etc/passwd"},
]  # fmt: skip
NUMBERS = [
    float("nan"), float("inf"), -float("inf"), 65504.0, -65504.0, 65520.0, 1e5, -1e38,
    3.4e38, 1e-45, 1e-30, 6e-8, 0.0, -0.0, 1.0,
]  # fmt: skip


@dataclass
class Adapter:
    """An adapter under construction. edits: changes of the header, made after encoding the rest."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    metadata: dict[str, str] | None = None
    edits: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)


def mutant(number: int) -> tuple[bytes, bytes]:
    """Make (adapter_config.json, adapter_model.safetensors); a number always gives the same."""
    chance = random.Random(number)
    adapter = _sound(chance)
    for _ in range(chance.randrange(5)):
        if adapter.tensors:
            chance.choice(_CHANGES)(adapter, chance)
    weights = _laid_out(adapter)
    config = json.dumps(adapter.config, indent=chance.choice([None, 2])).encode()
    for _ in range(chance.choice([0, 0, 0, 0, 1, 3])):
        if chance.random() < 0.3:
            config = _other_bytes(config, len(config), chance)
        else:
            # Changed bytes matter most in the header.
            near = 8 + int.from_bytes(weights[:8], "little") if chance.random() < 0.8 else 1 << 62
            weights = _other_bytes(weights, near, chance)
    return config, weights


def _sound(chance: random.Random) -> Adapter:
    targets = chance.sample([name.partition(".")[2] for name in WIDTHS], chance.randrange(1, 4))
    rank, layers = chance.choice([1, 2, 4, 7, 8, 9]), chance.choice([None, None, [0], [1]])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": chance.choice([1, 4, 16, 2.5]),
        "target_modules": sorted(targets),
        "use_rslora": chance.random() < 0.2,
        "layers_to_transform": layers,
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
    }
    if chance.random() < 0.2:
        config["alora_invocation_tokens"] = [7, 8]
    dtype, noise = (
        chance.choice(["F32", "F16", "BF16"]),
        np.random.default_rng(chance.getrandbits(32)),
    )
    tensors = {}
    for layer in layers or [0, 1]:
        for name, (in_features, out_features) in WIDTHS.items():
            if name.partition(".")[2] in targets:
                a, b = lora_names(f"model.layers.{layer}.{name}")
                tensors[a] = make_tensor(noise.normal(size=(rank, in_features)), dtype)
                tensors[b] = make_tensor(noise.normal(size=(out_features, rank)), dtype)
    return Adapter(config, tensors)


def _laid_out(adapter: Adapter) -> bytes:
    whole = encode(adapter.tensors, adapter.metadata)
    if not adapter.edits:
        return whole
    data_start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:data_start])
    for edit in adapter.edits:
        edit(header)
    return encode_header(header, whole[data_start:])


def _other_bytes(data: bytes, near: int, chance: random.Random) -> bytes:
    """Change, cut off, repeat or insert bytes before `near`, or append zeros."""
    at = chance.randrange(max(1, min(near, len(data))))
    match chance.randrange(6):
        case 0:
            return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        case 1:
            return (
                data[:at]
                + bytes([data[at] ^ (1 << chance.randrange(8))]) * bool(data)
                + data[at + 1 :]
            )
        case 2:
            return data[:at]
        case 3:
            return data + bytes(chance.randrange(1, 9))
        case 4:
            piece = data[at : at + chance.randrange(1, 40)]
            return data[:at] + piece + data[at:]
        case _:
            return (
                data[:at]
                + chance.choice([b'"', b"{", b"[" * 9, b"}", b",", b"\x00", b"\\u"])
                + data[at:]
            )


# ---- changes of the config ----


def _set_key(adapter: Adapter, chance: random.Random) -> None:
    adapter.config[chance.choice(KEYS)] = chance.choice(VALUES)


def _drop_key(adapter: Adapter, chance: random.Random) -> None:
    adapter.config.pop(chance.choice(list(adapter.config) or [""]), None)


def _patterns(adapter: Adapter, chance: random.Random) -> None:
    """Set alpha_pattern; the adapter stays valid, since scales change and ranks do not."""
    keys = [
        "q_proj",
        "v_proj",
        "layers.0.mlp.up_proj",
        r"layers\.1\..*",
        "o_proj",
        "^model.layers.0",
    ]
    adapter.config["alpha_pattern"] = {
        k: chance.choice([1, 3, 16.5]) for k in chance.sample(keys, 2)
    }


def _rename_targets(adapter: Adapter, chance: random.Random) -> None:
    """Write target_modules differently; some of the ways name the same modules."""
    targets = adapter.config.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        return
    adapter.config["target_modules"] = chance.choice(
        [
            rf".*\.({'|'.join(targets)})",
            [*targets, "query"],
            [f"self_attn.{target}" for target in targets],
            list(reversed(targets)),
            {_module(name): 1 for name in adapter.tensors},
            [_module(name) for name in adapter.tensors],
        ]
    )


# ---- changes of tensors ----


def _a_tensor(adapter: Adapter, chance: random.Random) -> tuple[str, Tensor]:
    return chance.choice(list(adapter.tensors.items()))


def _module(name: str) -> str:
    return name.removeprefix("base_model.model.").partition(".lora")[0]


def _values(tensor: Tensor) -> np.ndarray:
    """The tensor's values, flat, since an earlier change may have made its shape wrong."""
    dtype, _, raw = tensor
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype])


def _set_values(adapter: Adapter, chance: random.Random) -> None:
    name, (dtype, shape, raw) = _a_tensor(adapter, chance)
    values = _values((dtype, shape, raw)).astype(np.float64)
    where = chance.randrange(len(values)) if len(values) and chance.random() < 0.7 else slice(None)
    values[where] = chance.choice(NUMBERS)
    with np.errstate(over="ignore"):
        adapter.tensors[name] = (dtype, shape, make_tensor(values, dtype)[2])


def _set_dtype(adapter: Adapter, chance: random.Random) -> None:
    """Change one tensor's dtype; valid except for F64, since A and B may differ in dtype."""
    name, tensor = _a_tensor(adapter, chance)
    dtype = chance.choice(["F16", "F32", "BF16", "F64"])
    with np.errstate(over="ignore"):
        raw = make_tensor(_values(tensor).astype(np.float64), dtype)[2]
    adapter.tensors[name] = (dtype, tensor[1], raw)


def _set_rank(adapter: Adapter, chance: random.Random) -> None:
    """Change the rank of one module; valid where the config is changed with it."""
    name, tensor = _a_tensor(adapter, chance)
    module = _module(name)
    a, b = lora_names(module)
    widths = WIDTHS.get(".".join(module.split(".")[3:]))
    if widths is None:
        return
    rank = chance.choice([0, 1, 3, 16, 17])
    adapter.tensors[a] = make_tensor(np.ones((rank, widths[0])), "F32")
    adapter.tensors[b] = make_tensor(np.full((widths[1], rank), math.pi), "F32")
    if chance.random() < 0.8:
        adapter.config["rank_pattern"] = {chance.choice([module, module.partition(".")[2]]): rank}


def _rename_tensor(adapter: Adapter, chance: random.Random) -> None:
    name, tensor = _a_tensor(adapter, chance)
    other = chance.choice(
        [
            name.replace("lora_A", "lora_B"),
            name.replace("layers.0", "layers.2"),
            name.replace("layers.0", "layers.1"),
            name.replace("weight", "bias"),
            name.replace("q_proj", "k_proj"),
            name.replace(".lora_A", ".default.lora_A"),
            "base_model.model.lm_head.lora_A.weight",
            name + "\n",
            name.upper(),
            "\ud800",
        ]
    )
    if chance.random() < 0.5:
        del adapter.tensors[name]
    adapter.tensors[other] = tensor


def _drop_tensor(adapter: Adapter, chance: random.Random) -> None:
    del adapter.tensors[_a_tensor(adapter, chance)[0]]


def _shuffle_tensors(adapter: Adapter, chance: random.Random) -> None:
    """Reorder the tensors' bytes; the adapter stays valid."""
    items = list(adapter.tensors.items())
    chance.shuffle(items)
    adapter.tensors = dict(items)


def _reshape(adapter: Adapter, chance: random.Random) -> None:
    name, (dtype, shape, raw) = _a_tensor(adapter, chance)
    shapes = [shape[::-1], (math.prod(shape),), (1, *shape), (*shape, 1), (*shape, 0), ()]
    adapter.tensors[name] = (dtype, chance.choice(shapes), raw)


# ---- changes of the header ----


def _metadata(adapter: Adapter, chance: random.Random) -> None:
    """Set the header's metadata; valid except for the last choice."""
    choices: list[Any] = [{"format": "pt"}, {"é": "\x00"}, {"a": "b" * 9000}, {"a": "b" * 70_000}]
    adapter.metadata = chance.choice(choices)


def _edit_header(adapter: Adapter, chance: random.Random) -> None:
    seed = chance.getrandbits(32)
    adapter.edits.append(lambda header: _edit(header, random.Random(seed)))


def _edit(header: dict[str, Any], chance: random.Random) -> None:
    name = chance.choice(list(header))
    entry = header[name]
    if not isinstance(entry, dict) or "data_offsets" not in entry or chance.random() < 0.1:
        header[name] = chance.choice(VALUES)
        return
    match chance.randrange(5):
        case 0:
            entry[chance.choice(list(entry))] = chance.choice(VALUES)
        case 1:
            del entry[chance.choice(list(entry))]
        case 2:
            entry["dtype"] = chance.choice(["F8_E4M3", "I32", "C64", "F32", "BF16", "f32", "F4"])
        case 3:
            _edit_list(entry["data_offsets"], [-1, 1, 4, 2**40, 2**63, 0.5, None, 64, 256], chance)
        case _:
            _edit_list(entry.get("shape"), [0, -1, 1, 2**31, 2**62, True, None, 1.0, 64], chance)


def _edit_list(numbers: Any, others: list[Any], chance: random.Random) -> None:
    if isinstance(numbers, list) and numbers:
        numbers[chance.randrange(len(numbers))] = chance.choice(others)


_CHANGES = [
    _set_key, _set_key, _drop_key, _patterns, _rename_targets, _set_values, _set_values, _set_dtype,
    _set_rank, _rename_tensor, _drop_tensor, _shuffle_tensors, _reshape, _metadata, _edit_header,
    _edit_header,
]  # fmt: skip
