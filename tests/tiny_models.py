"""Random tiny models, tokenizers and PEFT adapters on disk, as Hugging Face writes them."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from lora.disk_cache import packed_path
from lora.host import PackedAdapter, read_packed
from lora.packed import PackedForm
from lora.packing import pack
from lora.shard import WHOLE, Shard
from registry.base.base_model import BaseModel
from registry.checks.validate import AdapterLimits, check_adapter
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import (
    WEIGHTS_FILE,
    CanonicalAdapter,
    ModuleScale,
    TensorInfo,
    canonical_header,
    lora_names,
    write_canonical,
)

ALL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EMBEDDING_STD = {"gemma3": 0.05, "gemma3_text": 0.05, "granite": 0.1}
"""Sizes of embeddings in families that multiply them. Larger ones would have a model repeat the
last token, whatever context and adapter are; so would tied ones if what a layer adds is normalized.
"""
GEMMA2 = {
    "tied": False,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
    "sliding_window": 24,
}
GEMMA3: dict[str, Any] = {
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": None,
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "rope": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
PHI3: dict[str, Any] = {"rope": {**LONGROPE}, "original_max_position_embeddings": 256}
OLMO2 = {"tied": False, "attention_bias": True}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.7,
}
QWEN3_MOE: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
MIXTRAL = {"intermediate_size": 96, "num_local_experts": 5}
_CLIP = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2,
                "out_hidden_size": 64}  # fmt: skip
TOWERS = {
    "gemma3": {"vision_config": _CLIP, "mm_tokens_per_image": 4},
    "mistral3": {"vision_config": {**_CLIP, "head_dim": 16}},
    "qwen2_5_vl": {"vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]}},
    "qwen3_vl": {"vision_config": {
        **_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]
    }},
    "llava": {"vision_config": {**_CLIP, "projection_dim": 16}},
}  # fmt: skip
"""Settings of a family that also takes images, beside those of its text model."""
NEWER_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "visual.": "model.visual.",
    "model.": "model.language_model.",
}
"""Prefixes of tensors that transformers 4.52 to 4.57 wrote, by those of other releases."""
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TEXT_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral", "llava": "llama"}
"""Types of text models, of which those of a Qwen-VL follow from its own."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def save_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE with a few merges and a chat template; return its vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def save_model(
    folder: Path,
    *,
    family: str = "llama",
    tied: bool = True,
    rope: dict[str, Any] | None = None,
    old_spelling: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    seed: int = 1,
    **config: Any,
) -> Path:
    """Write a model of two layers with GQA, whose random weights give logits that vary much.

    family: a model_type of transformers.   config: further entries of its config.json, or of the
    text model's part of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    values = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": save_tokenizer(folder),
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    model = _new_model(family, values | config)
    for name, parameter in model.named_parameters():
        _randomize(name, parameter, _EMBEDDING_STD.get(family, 1.0))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if old_spelling:
        _respell(folder / "config.json")
    return folder


def _new_model(family: str, config: dict[str, Any]) -> PreTrainedModel:
    if family not in TOWERS:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    kind = {"model_type": _TEXT_TYPES[family]} if family in _TEXT_TYPES else {}
    whole = {"text_config": config | kind, "tie_word_embeddings": config["tie_word_embeddings"]}
    whole_config = AutoConfig.for_model(family, **whole, **TOWERS[family])
    return AutoModelForImageTextToText.from_config(whole_config)


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a model by the class that its config.json names, with its towers."""
    is_composite = "vision_config" in json.loads((folder / "config.json").read_text())
    loader = AutoModelForImageTextToText if is_composite else AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=dtype)


def rename_tensors(folder: Path, prefixes: dict[str, str]) -> None:
    """Replace the first prefix of a tensor's name that fits, as another release names tensors."""
    path = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        tensors[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    save_file(tensors, path, {"format": "pt"})


def _randomize(name: str, parameter: torch.nn.Parameter, embedding_std: float) -> None:
    """Randomize a parameter, ones and zeros included, so that a forgotten norm or bias shows."""
    if name.endswith("bias"):
        torch.nn.init.normal_(parameter, std=0.5)
    elif parameter.dim() == 1:
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    else:
        scale = embedding_std if "embed" in name else 2.0 / parameter.shape[-1] ** 0.5
        torch.nn.init.normal_(parameter, std=scale)


def _respell(path: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


def save_adapter(model_dir: Path, folder: Path, seed: int, **config: Any) -> Path:
    """Write a PEFT adapter with random A and B, large enough to change the model's output."""
    torch.manual_seed(seed)
    model = load_model(model_dir)
    options = {"r": 8, "lora_alpha": 16, "target_modules": _linear_modules(model)} | config
    peft_model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **options}))
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[1] ** 0.5)
    peft_model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    return folder


def _linear_modules(model: torch.nn.Module) -> list[str]:
    """Names of the model's projections, without the head; of attention beside experts."""
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    if hasattr(model.config, "num_experts_per_tok"):
        linear = [name for name in linear if ".self_attn." in name]
    return sorted({name.rpartition(".")[2] for name in linear} - {"lm_head"})


def canonical_bytes(adapter_dir: Path, base: BaseModel) -> bytes:
    """Return the canonical object that an upload of this folder becomes."""
    config, written = (adapter_dir / CONFIG_FILE).read_bytes(), io.BytesIO()
    with (adapter_dir / WEIGHTS_FILE).open("rb") as file:
        checked = check_adapter(config, file, base, AdapterLimits())
        write_canonical(written, file, checked.adapter)
    return written.getvalue()


def canonical_object(
    modules: Mapping[str, Sequence[torch.Tensor]], invocation_tokens: tuple[int, ...] | None = None
) -> bytes:
    """Return the canonical object of {module name: (A [rank, in], B [out, rank])}, scale 1."""
    tensors: dict[str, torch.Tensor] = {}
    for name, pair in modules.items():
        tensors |= dict(zip(lora_names(name), pair, strict=True))
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    infos = {n: TensorInfo(kinds[t.dtype], tuple(t.shape), 0, t.nbytes) for n, t in tensors.items()}
    scales = {name: ModuleScale(a.shape[0], 1.0) for name, (a, _) in modules.items()}
    data = [tensors[n].contiguous().view(torch.uint8).numpy().tobytes() for n in sorted(tensors)]
    adapter = CanonicalAdapter(scales, infos, invocation_tokens)
    return canonical_header(adapter) + b"".join(data)


def packed_adapter(
    data: bytes, form: PackedForm, folder: Path, shard: Shard = WHOLE
) -> PackedAdapter:
    """Pack a canonical object for an arena, and read it as the engine does."""
    digest = hashlib.sha256(data).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    source, target = folder / digest, packed_path(folder, digest, form.form_id)
    source.write_bytes(data)
    target.write_bytes(b"")
    pack(source, digest, form, lambda _: target)
    return read_packed(target, digest, form, shard=shard)
