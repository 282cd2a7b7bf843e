"""Tools over HTTP: calls that an answer's end cuts off, and schemas that are enforced in part."""

import json
from typing import Any

import pytest

from engine.wire.messages import AddRequest, RequestOutput
from server.api.rendering import parser_of
from server.tools.built_in import BUILT_IN
from server.tools.grammar import AnswerForm
from server.tools.tool import Tool, ToolUse
from tests.server.scripted_product import Product, events

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def say(scripted: Product, text: str, **end: Any) -> None:
    """Have the engine say a text token by token, and then end, by EOS if that is the cause."""
    tokenizer = scripted.gateway.bases.default.tokenizer
    token_ids = tokenizer.encode(text)
    if end.get("stop_cause") == "eos":
        token_ids.append(tokenizer.eos_token_ids[0])

    def script(message: AddRequest) -> list[RequestOutput]:
        last = {"finish_reason": "length", "stop_cause": "max_tokens", "is_last": True} | end
        return [
            RequestOutput(
                request_id=message.request_id, seq=i, new_token_ids=(token_ids[i],),
                num_prompt_tokens=1, num_completion_tokens=i + 1,
                **(last if i + 1 == len(token_ids) else {}),
            )
            for i in range(len(token_ids))
        ]  # fmt: skip

    scripted.engines.script = script


def test_text_at_an_answers_own_end_is_content_though_a_mark_begins_so(scripted: Product) -> None:
    say(scripted, "a <tool_", finish_reason="stop", stop_cause="eos")
    (whole,) = scripted.chat(tools=[NOW]).json()["choices"]
    assert whole["message"]["content"] == "a <tool_"


@pytest.mark.parametrize(("token_ids", "content"), [({}, "a"), ({"[TOOL_CALLS]": 7}, "a [TOOL")])
def test_nothing_is_left_out_for_a_mark_that_is_a_token(token_ids: Any, content: str) -> None:
    use = ToolUse((Tool("now", None, None, False, "tools[0]"),), "auto", ("now",))
    parser = parser_of(AnswerForm(BUILT_IN["mistral"], use, None, token_ids))
    assert parser is not None
    assert parser.push("a [TOOL", final=True, is_cut=True).content == content


HEADER = "x-chorale-not-enforced"
TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def tool_of(**properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "now", "parameters": schema}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_what_is_not_enforced_of_its_tools_schemas(
    scripted: Product, stream: bool
) -> None:
    asked = {"tools": [NOW, tool_of(tags=TAGS)], "stream": stream}
    asked["tools"][0] = {"type": "function", "function": {"name": "other"}}
    path = "tools[1].function.parameters.properties.tags.uniqueItems"
    for _ in range(2):  # the second time from the grammars that are kept
        answer = scripted.chat(**asked)
        choices = [it["choices"][0] for it in (events(answer) if stream else [answer.json()])]
        assert choices[-1]["x_chorale"] == {"stop_cause": "max_tokens", "not_enforced": [path]}
        assert all("x_chorale" not in choice for choice in choices[:-1])
        assert answer.headers[HEADER] == path
    (grammar,) = json.loads(scripted.engines.asked[-1].grammar)["grammars"]
    assert '{"type": "array", "items": {"type": "string"}}' in grammar["lark_grammar"]


def test_an_answer_names_nothing_where_all_is_enforced(scripted: Product) -> None:
    answer = scripted.chat(tools=[tool_of(tags={"type": "array", "format": "int32"})])
    assert answer.json()["choices"][0]["x_chorale"] == {"stop_cause": "max_tokens"}
    assert HEADER not in answer.headers


def test_the_header_of_what_is_not_enforced_is_ascii_and_limited(scripted: Product) -> None:
    odd: dict[str, Any] = {name: 1 for name in "abcdefgh"}
    for _ in range(12):
        odd = {"items": odd}
    header = scripted.chat(tools=[tool_of(**{"é\x7f\n": odd})]).headers[HEADER]
    assert (len(header), header.isascii(), header.isprintable()) == (1_000, True, True)


def test_a_repeat_with_an_idempotency_key_names_what_is_not_enforced(scripted: Product) -> None:
    body = {"tools": [tool_of(tags=TAGS)]}
    first, again = (scripted.chat(**body, headers={"idempotency-key": "k"}) for _ in range(2))
    assert again.headers["idempotent-replayed"] == "true"
    assert first.headers[HEADER] == again.headers[HEADER]
