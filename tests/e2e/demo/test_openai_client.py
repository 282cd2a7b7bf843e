"""OpenAI's own Python client works unchanged: chat, streams, shapes, and its own errors."""

from typing import Any

import openai
import pytest

from tests.e2e.stack import Stack, Tenant

QUESTION = [{"role": "user", "content": "Tell me about the owl."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "active": {"enum": ["by day", "by night"]},
        "eats": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "legs", "active", "eats"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
BOMB = {"grammar": 'start: s\ns: s s | "a" | "b"'}


def test_every_model_gives_its_own_answer(client: openai.OpenAI, tenant: Tenant) -> None:
    assert {model.id for model in client.models.list()} == {"base", *tenant.adapters}
    assert client.models.retrieve("json").owned_by == tenant.name
    answers = {
        model: client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
        for model in ("base", *tenant.adapters)
    }
    texts = {model: answer.choices[0].message.content for model, answer in answers.items()}
    assert len(set(texts.values())) == len(texts)
    assert "owl" in texts["base"]
    assert texts["json"].startswith("{")
    assert texts["shout"].isupper()
    for answer in answers.values():
        assert answer.choices[0].finish_reason == "stop"
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 3, "response_format": FORMAT, "logprobs": True},
        {"temperature": 0.8, "seed": 3, "tools": [TOOL], "tool_choice": "required",
         "parallel_tool_calls": False},
    ],
    ids=["text", "shape", "tools"],
)  # fmt: skip
def test_a_stream_in_pieces_is_the_whole_answer(client: openai.OpenAI, asked: dict) -> None:
    request: dict[str, Any] = {"model": "json", "messages": QUESTION, **asked}
    whole = client.chat.completions.create(**request)
    usage = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**request, stream=True, stream_options=usage)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    assert [chunk.usage for chunk in chunks if chunk.usage] == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    if "logprobs" in asked:
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    said = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == (said.content or "")
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert len(parts or deltas) > 2
    for call in said.tool_calls or ():
        assert [part.id is not None for part in parts] == [True] + [False] * (len(parts) - 1)
        assert {part.index for part in parts} == {0}
        assert parts[0].function.name == call.function.name
        assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_errors_are_the_clients_own_classes_and_name_the_parameter(
    client: openai.OpenAI, demo_stack: Stack
) -> None:
    for asked, param in (({"n": 17}, "n"), ({"max_tokens": 100_000}, "messages")):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="base", messages=QUESTION, **asked)
        assert error.value.param == param
        assert set(error.value.body) == {"message", "type", "param", "code"}
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=QUESTION)
    with (
        openai.OpenAI(base_url=f"{demo_stack.base_url}/v1", api_key="sk-wrong") as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"


def test_a_grammar_that_becomes_too_slow_fails_alone_and_pays_for_its_tokens(
    client: openai.OpenAI, demo_stack: Stack, tenant: Tenant
) -> None:
    ids = set()
    stream = client.completions.create(
        model="base", prompt="x", max_tokens=400, temperature=1.0, seed=1, stream=True,
        logit_bias={"1": -100}, extra_body={"structured_outputs": BOMB},
    )  # fmt: skip
    with pytest.raises(openai.APIError) as error:
        ids.update(chunk.id for chunk in stream)
    assert (error.value.code, error.value.param) == ("constraint_too_slow", "structured_outputs")
    (answer_id,) = ids
    url = f"/v1/receipts/{answer_id}"
    demo_stack.wait(lambda: tenant.http.get(url).status_code == 200)
    paid = tenant.http.get(url).json()["receipt"]
    assert paid["stop_cause"] == "constraint_too_slow"
    assert paid["completion_tokens"] > 10
    assert paid["amount_nanousd"] > 0
