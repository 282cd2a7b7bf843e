"""The goals and their arithmetic: floors set by the bytes that are read, and verdicts."""

import math
from typing import Any

from bench.report import rounded

LORA_SHARE_OF_COPY = 0.8
LORA_SHARE_OF_BASE = 0.025
PREFILL_LORA_SHARE = 0.06
SHARE_OF_COPY = 0.8
SHARE_OF_MATMUL = 0.5
STEP_TO_FLOOR = 1.15
STEP_BATCH = 64
MANY_TOKENS = 32 * 1024
LONG_KEYS = 2000

GOALS = {
    "decode_attention": "decode attention over 32k tokens and more: 80 % of copy bandwidth",
    "prefill_attention": "prefill attention at 2,000 keys and more: 50 % of the matmul rate",
    "engine_step": "a decode step of 64 rows without adapters: at most 1.15 of its bytes' time",
    "engine_lora": "LoRA in a decode step adds at most bytes / 0.8 + 2.5 % of the step",
    "engine_prefill": "LoRA in a prefill step of 2,048 tokens adds at most 6 %",
}


def lora_limit_s(adapter_bytes: float, copied_per_s: float, base_s: float) -> float:
    """Time that adapters may add to a step of `base_s`, for their bytes and for some launches.

    copied_per_s: bytes that a copy reads and writes per second.
    """
    floor_s = adapter_bytes / copied_per_s
    return floor_s / LORA_SHARE_OF_COPY + LORA_SHARE_OF_BASE * base_s


def causal_flops(heads: int, head_dim: int, num_queries: int, context: int) -> int:
    """FLOPs of causal attention: two products for each query and each key that it sees."""
    keys_seen = num_queries * context + num_queries * (num_queries + 1) // 2
    return 4 * heads * head_dim * keys_seen


def at_most(value: float, limit: float) -> dict[str, Any] | None:
    """Return a goal's verdict; None if it cannot be judged, since a ceiling is not known."""
    return _verdict("at_most", value, limit, value <= limit)


def at_least(value: float, limit: float) -> dict[str, Any] | None:
    """Return a goal's verdict; None if it cannot be judged, since a ceiling is not known."""
    return _verdict("at_least", value, limit, value >= limit)


def _verdict(kind: str, value: float, limit: float, is_met: bool) -> dict[str, Any] | None:
    if not math.isfinite(value) or not math.isfinite(limit):
        return None
    return {"value": rounded(value), kind: rounded(limit), "met": is_met}
