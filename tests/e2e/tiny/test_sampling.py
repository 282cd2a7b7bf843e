"""Sampling through the whole stack, compared with transformers."""

from collections import Counter
from typing import Any

import pytest
import torch

from tests.e2e.oracle import TinyWorld
from tests.oracle import merged_model

PROMPT = [40, 41, 42, 43, 44, 41, 42]


def ask(world: TinyWorld, **changes: Any) -> dict[str, Any]:
    body = {
        "model": "alpha", "prompt": PROMPT, "max_tokens": 12, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = world.tenant.http.post("/v1/completions", json=body | changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


# The bias makes all other tokens impossible; without penalties one of these would be repeated.
BIAS = {token: 60.0 for token in range(70, 90)}


@torch.inference_mode()
def expected_ids(
    world: TinyWorld, repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0
) -> tuple[list[int], list[float]]:
    """Return greedy tokens computed one at a time by the formulas, and each token's logprob before
    penalties and bias.
    """
    model = merged_model(world.model_dir, world.dirs["alpha"])
    output: list[int] = []
    logprobs = []
    for _ in range(30):
        raw = model(torch.tensor([PROMPT + output])).logits[0, -1]
        logits = raw.clone()
        for token, value in BIAS.items():
            logits[token] += value
        for token in {*PROMPT, *output}:
            logits[token] *= 1 / repetition if logits[token] > 0 else repetition
        for token, count in Counter(output).items():
            logits[token] -= count * frequency + presence
        output.append(int(logits.argmax()))
        logprobs.append(raw.log_softmax(-1)[output[-1]].item())
    return output, logprobs


def test_penalties_and_bias_give_what_their_formulas_give(tiny: TinyWorld) -> None:
    bias = {str(token): value for token, value in BIAS.items()}
    answers = set()
    for penalties in (
        {},
        {"repetition": 1.1},
        {"frequency": 1.7},
        {"presence": 2.0},
        {"repetition": 0.95, "frequency": 2.0, "presence": -2.0},
    ):
        ids, logprobs = expected_ids(tiny, **penalties)
        named = {f"{name}_penalty": value for name, value in penalties.items()}
        choice = ask(tiny, logit_bias=bias, logprobs=1, max_tokens=30, **named)["choices"][0]
        assert choice["token_ids"] == ids
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-3)
        answers.add(tuple(ids))
    assert len(answers) == 5, "each penalty must be seen to matter"
