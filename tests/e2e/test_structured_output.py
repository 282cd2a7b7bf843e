"""Structured output over HTTP, on the demo's model and adapters, with OpenAI's client."""

import json
import re
from typing import Literal

import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

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
BOMB = {"grammar": 'start: s\ns: s s | "a" | "b"'}


class Animal(BaseModel):
    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)
    active: Literal["by day", "by night"]


@pytest.mark.parametrize("model", ["base", "json", "shout"])
def test_every_answer_of_every_adapter_fits_the_schema(client, model) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=1.0, seed=5, n=4, response_format=FORMAT
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    for text, choice in zip(texts, answer.choices, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(text))


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(client, logprobs) -> None:
    request = {
        "model": "json", "messages": QUESTION, "temperature": 0.8, "seed": 3,
        "response_format": FORMAT, "logprobs": logprobs,
    }  # fmt: skip
    whole = client.chat.completions.create(**request)
    usage = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**request, stream=True, stream_options=usage)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    if logprobs:
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_pydantic_gets_its_own_object(client) -> None:
    answer = client.chat.completions.parse(
        model="base", messages=QUESTION, temperature=1.0, response_format=Animal
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)


def test_expressions_choices_and_json_objects_on_both_endpoints(client) -> None:
    wanted = {"regex": r"[A-Z]{2}-\d{3,5}"}
    text = client.completions.create(
        model="base", prompt="The number is ", extra_body={"structured_outputs": wanted}
    )
    assert re.fullmatch(wanted["regex"], text.choices[0].text)
    choices = {"structured_outputs": {"choice": ["an owl", "a fox"]}}
    chat = client.chat.completions.create(model="base", messages=QUESTION, extra_body=choices)
    assert chat.choices[0].message.content in choices["structured_outputs"]["choice"]


def test_an_answer_that_max_tokens_cuts_is_called_length(client) -> None:
    answer = client.chat.completions.create(
        model="base", messages=QUESTION, max_tokens=5, response_format=FORMAT
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_a_grammar_that_becomes_too_slow_fails_alone_and_pays_for_its_tokens(
    client, demo_stack: Stack, tenant: Tenant
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
