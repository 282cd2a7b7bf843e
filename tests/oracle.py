"""The answers of transformers and PEFT: adapters merged into the weights, one prompt at a time."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from registry.peft_config import CONFIG_FILE
from tests.tiny_models import load_model


def merged_model(model_dir: Path, adapter_dir: Path | None) -> PreTrainedModel | PeftModel:
    """Load the base in float32 with the adapter merged into it.

    An activated LoRA is not merged, because it applies to a part of the tokens only. LoRA on the
    embedding or the head, and trained tokens, are not merged if the two share a weight, since PEFT
    would change both.
    """
    model = load_model(model_dir).eval()
    if adapter_dir is None:
        return model
    adapted = PeftModel.from_pretrained(model, adapter_dir).eval()
    config = json.loads((adapter_dir / CONFIG_FILE).read_text())
    changes_ends = config["trainable_token_indices"] is not None or any(
        name.endswith(("lm_head", "embed_tokens")) for name in adapted.targeted_module_names
    )
    is_tied = model.config.tie_word_embeddings and changes_ends
    is_activated = config["alora_invocation_tokens"]
    return adapted if is_activated or is_tied else adapted.merge_and_unload()


def rounding_model(model_dir: Path, adapter_dir: Path | None) -> PreTrainedModel | PeftModel:
    """Load the base in float32 with inputs of its projections rounded to int8, row by row, as they
    are before products with 4 or 8 bits. The adapter gets them as they are.
    """
    model = load_model(model_dir).eval()
    if adapter_dir is not None:
        model = PeftModel.from_pretrained(model, adapter_dir).eval()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.removesuffix(".base_layer")[-5:] == "_proj":
            module.register_forward_pre_hook(_round_inputs)
    return model


def _round_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    scale = inputs[0].abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return (inputs[0] / scale).round() * scale


@torch.inference_mode()
def greedy(
    model: PreTrainedModel | PeftModel, prompt: list[int], max_tokens: int, **options: object
) -> list[int]:
    """Return the next greedy tokens up to and with the end token. options: passed to `generate`."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **{"eos_token_id": 0, **options},
    )
    return out[0, len(prompt) :].tolist()
