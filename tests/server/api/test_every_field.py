"""Every field of every request object: a value that asks for nothing leaves the answer and the
engine's request as they are without it, and any other value changes one of them.
"""

import copy
import json
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.wire.messages import AddRequest, RequestOutput, TokenLogprobs
from registry.formats.chat_template import ChatTemplate
from server.accounts.tenants import TenantLimits, set_limits
from server.api import chat_messages, openai, structured_outputs, tokenize_requests
from server.api.endpoints import inference
from server.api.request_objects import RequestObject, _kinds
from server.tools.built_in import BUILT_IN
from server.tools.dialect import Dialect
from tests.server.bases import change_base
from tests.server.factories import NOW_MS
from tests.server.scripted_product import Product

TEMPLATE = (
    "{{ enable_thinking }}{{ reasoning_effort }}"
    "{{ messages | tojson }}{{ tools | tojson }}{{ add_generation_prompt }}"
)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
SPECIAL_TOKEN = 6
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
TOOLS = [TOOL, {"type": "function", "function": {"name": "g"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
JSON_FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@dataclass(frozen=True)
class Ask:
    """A value that asks for something, where the object has `beside` as well."""

    value: Any
    beside: dict[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True)
class Place:
    """A place of an object in requests: `body` of its fields makes the whole request.

    least: fields that the object has to have.   asks: {field: what asks for something}.
    """

    kind: type[RequestObject]
    path: str
    body: Callable[[dict[str, Any]], dict[str, Any]]
    least: dict[str, Any]
    asks: dict[str, Any]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [HI], "max_tokens": 9} | fields


BOTH = {
    "model": Ask("other", status=404), "n": 2, "max_tokens": 8, "temperature": 0.5, "top_p": 0.5,
    "top_k": 3, "min_p": 0.5, "presence_penalty": 1.0, "frequency_penalty": 1.0,
    "repetition_penalty": 1.5, "logit_bias": {"7": 1}, "seed": 1, "stop": ["x"],
    "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 2, "allowed_token_ids": [7],
    "truncate_prompt_tokens": 1, "prompt_logprobs": 1, "stream": True,
    "stream_options": Ask({"include_usage": True}, {"stream": True}), "return_token_ids": True,
    "service_tier": "flex", "speculation": "off", "response_format": JSON_FORM,
    "structured_outputs": {"regex": "a"}, "prompt_cache_key": "k", "safety_identifier": "k",
    "user": "k",
    "include_stop_str_in_output": True, "skip_special_tokens": False, "bad_words": ["word"],
    "use_beam_search": True, "length_penalty": Ask(0.5, {"use_beam_search": True}),
    "truncation_side": Ask("right", {"truncate_prompt_tokens": 1}),
}  # fmt: skip
TEMPLATES = {
    "messages": [HI | {"content": "other"}], "tools": TOOLS, "add_generation_prompt": False,
    "continue_final_message": Ask(True, {"messages": [HI, {"role": "assistant", "content": "A"}]}),
    "chat_template_kwargs": Ask(
        {"enable_thinking": False},
        {"messages": [HI, {"role": "assistant", "content": "A"}], "continue_final_message": True},
    ),
    "enable_thinking": False,
    "reasoning_effort": "none",
}  # fmt: skip
PLACES = [
    Place(
        openai.ChatRequest, CHAT, lambda it: it, chat(),
        BOTH | TEMPLATES | {
            "max_completion_tokens": 12, "logprobs": True,
            "logprob_token_ids": Ask([7, 8], {"logprobs": True}),
            "return_tokens_as_token_ids": Ask(True, {"logprobs": True}),
            "echo": Ask(True, {"messages": [HI, {"role": "assistant", "content": "A"}]}),
            "top_logprobs": Ask(2, {"logprobs": True}),
            "tool_choice": Ask("none", {"tools": TOOLS}),
            "parallel_tool_calls": Ask(False, {"tools": TOOLS, "tool_choice": "required"}),
            "include_reasoning": False,
            "thinking_token_budget": 7, "prediction": {"type": "content", "content": "A"},
        },
    ),
    Place(
        openai.CompletionRequest, TEXT, lambda it: it,
        {"model": "base", "prompt": "Hello there", "max_tokens": 9},
        BOTH | {"prompt": "You", "logprobs": 0, "echo": True,
                "logprob_token_ids": Ask([7, 8], {"logprobs": 0}),
                "return_tokens_as_token_ids": Ask(True, {"logprobs": 0})},
    ),
    Place(
        openai._StreamOptions, CHAT, lambda it: chat(stream=True, stream_options=it), {},
        {"include_usage": True, "include_obfuscation": True,
         "continuous_usage_stats": Ask(True, {"include_usage": True})},
    ),
    Place(
        chat_messages._Message, CHAT, lambda it: chat(messages=[HI, it, HI]),
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "B", "name": "bob", "tool_calls": [CALL],
         "tool_call_id": Ask("c2", {"role": "tool", "tool_call_id": "c1"}),
         "reasoning_content": "Hm", "reasoning": "Hm"},
    ),
    Place(
        chat_messages._TextPart, CHAT, lambda it: chat(messages=[HI | {"content": [it]}]),
        {"type": "text", "text": "A"}, {"text": "B"},
    ),
    Place(
        chat_messages._Call, CHAT,
        lambda it: chat(messages=[HI, {"role": "assistant", "tool_calls": [it]}]),
        CALL, {"id": "c2", "function": {"name": "g", "arguments": "{}"}},
    ),
    Place(
        chat_messages._CalledFunction, CHAT,
        lambda it: chat(messages=[{"role": "assistant", "tool_calls": [CALL | {"function": it}]}]),
        {"name": "f", "arguments": "{}"}, {"name": "g", "arguments": '{"a": 1}'},
    ),
    Place(
        chat_messages._Tool, CHAT, lambda it: chat(tools=[it]), TOOL, {"function": {"name": "g"}}
    ),
    Place(
        chat_messages._Function, CHAT,
        lambda it: chat(tools=[{"type": "function", "function": it}], tool_choice="required"),
        {"name": "f"},
        {"name": "g", "description": "D", "parameters": SCHEMA,
         "strict": Ask(True, {"parameters": SCHEMA | {"not": {}}}, status=400)},
    ),
    Place(
        chat_messages.NamedTool, CHAT, lambda it: chat(tools=TOOLS, tool_choice=it),
        TOOL, {"function": {"name": "g"}},
    ),
    Place(
        chat_messages._FunctionName, CHAT,
        lambda it: chat(tools=TOOLS, tool_choice={"type": "function", "function": it}),
        {"name": "f"}, {"name": "g"},
    ),
    Place(
        chat_messages.AllowedTools, CHAT, lambda it: chat(tools=TOOLS, tool_choice=it),
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
        {"allowed_tools": {"mode": "auto", "tools": [TOOL]}},
    ),
    Place(
        chat_messages._AllowedTools, CHAT,
        lambda it: chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": it}),
        {"mode": "required", "tools": [TOOL]}, {"mode": "auto", "tools": [TOOLS[1]]},
    ),
    Place(
        chat_messages.Prediction, CHAT, lambda it: chat(prediction=it),
        {"type": "content", "content": "A"}, {"content": "B"},
    ),
    Place(
        structured_outputs.ResponseFormat, CHAT,
        lambda it: chat(response_format=it), {"type": "text"},
        {"type": "json_object",
         "json_schema": Ask({"name": "n", "schema": SCHEMA | {"required": ["a"]}}, JSON_FORM)},
    ),
    Place(
        structured_outputs._NamedSchema, CHAT,
        lambda it: chat(response_format={"type": "json_schema", "json_schema": it}),
        {"name": "n", "schema": SCHEMA}, {"schema": SCHEMA | {"required": ["a"]}},
    ),
    Place(
        structured_outputs.StructuredOutputs, CHAT,
        lambda it: chat(structured_outputs=it), {"regex": "a"},
        {"json": Ask({"type": "null"}, {"regex": None}), "json_object": Ask(True, {"regex": None}),
         "regex": "b", "choice": Ask(["a"], {"regex": None}),
         "grammar": Ask('start: "a"', {"regex": None}),
         "whitespace_pattern": Ask(" ?", {"regex": None, "json_object": True})},
    ),
    Place(
        tokenize_requests.TextToTokenize, TOKENIZE, lambda it: it, {"prompt": "Hello there"},
        {"model": Ask("other", status=404), "prompt": "You", "add_special_tokens": False,
         "return_token_strs": True},
    ),
    Place(
        tokenize_requests.ChatToTokenize, TOKENIZE, lambda it: it, {"messages": [HI]},
        TEMPLATES | {"model": Ask("other", status=404), "return_token_strs": True},
    ),
    Place(
        tokenize_requests.TokensToDecode, DETOKENIZE, lambda it: it, {"tokens": [40]},
        {"model": Ask("other", status=404), "tokens": [41]},
    ),
]  # fmt: skip
BY_NAME = {place.kind.__name__: place for place in PLACES}


@pytest.fixture
def product(scripted: Product) -> Product:
    """A base model that reasons, and whose template shows all that it is given."""
    scripted.gateway.database.write_sync(
        lambda conn: set_limits(conn, scripted.tenant_id, TenantLimits(), now_ms=NOW_MS)
    )
    tokenizer = copy.copy(scripted.gateway.bases.default.tokenizer)  # tests share it
    tokenizer.chat_template = ChatTemplate({"default": TEMPLATE}, {})
    tokenizer._prefix = [5]
    said = tokenizer.encode("<think>Hm.</think>Yes.", add_special_tokens=False)
    scripted.engines.script = lambda message: answer(message, (*said, SPECIAL_TOKEN))
    dialect = Dialect(BUILT_IN["hermes"], is_native=True, token_ids={})
    change_base(scripted.gateway, tokenizer=tokenizer, dialect=dialect)
    return scripted


def answer(message: AddRequest, said: tuple[int, ...]) -> Iterator[RequestOutput]:
    """The same text for every answer, with logprobs where they are asked for."""
    params, named = message.sampling_params, TokenLogprobs(logprob=-1.0, top=((7, -0.5), (8, -0.7)))
    if params.prompt_logprobs is not None:
        for seq, prompt in enumerate(message.prompts):
            yield RequestOutput(
                request_id=message.request_id, seq=seq, index=seq * params.n,
                prompt_logprobs=(named,) * (len(prompt) - 1),
            )  # fmt: skip
    for index in range(message.num_answers):
        yield RequestOutput(
            request_id=message.request_id, seq=100 + index, index=index, new_token_ids=said,
            logprobs=None if params.logprobs is None else (named,) * len(said),
            finish_reason="length", stop_cause="max_tokens",
            num_prompt_tokens=message.num_prompt_tokens,
            num_completion_tokens=(index + 1) * len(said),
            is_last=index + 1 == message.num_answers,
        )  # fmt: skip


def seen(product: Product, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status, and all that depends on a request but ids and times."""
    product.engines.asked.clear()
    answered = product.post(path, body)
    asked = [replace(it, request_id="", deadline_s=0) for it in product.engines.asked]
    text = re.sub(r'"(id|created)":("[^"]*"|\d+)|x-request-id', "", answered.text)
    key = None
    if asked:
        kind = inference.ChatRequest if path == CHAT else openai.CompletionRequest
        key = openai.parse_request(json.dumps(body).encode(), kind).for_model().request_key
    return answered.status_code, (asked, text, key)


def faults(product: Product, place: Place) -> list[str]:
    """The fields of a kind that are ignored, or whose defaults ask for something."""

    def send(fields: dict[str, Any]) -> tuple[int, Any]:
        return seen(product, place.path, place.body(fields))

    found = []
    nothing = [(name, None) for name in place.kind.model_fields]
    for name, info in place.kind.model_fields.items():
        if not info.is_required():
            nothing.append((info.alias or name, info.get_default(call_default_factory=True)))
    nothing += [(n, value) for n, values in place.kind.not_served.items() for value in values]
    nothing += [(name, {"a": [1]}) for name in place.kind.without_effect]
    plain = send(place.least)
    assert plain[0] == 200, plain
    for name, value in nothing:
        if name not in place.least and send(place.least | {name: value}) != plain:
            found.append(f"{name}: {value!r} asks for something")
    for name in fields_of(place.kind):
        ask = place.asks.get(name)
        ask = ask if isinstance(ask, Ask) else Ask(ask)
        without = send(place.least | ask.beside)
        status, told = send(place.least | ask.beside | {name: ask.value})
        if status != ask.status or told == without[1]:
            found.append(f"{name}: {ask.value!r} is ignored, or refused ({status})")
    return found


def fields_of(kind: type[RequestObject]) -> set[str]:
    """The names of the fields that have more than one value."""
    return {
        info.alias or name
        for name, info in kind.model_fields.items()
        if len(typing.get_args(info.annotation)) != 1
        or typing.get_origin(info.annotation) is not typing.Literal
    }


@pytest.mark.parametrize("name", BY_NAME)
def test_each_default_changes_nothing_and_each_other_value_something(product, name):
    assert faults(product, BY_NAME[name]) == []


def test_every_field_of_every_kind_is_tried():
    kinds = {it for it in _kinds() if it.model_fields and it.__module__.startswith("server.")}
    abstract = {openai._Request, chat_messages.Chat}
    assert {place.kind for place in PLACES} == kinds - abstract
    assert {p.kind: p.asks.keys() for p in PLACES} == {p.kind: fields_of(p.kind) for p in PLACES}


def test_a_field_that_is_taken_and_ignored_is_found(product, monkeypatch):
    class Planted(openai.ChatRequest):
        not_served = openai.ChatRequest.not_served | {"n_best": (1, 2)}
        planted: bool = False
        wrong_default: bool = False

        @property
        def asked_tokens(self) -> int | None:
            return 3 if "wrong_default" in self.model_fields_set else super().asked_tokens

    monkeypatch.setattr(inference, "ChatRequest", Planted)
    asks = BY_NAME["ChatRequest"].asks | {"planted": True, "wrong_default": Ask(True)}
    place = replace(BY_NAME["ChatRequest"], kind=Planted, asks=asks)
    found = faults(product, place)
    assert found == ["planted: True is ignored, or refused (200)"]
