"""Sampling through the whole stack, compared with transformers."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from tests.e2e.conftest import TinyWorld
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


def test_n_answers_of_a_seed_differ_come_again_and_stream_the_same(tiny: TinyWorld) -> None:
    asked = {"n": 4, "temperature": 1.5, "seed": 11, "top_p": 0.95, "min_p": 0.001}
    whole = ask(tiny, **asked)
    said = [choice["token_ids"] for choice in whole["choices"]]
    assert len({tuple(ids) for ids in said}) == 4
    assert [choice["token_ids"] for choice in ask(tiny, **asked)["choices"]] == said
    assert whole["usage"]["completion_tokens"] == 48
    assert whole["usage"]["prompt_tokens"] == len(PROMPT)


def test_n_greedy_answers_are_one_answer_n_times(tiny: TinyWorld) -> None:
    choices = ask(tiny, n=3)["choices"]
    assert [choice["token_ids"] for choice in choices] == [choices[0]["token_ids"]] * 3


def test_n_answers_stop_each_on_its_own(tiny: TinyWorld) -> None:
    asked = {"n": 8, "temperature": 1.5, "seed": 5, "max_tokens": 40}
    stops = list(range(4, 12))
    choices = ask(tiny, **asked, stop_token_ids=stops)["choices"]
    free = ask(tiny, **asked)["choices"]
    for own, longer in zip(choices, free, strict=True):
        ends = [i for i, token in enumerate(longer["token_ids"]) if token in stops]
        length = ends[0] + 1 if ends else 40
        assert own["token_ids"] == longer["token_ids"][:length]
        assert own["finish_reason"] == ("stop" if ends else "length")


def test_all_logprobs_of_a_token_are_a_distribution_and_greedy_takes_its_head(
    tiny: TinyWorld,
) -> None:
    body = {
        "model": "base", "messages": [{"role": "user", "content": "hi"}], "temperature": 0,
        "max_tokens": 8, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    answer = tiny.tenant.http.post("/v1/chat/completions", json=body)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    for entry in content:
        top = entry["top_logprobs"]
        assert (entry["token"], entry["logprob"]) == (top[0]["token"], top[0]["logprob"])
        values = [likely["logprob"] for likely in top]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) < 1 + 1e-5


def test_a_token_id_beyond_the_vocabulary_is_refused_by_name(tiny: TinyWorld) -> None:
    body = {"model": "base", "prompt": PROMPT, "logit_bias": {"99999": 1}}
    refused = tiny.tenant.http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, 'logit_bias["99999"]')
