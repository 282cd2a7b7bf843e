"""Requests in OpenAI's format: unsupported parameters are refused by name, never ignored."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.messages import SamplingParams
from registry.errors import Invalid
from server.api.openai import ChatRequest, CompletionRequest, parse_request
from server.constraints.constraint import WHITESPACE_PARAM
from server.inference.encoders import Encoders
from server.inference.prompts import tokenize
from server.inference.texts import Text

IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
TEXT_PART = {"type": "text", "text": "Hello."}
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {
    "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}  # fmt: skip


def parse(body, kind=ChatRequest):
    return parse_request(json.dumps(body).encode(), kind)


def tokens_of(base, text, asked):
    return asyncio.run(tokenize(base, text, Encoders(), "t", asked.for_model())).token_ids


def refused(body, kind=ChatRequest):
    with pytest.raises(Invalid) as error:
        parse(body, kind)
    return error.value.param


@pytest.mark.parametrize(
    "name",
    [
        "tools", "functions", "response_format", "structured_outputs", "audio", "prediction",
        "web_search_options", "best_of", "suffix", "echo", "surprise",
    ],
)  # fmt: skip
def test_a_parameter_that_is_not_served_is_refused_by_name(name):
    assert refused(HELLO | {name: 7}) == name


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1}, {"tools": []}, {"response_format": {"type": "text"}}, {"logprobs": False},
        {"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"stop": None}, {"user": "u-1"},
        {"metadata": {"a": "b"}}, {"max_tokens": None}, {"audio": None}, {"stream_options": None},
        {"skip_special_tokens": True}, {"add_generation_prompt": True}, {"use_beam_search": False},
        {"continue_final_message": False}, {"length_penalty": 1.0}, {"min_tokens": 0},
        {"logits_processors": []}, {"documents": []}, {"function_call": "none"},
        {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True},
        {"logit_bias": {}}, {"stop": []}, {"stream_options": {}}, {"allowed_token_ids": []},
        {"stream_options": {"include_usage": None, "anything": None}}, {"unheard_of": None},
        {"unheard_of": []}, {"response_format": {}}, {"parallel_tool_calls": False},
        {"store": False}, {"verbosity": "low"}, {"prompt_cache_retention": "24h"},
        {"chat_template_kwargs": {}}, {"web_search_options": None}, {"stop": False},
        {"prediction": None}, {"prediction": {}}, {"speculation": None},
        {"tools": None, "tool_choice": "auto"},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_asks_for_nothing_is_accepted(neutral):
    asked = parse(HELLO | neutral)
    assert (asked.model, asked.tool_use) == ("m", None)


def test_the_defaults_of_other_servers_are_accepted_by_both_endpoints():
    """Clients of vLLM, llama.cpp, SGLang and OpenRouter that send every field."""
    defaults = {
        "detokenize": True, "return_prompt_text": False, "stream_interval": 1, "cache_salt": None,
        "prompt_embeds": None, "repetition_detection": {}, "kv_transfer_params": {},
        "ec_transfer_params": {}, "spaces_between_special_tokens": False, "bad_words": [],
        "structured_outputs": None, "top_k": -1, "best_of": 1, "priority": 0, "vllm_xargs": {},
        "mirostat": 0, "tfs_z": 1.0, "typical_p": 1.0, "repeat_penalty": 1.0, "top_a": 0.0,
        "no_stop_trim": False, "reasoning": {"exclude": False}, "provider": {}, "plugins": [],
    }  # fmt: skip
    assert parse(HELLO | defaults).for_model() == parse(HELLO).for_model()
    text = parse(TEXT | defaults, CompletionRequest)
    assert text.for_model() == parse(TEXT, CompletionRequest).for_model()
    for name, value in ("detokenize", False), ("stream_interval", 2), ("top_a", 0.5):
        assert refused(HELLO | {name: value}) == name


def answer(**fields):
    return HELLO["messages"] + [{"role": "assistant", "content": "Hello."} | fields]


@pytest.mark.parametrize(
    "nothing",
    [
        {"refusal": None}, {"tool_calls": None}, {"tool_calls": []}, {"annotations": []},
        {"audio": None}, {"function_call": None}, {"name": None}, {"name": "bob"}, {"odd": {}},
        {"provider_specific_fields": {"refusal": "a"}}, {"id": "msg_1"},
        {"extra_content": {"a": 1}}, {"reasoning_details": [{"text": "a"}]},
        {"cache_control": {"type": "ephemeral"}},
        {"content": [{"type": "text", "text": "Hello.", "annotations": [{}], "logprobs": [1],
                      "cache_control": {"type": "ephemeral"}}]},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_can_be_sent_back(nothing):
    message = parse(HELLO | {"messages": answer(**nothing)}).messages[1].plain()
    assert message == {"role": "assistant", "content": "Hello."} | (
        {"name": "bob"} if nothing == {"name": "bob"} else {}
    )


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"messages": answer(refusal="No.")}, "messages[1].refusal"),
        (
            {"messages": answer(content=[{"type": "text", "text": "a", "detail": {"a": 1}}])},
            "messages[1].content[0].detail",
        ),
        ({"stream_options": {"x" * 99: 1}}, "stream_options." + "x" * 64),
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"do_sample": False}, "do_sample"),
        ({"stream_options": {"anything": False}}, "stream_options.anything"),
        ({"length_penalty": 2.0}, "length_penalty"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_its_path(change, path):
    with pytest.raises(Invalid) as error:
        parse(HELLO | change)
    assert (error.value.param, error.value.code) == (path, "unsupported_parameter")
    assert f"'{path}' is not supported" in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ([5, 6], [[5, 6]]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_a_prompt_is_a_text_or_token_ids_or_a_list_of_either(prompt, prompts):
    assert parse(TEXT | {"prompt": prompt}, CompletionRequest).asked_prompts == prompts


BEAMS = {"use_beam_search": True, "n": 3}


def test_a_beam_search_reaches_the_engine_without_drafts():
    asked = parse(TEXT | BEAMS | {"length_penalty": -0.5, "temperature": 0}, CompletionRequest)
    sampling = asked.for_model().sampling
    assert (sampling.beam_search, sampling.length_penalty, sampling.n) == (True, -0.5, 3)
    assert not asked.for_model().drafts
    assert not parse(TEXT, CompletionRequest).for_model().sampling.beam_search


@pytest.mark.parametrize(
    "other",
    [
        {"stream": True}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1},
        {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1.0}}, {"seed": 0}, {"stop": "x"}, {"min_tokens": 1},
        {"allowed_token_ids": [5]}, {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}}, {"tools": [TOOL]}, {"speculation": "shared"},
        {"prediction": {"type": "content", "content": "a"}}, {"best_of": 3},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_beam_search_does_not_heed_is_refused_by_name(other):
    assert refused(HELLO | BEAMS | other) == next(iter(other))


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 1}, {"top_k": -1}, {"response_format": {"type": "text"}}, {"n": 1},
        {"tool_choice": "none"}, {"speculation": "off"}, {"stop_token_ids": [5], "user": "u"},
        {"ignore_eos": True, "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 1},
        {"max_completion_tokens": 9, "service_tier": "flex", "truncate_prompt_tokens": 5},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_beam_search_heeds_or_does_nothing_is_taken(other):
    assert parse(HELLO | BEAMS | other).use_beam_search


def test_an_echo_has_as_many_logprobs_as_the_answer():
    def asked(**fields):
        return parse(TEXT | fields, CompletionRequest).for_model().sampling

    assert asked(echo=True, logprobs=3).prompt_logprobs == 3
    assert asked(echo=True, logprobs=3, prompt_logprobs=5).prompt_logprobs == 5
    assert asked(echo=True).prompt_logprobs is None
    assert asked(logprobs=3).prompt_logprobs is None


def asks_for(**fields):
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}} | fields,
        }
    }


@pytest.mark.parametrize(
    ("asked", "constraint"),
    [
        (asks_for(strict=True), ("json", '{"type": "object"}')),
        (asks_for(name=None), ("json", '{"type": "object"}')),
        ({"response_format": {"type": "json_object"}}, ("json", '{"type": "object"}')),
        (asks_for(schema={}), ("json", "{}")),
        (asks_for(schema={"enum": []}), ("json", '{"enum": []}')),
        (asks_for(schema={"title": None}), ("json", '{"title": null}')),
        ({"structured_outputs": {"json": {}}}, ("json", "{}")),
        ({"structured_outputs": {"json": "true", "regex": None}}, ("json", "true")),
        ({"structured_outputs": {"regex": "é", "disable_fallback": False}}, ("regex", "é")),
        ({"structured_outputs": {"choice": ["a", "a"]}}, ("choice", '["a", "a"]')),
        ({"structured_outputs": {"grammar": "g", "json_object": False}}, ("lark", "g")),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}}, ("json", "{}")),
        (
            asks_for() | {"structured_outputs": {"whitespace_pattern": " "}},
            ("json", '{"type": "object"}'),
        ),
        ({"structured_outputs": {}}, None),
        ({"response_format": {"type": "text"}, "structured_outputs": None}, None),
    ],
    ids=str,
)
def test_each_form_asks_for_one_shape_on_both_kinds_of_completion(asked, constraint):
    for kind, body in ((ChatRequest, HELLO), (CompletionRequest, TEXT)):
        found = parse(body | asked, kind).for_model().constraint
        assert (found and (found.kind, found.text)) == constraint


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": answer(tool_calls=[{"id": "1"}])}, "messages[1].tool_calls[0].function"),
        ({"messages": answer(tool_calls=[CALL | {"id": ""}])}, "messages[1].tool_calls[0].id"),
        ({"messages": answer(tool_calls=[CALL | {"type": "x"}])}, "messages[1].tool_calls[0].type"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]},
         "messages[0].reasoning_content"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
         "messages[0].tool_call_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL], "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"tools": [TOOL], "tool_choice": ALLOWED}, "tool_choice.allowed_tools.tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 140_000}}]},
         "tools"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [IMAGE]}, "messages[0].content[0].type"),
        ({"stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
        ({"prediction": "Hello."}, "prediction"),
        ({"prediction": {"type": "text", "content": "Hello."}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": 7}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [TEXT_PART, {"type": "image_url"}]}},
         "prediction.content[1].type"),
        ({"prediction": {"type": "content", "content": "x", "odd": 1}}, "prediction.odd"),
        *((BEAMS | {"length_penalty": it}, "length_penalty") for it in (True, False, 11, "1")),
        ({"speculation": "on"}, "speculation"),
        ({"speculation": True}, "speculation"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 10.1}, "repetition_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"logit_bias": {"7": 101}}, 'logit_bias["7"]'),
        ({"logit_bias": {"-7": 1}}, 'logit_bias["-7"]'),
        ({"logit_bias": {"07": 1}}, 'logit_bias["07"]'),
        ({"logit_bias": {"model": 1}}, 'logit_bias["model"]'),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": [7]}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids[0]"),
        ({"logprobs": True, "logprob_token_ids": 123}, "logprob_token_ids"),
        ({"logprob_token_ids": [100]}, "logprob_token_ids"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 300}, "stop"),
        ({"chat_template_kwargs": {"a b": 1}}, 'chat_template_kwargs["a b"]'),
        ({"chat_template_kwargs": {"_a": 1}}, 'chat_template_kwargs["_a"]'),
        ({"chat_template_kwargs": {"tokenize": True}}, 'chat_template_kwargs["tokenize"]'),
        ({"chat_template_kwargs": {"bos_token": ""}}, 'chat_template_kwargs["bos_token"]'),
        ({"chat_template_kwargs": {"n": {"a": [10**6 + 1]}}}, 'chat_template_kwargs["n"]'),
        ({"chat_template_kwargs": {"a": "x" * (64 << 10)}}, 'chat_template_kwargs["a"]'),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
         "enable_thinking"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a" * 255] * 17}, "stop"),
        ({"stop": ["é" * 129]}, "stop"),
        ({"stop": ["a", 7]}, "stop[1]"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"echo": True, "messages": answer(content=None, tool_calls=[CALL])}, "echo"),
        (
            {"messages": answer(), "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"min_tokens": -1}, "min_tokens"),
        ({"bad_words": "fox"}, "bad_words"),
        ({"bad_words": ["fox", " "]}, "bad_words[1]"),
        ({"bad_words": ["x" * 257]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": ["x"], "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"], "tools": [TOOL]}, "bad_words"),
        (asks_for() | {"bad_words": ["x"]}, "bad_words"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 9, "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"temperature": False}, "temperature"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (asks_for(schema=[]), "response_format.json_schema.schema"),
        (asks_for(odd=1), "response_format.json_schema.odd"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
        *(
            ({"structured_outputs": {"whitespace_pattern": pattern} | more}, WHITESPACE_PARAM)
            for pattern, more in ((" ", {}), (" ", {"regex": "a"}), ("a", {"json": {}}), ("", {}))
        ),
        (asks_for() | {"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        (asks_for() | {"allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_names_its_place(change, param):
    assert refused(HELLO | change) == param


@pytest.mark.parametrize(
    "content", ["Hello.Hello.", [TEXT_PART, TEXT_PART], [TEXT_PART | {"text": "Hello.Hello."}]]
)
def test_a_prediction_is_a_text_or_its_parts(content):
    asked = parse(HELLO | {"prediction": {"type": "content", "content": content}})
    assert asked.for_model().prediction == "Hello.Hello."


@pytest.mark.parametrize(
    ("speculation", "found"),
    [(None, ("Hi", True, False)), ("auto", ("Hi", True, False)), ("shared", ("Hi", True, True)),
     ("off", ("", False, False))],
)  # fmt: skip
def test_a_request_says_whether_its_tokens_may_be_drafted(speculation, found):
    prediction = {"type": "content", "content": "Hi"}
    request = parse(HELLO | {"prediction": prediction, "speculation": speculation}).for_model()
    assert (request.prediction, request.drafts, request.shares_drafts) == found
    text = parse(TEXT | {"speculation": speculation}, CompletionRequest).for_model()
    assert (text.drafts, text.shares_drafts) == found[1:]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prediction": {"type": "content", "content": "Hello."}}, "prediction"),
        ({"speculation": "on"}, "speculation"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprob_token_ids": [100]}, "logprob_token_ids"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"echo": True, "logprobs": 0, "stream": True, "n": 2}, "echo"),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"prompt": [[3], [2**40]]}, "prompt[1][0]"),
        ({"prompt": ["a", 7]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 15}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "both"}, "truncation_side"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"thinking_token_budget": 9}, "thinking_token_budget"),
    ],
    ids=str,
)
def test_a_bad_value_of_a_text_completion_names_its_place(change, param):
    assert refused(TEXT | change, CompletionRequest) == param


def test_every_sampling_parameter_reaches_the_engine():
    values = {
        "n": 3, "temperature": 0.7, "top_p": 0.8, "top_k": 40, "min_p": 0.05,
        "presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
        "seed": 7, "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 2,
        "include_stop_str_in_output": True, "allowed_token_ids": [3, 4], "prompt_logprobs": 1,
        "logprob_token_ids": [8, 2],
    }  # fmt: skip
    wanted = SamplingParams(
        **values
        | {"stop_token_ids": (5,), "allowed_token_ids": (3, 4), "logprob_token_ids": (8, 2)},
        max_tokens=0, stop=(b"END",), logprobs=4,
        logit_bias=((50, -100.0), (0, 1.5)),
    )  # fmt: skip
    given = values | {"stop": "END", "logit_bias": {"50": -100, "0": 1.5}}
    chat = parse(HELLO | given | {"logprobs": True, "top_logprobs": 4})
    assert chat.for_model().sampling == wanted
    assert parse(TEXT | given | {"logprobs": 4}, CompletionRequest).for_model().sampling == wanted


def test_what_is_not_asked_for_changes_nothing():
    assert parse(HELLO).for_model().sampling == SamplingParams(max_tokens=0)
    assert parse(TEXT, CompletionRequest).for_model().sampling == SamplingParams(max_tokens=0)
    assert parse(HELLO | {"top_k": -1}).for_model().sampling.top_k == 0
    assert parse(HELLO | {"logprobs": True}).for_model().sampling.logprobs == 0
    assert parse(TEXT | {"logprobs": 0}, CompletionRequest).for_model().sampling.logprobs == 0


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"logit_bias": {"3": 1, "100": 1}}, 'logit_bias["100"]'),
        ({"stop_token_ids": [3, 100]}, "stop_token_ids[1]"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids[0]"),
        ({"prompt": [99, 100]}, "prompt"),
    ],
)
def test_a_token_id_that_nobody_has_is_refused_by_its_place(change, place):
    base, text = SimpleNamespace(longest=512), Text(None, None, 100)
    prompt = {"prompt": [7]}
    asked = parse(
        TEXT | prompt | {"logit_bias": {"99": 1}, "stop_token_ids": [99]}, CompletionRequest
    )
    assert tokens_of(base, text, asked) == [[7]]
    with pytest.raises(Invalid) as error:
        tokens_of(base, text, parse(TEXT | prompt | change, CompletionRequest))
    assert error.value.param == place


def test_the_flexible_tier_waits_and_every_other_does_not():
    tiers = {tier: parse(HELLO | {"service_tier": tier}) for tier in ("auto", "default", "flex")}
    assert {tier: asked.for_model().priority for tier, asked in tiers.items()} == {
        "auto": 0, "default": 0, "flex": 1,
    }  # fmt: skip
    assert [asked.served_tier for asked in tiers.values()] == ["default", "default", "flex"]


@pytest.mark.parametrize(
    "change",
    [
        {"tool_choice": NAMED | {"NamedTool": 1}},
        {"tool_choice": NAMED | {"NamedTool": {"a": 1}, "AllowedTools": {"a": 1}}},
        {"messages": [{"role": "user", "content": [TEXT_PART | {"list[_TextPart]": [1]}]}]},
    ],
)
def test_an_unknown_field_with_the_name_of_a_branch_of_a_union_is_left_out(change):
    ignored = []
    body = json.dumps(HELLO | {"tools": [TOOL]} | change).encode()
    parse_request(body, ChatRequest, ignored)
    places = {"tool_choice.NamedTool", "tool_choice.AllowedTools"}
    assert ignored
    assert set(ignored) <= places | {"messages.content.list[_TextPart]"}


@pytest.mark.timeout(20)
def test_many_unknown_fields_take_time_in_proportion_to_their_number():
    many = {f"odd{number}": 1 for number in range(49_000)}
    ignored = []
    parse_request(json.dumps(HELLO | many).encode(), ChatRequest, ignored)
    assert ignored == list(many)
    more = HELLO | {"tools": [TOOL], "tool_choice": NAMED | many}
    with pytest.raises(Invalid, match="more than 50000 fields and values"):
        parse_request(json.dumps(more).encode(), ChatRequest, [])


def test_both_token_limits_are_read_and_the_larger_counts():
    asked = parse(HELLO | {"max_tokens": 5, "max_completion_tokens": 9})
    assert asked.asked_tokens == 9
    assert parse(HELLO).asked_tokens is None
    assert parse({"model": "m", "prompt": "x"}, CompletionRequest).asked_tokens == 16


def test_content_parts_and_developer_messages_become_what_templates_know():
    message = {"role": "developer", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    assert parse(HELLO | {"messages": [message]}).messages[0].plain() == {
        "role": "system",
        "content": "ab",
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([*ChatRequest.model_fields, "best_of", "x"]), json_values))
@settings(max_examples=100, deadline=None)
def test_no_json_makes_the_parser_raise_anything_but_a_400(body):
    with contextlib.suppress(Invalid):
        parse(HELLO | body)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(body):
    with pytest.raises(Invalid):
        parse_request(body, ChatRequest)


def used(**fields):
    return parse(
        HELLO | {"tools": [TOOL, {"type": "function", "function": {"name": "g"}}]} | fields
    )


@pytest.mark.parametrize(
    ("fields", "mode", "allowed", "most_calls"),
    [
        ({}, "auto", ("f", "g"), None),
        ({"tool_choice": None, "parallel_tool_calls": None}, "auto", ("f", "g"), None),
        ({"tool_choice": "none"}, "none", ("f", "g"), None),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "required", ("f", "g"), 1),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "required", ("g",), 1),
        ({"tool_choice": ALLOWED}, "auto", ("g",), None),
    ],
    ids=str,
)
def test_a_choice_of_tools_says_which_may_be_called(fields, mode, allowed, most_calls):
    use = used(**fields).tool_use
    assert (use.mode, use.allowed, use.most_calls) == (mode, allowed, most_calls)
    assert [tool.name for tool in use.tools] == ["f", "g"]
    assert [tool.name for tool in use.callable_tools] == list(() if mode == "none" else allowed)


def test_messages_with_calls_and_results_reach_the_template():
    called = {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}]}
    result = {"role": "tool", "tool_call_id": "1", "content": [TEXT_PART]}
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    asked = parse(HELLO | {"messages": [*HELLO["messages"], called, result, thought]})
    assert asked.asked_prompts.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "Hello.", "tool_call_id": "1"},
        thought,
    ]
