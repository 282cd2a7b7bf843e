"""Adapter folders as trainers write them, and what becomes of each one that is pushed.

PEFT makes every folder; changes then give it the form of another trainer. RUN are the trainers that
were run to learn that form, the others' forms are taken from their code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import config as options

from tests.corpus import layouts
from tests.corpus.folders import Change, add, config, emptied, names, once_more, only, pair
from tests.corpus.layouts import Layout, beside, checkpointed, within
from tests.corpus.world import INVOCATION
from tests.tiny_models import ALL_TARGETS, GEMMA3, PHI3, QWEN3_MOE

BASES: dict[str, dict[str, Any]] = {
    "llama": {"tied": False},
    "qwen2": {"family": "qwen2"},
    "gemma3": {"family": "gemma3_text", **GEMMA3},
    "phi3": {"family": "phi3", **PHI3},
    "qwen3_moe": {"family": "qwen3_moe", **QWEN3_MOE},
}
"""Options of tests.tiny_models.save_model, by the family of the base model."""

RUN = {
    "PEFT": "PEFT 0.21.2",
    "transformers": "transformers 5.23",
    "TRL": "TRL 1.16",
    "LLaMA-Factory": "LLaMA-Factory 0.9.5",
    "ms-swift": "ms-swift 4.6",
    "torchtune": "torchtune 0.6.1",
}
"""Trainers that were run, with two steps on a tiny model; of torchtune, its checkpointer."""


@dataclass(frozen=True)
class Served:
    """The adapter is served and gives PEFT's tokens.   told: a part of each warning."""

    told: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """The push is refused.   advice: the end of the message."""

    code: str
    advice: str


@dataclass(frozen=True)
class Case:
    """One folder.

    trainer, what: for the page, what wrote the folder and what is special in it.
    num_added: tokens by which the vocabulary was enlarged before training.
    options: of PEFT's LoraConfig.   train: changes more of PEFT's model than LoRA's weights.
    saved: arguments of save_pretrained.
    is_converted: whether PEFT, when it saves it, makes a plain LoRA of an adapter that began with a
    part of the base weights.
    changes: made to PEFT's files; what PEFT wrote before them is the oracle.
    layout: of the folder that is pushed.
    was_run: whether the form is known from a run and not from code alone.
    """

    trainer: str
    what: str
    outcome: Served | Refused = Served()
    base: str = "llama"
    num_added: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    train: Callable[[torch.nn.Module], None] | None = None
    saved: dict[str, Any] = field(default_factory=dict)
    is_converted: bool = False
    changes: tuple[Change, ...] = ()
    layout: Layout | None = None
    was_run: bool = False

    def __str__(self) -> str:
        return f"{self.trainer}: {self.what}"

    @property
    def known_from(self) -> str:
        """How the form of the folder is known."""
        # PEFT itself writes what no change follows.
        was_run = self.was_run or (self.trainer == "PEFT" and not self.changes)
        return f"a run of {RUN[self.trainer]}" if was_run else "its code"


# ---- what is trained beside LoRA ----


@torch.no_grad()
def _shift_rows(model: torch.nn.Module, rows: list[int] | slice = slice(None)) -> None:
    """Change rows of the modules in modules_to_save."""
    chance = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            shift = torch.randn(parameter.shape, generator=chance) / parameter.shape[-1] ** 0.5
            parameter[rows] += 2 * shift[rows]


# ---- configs ----

_OF_0_2 = (
    "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "lora_alpha",
    "lora_dropout", "modules_to_save", "peft_type", "r", "target_modules", "task_type",
)  # fmt: skip
_OF_0_3 = (*_OF_0_2, "init_lora_weights")
_OF_0_4 = (*_OF_0_3, "auto_mapping", "layers_pattern", "layers_to_transform", "revision")
_OF_0_10 = (
    *_OF_0_4, "alpha_pattern", "rank_pattern", "loftq_config", "megatron_config", "megatron_core",
    "use_rslora", "use_dora", "layer_replication",
)  # fmt: skip
_OF_AUTOMODEL = (
    "base_model_name_or_path", "bias", "lora_alpha", "peft_type", "r", "target_modules",
    "task_type", "use_dora",
)  # fmt: skip


def _class(name: str, **more: Any) -> Change:
    return config(auto_mapping={"base_model_class": name, "parent_library": "transformers", **more})


_unsloth = partial(_class, unsloth_fixed=True)
_EACH = "|".join(ALL_TARGETS)
_PARTS = "self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense"
_OF_LAYERS = rf"\bmodel\.layers\.[\d]{{1,}}(?!.*\.experts\.\d)\..*?(?:{_PARTS}|mixer).*?"
_UNSLOTH = (
    rf"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:{_PARTS}|mixer).*?\.(?:{_EACH}))|"
    rf"(?:{_OF_LAYERS}\.(?:(?:{_EACH})))"
)
_UNSLOTH_TEXT = (
    rf"(?:.*?(?:language|text).*?(?:{_PARTS}|mixer).*?\.(?:q_proj|v_proj))|"
    rf"(?:{_OF_LAYERS}\.(?:(?:q_proj|v_proj)))"
)
_UNSLOTH_2025 = (
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp|"
    rf"feed_forward|ffn|dense).*?(?:{_EACH}).*?)|(?:\bmodel\.layers\.[\d]{{1,}}\."
    rf"(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:{_EACH})))"
)
_SWIFT = rf"^(model\.language_model(?=\.).*\.({_EACH}))$"
_AXOLOTL = (
    r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
)
_PATTERNS = {
    "rank_pattern": {"layers.0.self_attn.q_proj": 3, r".*\.o_proj": 12, "o_proj": 2},
    "alpha_pattern": {r"layers\.1\..*": 9, "^model.layers.0.self_attn.q_proj": 5},
}
_LANGUAGE_MODEL = names(r"(?<=base_model\.model\.)model\.(?=layers)", "model.language_model.")
_OLD_LANGUAGE_MODEL = names(r"(?<=base_model\.model\.)model\.", "language_model.model.")
_NO_TOWER = "train the language model's layers alone, or remove the tower's tensors."
_A_COPY = "which was not trained; left out"
_QUANTISED = "the weights were quantised in training"
_A_TOWER = "of a tower for images or sound, which change nothing"
_NOT_COMPARED = "the tensors say which modules change"
_CONVERT = "make a plain LoRA of it with `chorale adapters convert`."
_ROWS = list(range(30, 36))

CASES = (
    # ---- PEFT ----
    Case("PEFT", "a plain LoRA"),
    Case("PEFT", "LoRA without a task (`task_type` null)", options={"task_type": None}),
    Case("PEFT", "`use_rslora`", options={"use_rslora": True, "r": 6}),
    Case("PEFT", "`rank_pattern` and `alpha_pattern`", options=_PATTERNS),
    Case(
        "PEFT", "`layers_to_transform` and `layers_pattern`",
        options={"layers_to_transform": [1], "layers_pattern": "layers"},
    ),
    Case(
        "PEFT", "`target_modules` as `all-linear`, with `exclude_modules`",
        options={"target_modules": "all-linear", "exclude_modules": ["q_proj", "k_proj"]},
    ),
    Case(
        "PEFT", "`target_modules` as an expression",
        options={"target_modules": r".*\.(?:0|1)\.mlp\.(?:up|down)_proj"},
    ),
    Case(
        "PEFT", "`target_modules` with lookahead, and `rank_pattern`",
        Served((_NOT_COMPARED,)),
        options={
            "target_modules": r"(?!.*\.0\.).*_proj", "rank_pattern": {"q_proj": 2, "mlp.*": 6}
        },
    ),
    Case(
        "PEFT", "an adapter that is not called `default`: in a folder of its name",
        layout=within("support"),
    ),
    Case("PEFT", "`save_embedding_layers`", Served((_A_COPY, _A_COPY)),
         saved={"save_embedding_layers": True}),
    Case(
        "PEFT", "`modules_to_save` that training did not change",
        Served((_A_COPY, _A_COPY)), options={"modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    Case(
        "PEFT", "`modules_to_save` of the head, of which training changed some rows",
        options={"modules_to_save": ["lm_head"]}, train=partial(_shift_rows, rows=_ROWS),
    ),
    Case(
        "PEFT", "`modules_to_save` of embedding and head, of which training changed all rows",
        Refused("unsupported_feature", _CONVERT),
        options={"modules_to_save": ["embed_tokens", "lm_head"]}, train=_shift_rows,
    ),
    Case(
        "PEFT", "`trainable_token_indices`",
        options={"trainable_token_indices": {"embed_tokens": _ROWS}},
    ),
    Case(
        "PEFT", "`trainable_token_indices` of a model whose head is its embedding", base="qwen2",
        options={"trainable_token_indices": _ROWS},
    ),
    Case("PEFT", "LoRA on `embed_tokens` and `lm_head`", Served((_A_COPY, _A_COPY)),
         options={"target_modules": [*ALL_TARGETS, "embed_tokens", "lm_head"]}),
    Case("PEFT", "an activated LoRA (`alora_invocation_tokens`)",
         options={"alora_invocation_tokens": INVOCATION}),
    Case("PEFT", "initialized with EVA's options (`eva_config`)",
         options={"eva_config": options.EvaConfig(rho=2.0)}),
    Case(
        "PEFT", "options of initialization and loading that change nothing",
        changes=(
            config(
                corda_config={"corda_method": "ipm", "cache_file": None, "covariance_file": None},
                fan_in_fan_out=True,
                qalora_group_size=32,
                runtime_config={"ephemeral_gpu_offload": False},
            ),
        ),
    ),
    Case("PEFT", "DoRA", Refused("unsupported_feature", _CONVERT), options={"use_dora": True}),
    Case("PEFT", "PiSSA, not converted", Refused("unsupported_feature", _CONVERT),
         options={"init_lora_weights": "pissa"}),
    Case("PEFT", "`lora_bias`", Refused("unsupported_feature", "train with lora_bias=False."),
         options={"lora_bias": True}),
    Case(
        "PEFT", "layers twice (`layer_replication`)",
        Refused("unsupported_feature", "train a plain LoRA without it."),
        options={"layer_replication": [[0, 2], [1, 2]]},
    ),
    Case(
        "PEFT", "`use_bdlora` with four blocks",
        Refused("unsupported_feature", "train a plain LoRA without it."),
        changes=(config(use_bdlora={"nblocks": 4, "target_modules_bd_a": ["q_proj"]}),),
    ),
    Case(
        "PEFT", "`arrow_config`",
        Refused("unsupported_feature", "train a plain LoRA without it."),
        changes=(config(arrow_config={"top_k": 3, "router_temperature": 1.0}),),
    ),
    Case(
        "PEFT", "another method (IA3)", Refused("unsupported_feature", _CONVERT),
        changes=(config(peft_type="IA3"),),
    ),
    Case(
        "PEFT", "LoRA of a classifier (`SEQ_CLS`) with its `score` head", was_run=True,
        outcome=Refused("unsupported_feature", "remove it if the layers alone are meant."),
        changes=(
            config(task_type="SEQ_CLS", modules_to_save=["classifier", "score"]),
            add(base_model__model__score__weight=torch.ones(2, 64)),
        ),
    ),
    Case("PEFT", "`task_type` `SEQ_CLS` without a head", Served(("served here is its text alone",)),
         changes=(config(task_type="SEQ_CLS"),)),
    Case(
        "PEFT", "`AutoModel` (`FEATURE_EXTRACTION`): names without the first `model.`",
        was_run=True,
        changes=(
            config(task_type="FEATURE_EXTRACTION"),
            names(r"(?<=base_model\.model\.)model\.", ""),
        ),
    ),
    Case(
        "PEFT", "LoRA on a family whose q, k and v are one module (Phi 3)", base="phi3",
        options={"target_modules": "all-linear"},
    ),
    Case("PEFT", "LoRA on the attention of a mixture of experts", base="qwen3_moe",
         options={"target_modules": ALL_TARGETS[:4]}),
    Case(
        "PEFT", "LoRA on experts (`target_parameters`)",
        Refused("unsupported_feature", "train a plain LoRA without it."), base="qwen3_moe",
        options={
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    Case(
        "PEFT", "LoRA on experts one by one (`mlp.experts.3.gate_proj`)",
        Refused("unsupported_feature", "with target_modules q_proj, k_proj, v_proj and o_proj."),
        base="qwen3_moe", options={"target_modules": ALL_TARGETS[:4]},
        changes=(
            pair("base_model.model.model.layers.1.mlp.experts.3.gate_proj", 64, 48, trained=True),
        ),
    ),
    Case("PEFT 0.2", "with `merge_weights` and `enable_lora`",
         changes=(only(*_OF_0_2), config(merge_weights=False, enable_lora=None))),
    Case("PEFT 0.3", "weights in `adapter_model.bin`", changes=(only(*_OF_0_3),),
         layout=layouts.pickled),
    Case("PEFT 0.4", "its config", changes=(only(*_OF_0_4),)),
    Case("PEFT 0.10", "its config, bfloat16",
         changes=(only(*_OF_0_10), lambda folder: folder.tensors.update(
             {name: tensor.bfloat16() for name, tensor in folder.tensors.items()}))),
    # ---- transformers ----
    Case(
        "transformers", "`model.add_adapter` and `model.save_pretrained`", was_run=True,
        changes=(config(task_type=None, inference_mode=False),),
        layout=beside("generation_config.json"),
    ),
    Case(
        "transformers", "the same of an `AutoModel`", was_run=True,
        changes=(config(task_type=None), names(r"(?<=base_model\.model\.)model\.", "")),
    ),
    Case(
        "transformers", "an `AutoModel`, which has no head, with `lm_head` in its targets",
        changes=(
            config(task_type=None, target_modules=[*ALL_TARGETS, "lm_head"]),
            names(r"(?<=base_model\.model\.)model\.", ""),
        ),
    ),
    # ---- TRL ----
    Case(
        "TRL", "the folder of `SFTTrainer`, with its checkpoints and tokenizer", was_run=True,
        options={"target_modules": "all-linear"}, layout=checkpointed,
    ),
    Case(
        "TRL", "one checkpoint of it", was_run=True,
        layout=beside("optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json",
                      "training_args.bin"),
    ),
    # ---- Unsloth ----
    Case(
        "Unsloth", "`FastLanguageModel`, on a 4-bit base", Served((_QUANTISED,)),
        changes=(
            _unsloth("LlamaForCausalLM"),
            config(base_model_name_or_path="unsloth/llama-3.2-1b-instruct-unsloth-bnb-4bit"),
        ),
    ),
    Case(
        "Unsloth", "`FastModel`: `target_modules` as the expression that it makes",
        Served((_NOT_COMPARED,)), options={"target_modules": _UNSLOTH},
        changes=(_unsloth("LlamaForCausalLM"),),
    ),
    Case(
        "Unsloth", "`FastModel` with chosen modules", Served((_NOT_COMPARED,)), base="qwen2",
        options={"target_modules": _UNSLOTH_TEXT}, changes=(_unsloth("Qwen2ForCausalLM"),),
    ),
    Case(
        "Unsloth", "the expression that it made in 2025",
        options={"target_modules": _UNSLOTH_2025}, changes=(_unsloth("LlamaForCausalLM"),),
    ),
    Case(
        "Unsloth", "`modules_to_save` of embedding and head after continued pretraining",
        Refused("unsupported_feature", _CONVERT),
        options={"modules_to_save": ["embed_tokens", "lm_head"]}, train=_shift_rows,
        changes=(_unsloth("LlamaForCausalLM"),),
    ),
    Case(
        "Unsloth", "Gemma 3, text layers of a model that takes images", Served((_NOT_COMPARED,)),
        base="gemma3", options={"target_modules": _UNSLOTH},
        changes=(
            _LANGUAGE_MODEL, _unsloth("Gemma3ForConditionalGeneration"), config(task_type=None)
        ),
    ),
    Case(
        "Unsloth", "Gemma 3, names of transformers before 4.52", base="gemma3",
        changes=(
            _OLD_LANGUAGE_MODEL,
            _unsloth("Gemma3ForConditionalGeneration"),
            config(task_type=None, target_modules=_UNSLOTH_2025),
        ),
    ),
    Case(
        "Unsloth", "Gemma 3, tensors of the vision tower that training left zero",
        Served((_A_TOWER,)), base="gemma3",
        changes=(
            _LANGUAGE_MODEL,
            pair("base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj", 32, 32,
                 trained=False),
            _unsloth("Gemma3ForConditionalGeneration"),
        ),
    ),
    Case(
        "Unsloth", "Gemma 3, a trained vision tower", Refused("unsupported_feature", _NO_TOWER),
        base="gemma3",
        changes=(
            _LANGUAGE_MODEL,
            pair("base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj", 32, 32,
                 trained=True),
            _unsloth("Gemma3ForConditionalGeneration"),
        ),
    ),
    Case(
        "Unsloth", "Qwen2.5-VL, the whole of it", Refused("unsupported_feature", _NO_TOWER),
        base="qwen2",
        changes=(
            _LANGUAGE_MODEL,
            pair("base_model.model.model.visual.blocks.0.attn.qkv", 32, 96, trained=True),
            _unsloth("Qwen2_5_VLForConditionalGeneration"),
        ),
    ),
    # ---- LLaMA-Factory ----
    Case(
        "LLaMA-Factory", "`lora_target: all`", was_run=True,
        layout=beside("all_results.json", "chat_template.jinja", "trainer_log.jsonl"),
    ),
    Case(
        "LLaMA-Factory", "`additional_target: lm_head`, of which training changed some rows",
        was_run=True, options={"modules_to_save": ["lm_head"]},
        train=partial(_shift_rows, rows=_ROWS),
    ),
    Case(
        "LLaMA-Factory", "`resize_vocab`: embedding and head with rows of added tokens",
        was_run=True, num_added=28, options={"modules_to_save": ["embed_tokens", "lm_head"]},
        train=partial(_shift_rows, rows=[*_ROWS, *range(292, 320)]),
    ),
    Case(
        "LLaMA-Factory", "`pissa_init` with `pissa_convert`: the folder `pissa_converted`",
        was_run=True, options={"init_lora_weights": "pissa"}, is_converted=True,
    ),
    # ---- ms-swift ----
    Case(
        "ms-swift", "`target_modules all-linear`", was_run=True, base="qwen2",
        changes=(config(modules_to_save=[], lora_alpha=8.0),),
        layout=beside("additional_config.json", "args.json", "optimizer.pt", "trainer_state.json"),
    ),
    Case(
        "ms-swift", "Qwen2.5-VL, its expression with lookahead", Served((_NOT_COMPARED,)),
        base="qwen2",
        changes=(
            _LANGUAGE_MODEL,
            config(target_modules=_SWIFT),
            _class("Qwen2_5_VLForConditionalGeneration"),
        ),
    ),
    Case(
        "ms-swift", "`SwiftModel`: the adapter in the folder `default`",
        layout=within("default", "configuration.json"),
    ),
    # ---- Axolotl ----
    Case("Axolotl", "`lora_target_linear: true`", layout=checkpointed),
    Case(
        "Axolotl", "Gemma 3, the expression of its example", base="gemma3",
        changes=(
            _LANGUAGE_MODEL,
            config(target_modules=_AXOLOTL, task_type=None),
            _class("Gemma3ForConditionalGeneration"),
        ),
    ),
    Case("Axolotl", "`torch_compile`: names with `_orig_mod.`",
         changes=(names(r"^base_model\.model\.", "_orig_mod.base_model.model."),)),
    Case("Axolotl", "FSDP: names with `_fsdp_wrapped_module.`",
         changes=(names(r"(layers\.\d+)\.", r"\1._fsdp_wrapped_module."),)),
    Case(
        "Axolotl", "FSDP with gradient checkpointing: names with `_checkpoint_wrapped_module.`",
        changes=(names(r"(layers\.\d+)\.", r"\1._checkpoint_wrapped_module."),),
    ),
    Case("Axolotl", "DeepSpeed ZeRO-3 without a gather: tensors without values",
         Refused("empty_tensor", "zero_to_fp32.py), and push again."), changes=(emptied,)),
    # ---- others ----
    Case(
        "torchtune", "the folder of an epoch", was_run=True,
        changes=(only("lora_alpha", "peft_type", "r", "target_modules"),),
        layout=beside("adapter_model.pt", "config.json", "tokenizer.json"),
    ),
    Case(
        "torchtune", "DoRA: magnitudes that its config does not mention",
        Refused("unsupported_feature", "train without DoRA."), was_run=True,
        changes=(
            only("lora_alpha", "peft_type", "r", "target_modules"),
            add(**{
                "base_model__model__model__layers__0__self_attn__q_proj__lora_magnitude_vector":
                torch.ones(64)
            }),
        ),
    ),
    Case("MLX (mlx-lm)", "`adapters.safetensors`, on a 4-bit base", Served((_QUANTISED,)),
         layout=layouts.of_mlx),
    Case(
        "NeMo (Megatron-Bridge)", "`save_hf_adapter`",
        changes=(
            config(target_modules=sorted(ALL_TARGETS), exclude_modules=[], canonical_mapping={},
                   params_to_save=["decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight"],
                   normalize_moe_lora=False),
        ),
    ),
    Case("NeMo (Automodel)", "the `model` folder of a checkpoint",
         options={"target_modules": "all-linear"}, changes=(only(*_OF_AUTOMODEL),),
         layout=within("model", "config.yaml", "optim/__0_0.distcp", "rng/rng_dp_rank_0.pt")),
    Case("any", "a state dict: names with `.lora_A.default.weight`",
         changes=(names(r"\.weight$", ".default.weight"),)),
    Case("any", "DDP: names with `module.`",
         changes=(names(r"^base_model\.model\.", "base_model.model.module."),)),
    Case("any", "names without `base_model.model.`", changes=(names(r"^base_model\.model\.", ""),)),
    Case("any", "shards with an index", layout=layouts.sharded),
    Case("any", "trained on a GPTQ or an AWQ base", Served((_QUANTISED,)),
         changes=(config(base_model_name_or_path="TheBloke/Llama-2-7B-GPTQ"),)),
    Case("any", "two tensors for one module",
         Refused("duplicate_tensor", "keep the one that was trained last."), changes=(once_more,)),
)  # fmt: skip
"""Every folder."""
