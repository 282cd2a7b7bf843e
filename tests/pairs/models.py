"""The base models and adapters of the table, and transformers and PEFT as their oracle."""

import functools
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from server.cli.adapter_convert import convert
from tests.pairs.covering import Case
from tests.pairs.table import number_of
from tests.quantized_models import KINDS, save_quantized
from tests.tiny_models import ALL_TARGETS, QWEN3_MOE, rename_tensors, save_adapter, save_model

CHAT_TEMPLATE = Path(__file__).parents[1] / "server/text/chat_templates/qwen2.jinja"
LAYERS: dict[str, dict[str, Any]] = {
    "dense": {"family": "llama", "intermediate_size": 128},
    "experts": {"family": "qwen3_moe", **QWEN3_MOE, "moe_intermediate_size": 64,
                "intermediate_size": 128},
    "towers": {"family": "llama", "intermediate_size": 128},
}  # fmt: skip
HEADS: dict[str, dict[str, int]] = {
    "C": {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
    "no C": {"head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 4},
}
"""Both have projections of the same sizes, so that an adapter fits both."""
SETTINGS = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
BOUNDS = {"float32": 0.002, "fp8 tensor": 0.002, "fp8 block": 0.002, "bf16": 3.0}
ROUNDED_BOUND, CUT_BOUND = 0.7, 3.0
"""Nats by which logprobs may differ on average, by what a form loses: the sums of float32; 8 bits
of mantissa; rows that are rounded to 8 bits; on ranks each part of a row by itself, and before a
router, which then chooses other experts. An adapter moves the logprobs of these models by 10 to 40.
"""
INVOCATION = [40, 41, 42]
TRAINED_TOKENS = [60, 61, 62, 63]
OWN_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{{ mood }}:"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Base:
    """A base model.   folder: what is served.   twin: its numbers in float32.

    settings: those that it is served with.   bound: nats by which a logprob may differ.
    rows: steps from 0 to a row's largest value where rows of products are rounded; else None.
    """

    folder: Path
    twin: Path
    settings: dict[str, Any]
    bound: float
    rows: float | None = None


class Models:
    """Makes each base and each adapter once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.whole = functools.cache(self._whole)
        self.adapter = functools.cache(self._adapter)
        self._oracles: dict[tuple[Path, bool], PeftModel] = {}

    def _whole(self, layers: str, head: str, kernels: str, seed: int = 1) -> Path:
        """A model in float32."""
        folder = self._folder / f"{layers} {head} {kernels} {seed}".replace(" ", "-")
        save_model(
            folder, tied=head == "tied", max_position_embeddings=2048, seed=seed,
            **{**LAYERS[layers], **HEADS[kernels]},
        )  # fmt: skip
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
        return folder

    def base(self, world: Case) -> Base:
        """The base model of a world."""
        base = self._text_base(world)
        return replace(base, folder=put_beside_tower(base)) if world["layers"] == "towers" else base

    def _text_base(self, world: Case) -> Base:
        form = world["form"]
        # Base models with the same weights would be one.
        seed = 2 + number_of(world)
        whole = self.whole(world["layers"], world["head"], world["kernels"], seed)
        settings: dict[str, Any] = {"arena_bytes": 1 << 20, "max_model_len": 1024}
        settings |= SETTINGS.get(form, {})
        if world["place"] != "one engine":
            name = "engines" if world["place"] == "two engines" else "tensor_parallel_size"
            settings[name] = 2
        is_cut = world["place"] == "two ranks" or world["layers"] == "experts"
        bound = BOUNDS.get(form, CUT_BOUND if is_cut else ROUNDED_BOUND)
        rows = None
        if form not in ("float32", "bf16", "fp8 tensor", "fp8 block"):
            # Without kernels in C, products are those of float32.
            rows = 127.0 if world["kernels"] == "C" else None
        target = self._folder / "-".join(world.values()).replace(" ", "-")
        if form in ("int8", "int4"):
            return Base(whole, save_rounded(whole, target, form), settings, bound, rows)
        if form not in KINDS:
            return Base(whole, whole, settings, bound)
        save_quantized(whole, target, form)
        settings["unquantized_model"] = str(whole)
        twin = target / "twin"
        if form == "gptq act-order":  # it is rounded again
            twin = save_rounded(twin, target / "again", form)
        return Base(target / "quantized", twin, settings, bound, rows)

    def _adapter(self, layers: str, kind: str, seed: int) -> Path:
        """A PEFT folder.   kind: plain, alora, rows, templated, attention or converted."""
        model = self.whole(layers, "untied", "C")
        folder = self._folder / f"{layers}-{kind}-{seed}"
        if kind == "alora":
            return save_adapter(model, folder, seed, alora_invocation_tokens=INVOCATION)
        if kind == "rows":
            return save_adapter(model, folder, seed, trainable_token_indices=TRAINED_TOKENS)
        if kind == "converted":
            dora = save_adapter(
                model, self._folder / f"{layers}-dora-{seed}", seed, r=4, use_dora=True,
                target_modules=ATTENTION,
            )  # fmt: skip
            convert(dora, model, folder, rank=None, max_error=0.3, initial=None, json=False)
            return folder
        targets = ALL_TARGETS if layers != "experts" and kind == "plain" else ATTENTION
        save_adapter(model, folder, seed, target_modules=targets)
        if kind == "templated":
            (folder / "chat_template.jinja").write_text(OWN_TEMPLATE)
        return folder

    def score(self, base: Base, adapter: Path, tokens: list[int]) -> torch.Tensor:
        """Logprobs after each token by transformers and PEFT, [tokens, vocab]."""
        # PEFT loads no other adapter once one with trained tokens is there.
        key = base.twin, "-rows-" in adapter.name
        if key not in self._oracles:
            model = AutoModelForCausalLM.from_pretrained(base.twin, dtype=torch.float32).eval()
            if base.rows is not None:
                round_rows(model, base.rows)
            others = {k: it for k, it in self._oracles.items() if k[0] == base.twin}
            self._oracles = others | {
                key: get_peft_model(
                    model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
                )
            }
        oracle = self._oracles[key]
        if (name := str(adapter).replace("/", "_").replace(".", "_")) not in oracle.peft_config:
            oracle.load_adapter(str(adapter), name)
        oracle.set_adapter(name)
        with torch.inference_mode():
            logits = oracle(input_ids=torch.tensor([tokens])).logits[0]
        return logits.log_softmax(dim=-1)


def put_beside_tower(base: Base) -> Path:
    """Write the model as the text model of a checkpoint with a tower for images."""
    target = base.folder.with_name(f"{base.folder.name}-beside-tower-{base.twin.name}")
    shutil.copytree(base.folder, target, ignore=shutil.ignore_patterns("twin"))
    rename_tensors(target, {"model.": "model.language_model."})
    path = target / "model.safetensors"
    tower = {"model.vision_tower.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}
    save_file(load_file(path) | tower, path, {"format": "pt"})
    text = json.loads((target / "config.json").read_text())
    whole = {key: text.pop(key) for key in ("quantization_config", "dtype") if key in text}
    whole |= {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
        "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(whole))
    return target


def save_rounded(whole: Path, target: Path, form: str) -> Path:
    """Write the numbers that a form makes of a model: 8 bits by output, or 4 in groups of 32.

    A setting gives the head 8 bits; of a tied one the embedding keeps its own numbers.
    """
    shutil.copytree(whole, target)
    tensors = load_file(whole / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight"):
            tensors[name] = _rounded(tensor, *((4, 32) if form == "int4" else (8, None)))
    if form in ("int8", "int4"):
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        tensors["lm_head.weight"] = _rounded(head, 8, None)
        config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": False}
        (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def _rounded(weight: torch.Tensor, bits: int, size: int | None) -> torch.Tensor:
    groups = weight.reshape(len(weight), -1, size or weight.shape[1])
    step = groups.abs().amax(dim=2, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((groups / step).round() * step).reshape(weight.shape)


def round_rows(model: torch.nn.Module, num_steps: float) -> None:
    """Round what goes into projections, row by row, as before products with few bits.

    The adapters get it as it is. Inside of experts only the first products are reached.
    """

    def round_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        step = inputs[0].abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / num_steps
        return ((inputs[0] / step).round() * step, *inputs[1:])

    for name, module in model.named_modules():
        end = name.removesuffix(".base_layer").rpartition(".")[2]
        if (end.endswith("_proj") and isinstance(module, torch.nn.Linear)) or end == "experts":
            module.register_forward_pre_hook(round_inputs)
