"""The answers of transformers and PEFT: adapters merged into the weights, one prompt at a time."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from registry.formats.peft_config import CONFIG_FILE
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
