"""Predictions over HTTP: tokens for the engine, bounded, and counted against nothing."""

from typing import Any

import pytest

from engine.wire.messages import AddRequest, RequestOutput
from tests.server.fake_engines import MAX_MODEL_LEN
from tests.server.scripted_product import Product, answer_all, events

SENTENCE = "A fox eats a hen in the morning. "


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def drafting(message: AddRequest) -> list[RequestOutput]:
    """Outputs of which each says how many drafts there have been so far."""
    return [
        output._replace(num_accepted_tokens=2 * output.seq, num_rejected_tokens=5 * output.seq)
        for output in answer_all(message)
    ]


def test_a_prediction_comes_to_the_engine_as_tokens_without_special_ones(scripted: Product) -> None:
    answer = scripted.chat(max_tokens=100, **predicted([{"type": "text", "text": SENTENCE}] * 2))
    assert answer.status_code == 200
    (message,) = scripted.engines.asked
    encode = scripted.gateway.bases.default.tokenizer.encode
    expected = encode(2 * SENTENCE, add_special_tokens=False)
    assert list(message.predicted_token_ids) == expected
    assert (message.drafts, message.shares_drafts) == (True, False)
    assert len(expected) < 100


@pytest.mark.parametrize("asked", [{"max_tokens": 7}, {"max_completion_tokens": 7}])
def test_what_an_answer_cannot_have_is_dropped_of_its_prediction(scripted: Product, asked) -> None:
    asked = {"max_tokens": None, "speculation": "shared"} | asked | predicted(SENTENCE)
    assert scripted.chat(**asked).status_code == 200
    (message,) = scripted.engines.asked
    assert (message.drafts, message.shares_drafts) == (True, True)
    whole = scripted.gateway.bases.default.tokenizer.encode(SENTENCE, add_special_tokens=False)
    assert list(message.predicted_token_ids) == whole[:7]
    assert len(whole) > 7


def test_a_prediction_is_bounded_by_the_context_and_is_no_reason_to_refuse(
    scripted: Product,
) -> None:
    assert scripted.chat(max_tokens=None, **predicted(SENTENCE * 20_000)).status_code == 200
    (message,) = scripted.engines.asked
    room = MAX_MODEL_LEN - len(message.prompt_token_ids)
    encode = scripted.gateway.bases.default.tokenizer.encode
    ids = encode(SENTENCE * MAX_MODEL_LEN, add_special_tokens=False)
    assert list(message.predicted_token_ids) == ids[:room]


def test_a_prediction_costs_nothing_and_counts_against_no_limit(scripted: Product) -> None:
    bodies, holds, left = [], [], []
    for fields in ({}, predicted(SENTENCE)):
        answer = scripted.chat(max_tokens=40, **fields)
        bodies.append(answer.json()["usage"])
        holds.append(scripted.hold().amount_nanousd)
        left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
    assert bodies[0] == bodies[1]
    assert holds[0] == holds[1]
    # The first request has given back what it reserved and did not use.
    assert left[0] - left[1] == bodies[0]["total_tokens"]


def test_a_prediction_goes_with_what_openai_refuses_beside_it(scripted: Product) -> None:
    answer = scripted.chat(
        n=2, logprobs=True, top_logprobs=1, presence_penalty=1.0, frequency_penalty=1.0,
        tools=[{"type": "function", "function": {"name": "f"}}], **predicted(SENTENCE),
    )  # fmt: skip
    assert answer.status_code == 200
    assert scripted.engines.asked[0].predicted_token_ids


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_usage_says_how_many_drafts_were_accepted_and_how_many_were_in_vain(
    scripted: Product, kind
) -> None:
    ask = scripted.chat if kind == "chat" else scripted.text
    plain = ask().json()["usage"]
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert plain["completion_tokens_details"] == none
    scripted.engines.script = drafting
    usage = ask().json()["usage"]
    end = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 10}
    assert usage["completion_tokens_details"] == end
    # Tokens in vain are in no other count, and cost nothing.
    assert {**usage, "completion_tokens_details": none} == plain
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(ask(stream=True, stream_options=options))
    details = [chunk["usage"]["completion_tokens_details"] for chunk in chunks]
    rejected = [found["rejected_prediction_tokens"] for found in details]
    assert (rejected, details[-1]) == ([0, 5, 10, 10], end)
