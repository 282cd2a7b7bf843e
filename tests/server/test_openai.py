"""Requests in OpenAI's shape: what is not served is refused by name, never ignored."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import RequestOutput
from server.errors import ApiError
from server.openai import Answer, ChatRequest, CompletionRequest, event, parse_request, usage

IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def parse(body, kind=ChatRequest):
    return parse_request(json.dumps(body).encode(), kind)


def refused(body, kind=ChatRequest):
    with pytest.raises(ApiError) as error:
        parse(body, kind)
    assert error.value.status == 400
    return error.value.param


@pytest.mark.parametrize(
    "name",
    [
        "tools", "functions", "response_format", "logit_bias", "presence_penalty", "n", "logprobs",
        "audio", "prediction", "web_search_options", "surprise",
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
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_asks_for_nothing_is_accepted(neutral):
    assert parse(HELLO | neutral).model == "m"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [IMAGE]}, "messages[0].content[0].type"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_names_its_place(change, param):
    assert refused(HELLO | change) == param


@pytest.mark.parametrize("stop", ["", [""], ["x" * 300], ["a"] * 17])
def test_stops_have_limits(stop):
    with pytest.raises(ApiError) as error:
        parse(HELLO | {"stop": stop}).sampling(10)
    assert error.value.param == "stop"


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


@given(st.dictionaries(st.sampled_from([*ChatRequest.model_fields, "n", "x"]), json_values))
@settings(max_examples=300, deadline=None)
def test_no_json_makes_the_parser_raise_anything_but_a_400(body):
    status = 200
    try:
        parse(HELLO | body)
    except ApiError as error:
        status = error.status
    assert status in (200, 400)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(body):
    with pytest.raises(ApiError):
        parse_request(body, ChatRequest)


def test_usage_components_add_up_and_what_is_ours_is_under_one_key():
    final = RequestOutput(
        request_id="r", seq=0, finish_reason="stop", stop_cause="eos",
        num_prompt_tokens=7, num_completion_tokens=5,
    )  # fmt: skip
    body = usage(final, 123, 1)
    assert body["total_tokens"] == body["prompt_tokens"] + body["completion_tokens"] == 12
    assert body["x_chorale"]["cost_nanousd"] == 123


def test_an_event_is_one_data_line():
    chunk = Answer.of("r", "m", True, "abc").chunk("a\nb\u2028c", is_first=True)
    raw = event(chunk)
    assert raw.startswith(b"data: {")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n") == 2
    assert json.loads(raw[6:])["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "a\nb\u2028c",
    }
