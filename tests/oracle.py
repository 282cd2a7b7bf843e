"""What transformers and PEFT say: the adapter merged into the weights, one prompt at a time."""

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel


def merged_model(model_dir: Path, adapter_dir: Path | None) -> PreTrainedModel:
    """The base in float32, with the adapter merged into it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter_dir is not None:
        model = PeftModel.from_pretrained(model, adapter_dir).merge_and_unload()
    return model.eval()


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """The next tokens, chosen one by one, up to and with the end token."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
