"""What bounds a burst on a CPU: the model's matrix products, measured on the same machine.

Every token needs them, whoever serves it; attention, adapters, sampling, HTTP come on top. A row's
share of this bound is what is left to win by anything but better products (int8, fewer tokens).
"""

import json
import time
from pathlib import Path

import torch
from torch.nn.functional import linear

_PREFILL_TOKENS = 512  # more tokens at once are not faster
_REPEATS = 3


def product_seconds(
    model_dir: Path, num_prompt_tokens: int, num_steps: int, batch: int, threads: int
) -> float:
    """Processor seconds of all linear layers: the prompts in full chunks, then decode steps."""
    torch.set_num_threads(threads)
    config = json.loads((model_dir / "config.json").read_text())
    layers, lm_head = _weights(config)
    prefill_s = _fastest(layers, _PREFILL_TOKENS)
    step_s = _fastest(layers, batch) + _fastest([lm_head], batch)
    return num_prompt_tokens / _PREFILL_TOKENS * prefill_s + num_steps * step_s


def _weights(config: dict[str, int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every layer has its own, so that they come from memory as they do in a model."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    features = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
    features += [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]
    layers = [
        torch.randn(width_out, width_in)
        for _ in range(config["num_hidden_layers"])
        for width_in, width_out in features
    ]
    return layers, torch.randn(config["vocab_size"], hidden)


@torch.inference_mode()
def _fastest(weights: list[torch.Tensor], num_tokens: int) -> float:
    """Seconds for a pass over all weights."""
    inputs = {w.shape[1]: torch.randn(num_tokens, w.shape[1]) for w in weights}
    seconds = []
    for _ in range(_REPEATS):
        start = time.process_time()
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)
        seconds.append(time.process_time() - start)
    return min(seconds)
