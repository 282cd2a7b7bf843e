"""One request in the format of each server, with equal numbers of prompt and output tokens."""

import json
from typing import Any

from engine.messages import AddRequest, SamplingParams

PROMPT = "What does the gateway cost? Say it in as many words as you are asked for, please. "


def add_request(request_id: str, prompt_tokens: int, max_tokens: int) -> AddRequest:
    """Return the request as a message for the engine's socket."""
    return AddRequest(
        request_id=request_id,
        tenant_id="ten_bench",
        prompt_token_ids=tuple(100 + i % 100 for i in range(prompt_tokens)),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        token_lease=max_tokens,
        deadline_s=600.0,
        first_token_timeout_s=600.0,
    )


def chat_body(model: str, max_tokens: int, *, stream: bool) -> bytes:
    """Return the request's body for a gateway, ours or another."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    return json.dumps(body).encode()


def bare_body(prompt_tokens: int, max_tokens: int, *, stream: bool) -> bytes:
    """Return the request's body for `bench.gateway.bare`, which has no tokenizer."""
    asked = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "stream": stream}
    return json.dumps(asked).encode()
