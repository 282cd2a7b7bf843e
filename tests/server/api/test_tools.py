"""Tools over HTTP: calls that an answer's end cuts off."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.messages import AddRequest, RequestOutput
from server.api.rendering import parser_of
from server.tools.built_in import BUILT_IN
from server.tools.grammar import AnswerForm
from server.tools.tool import Tool, ToolUse
from tests.server.scripted_product import Product, events, scripted_product

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 1'


@pytest.fixture
def product(migrated_sqlite: Path, tmp_path: Path) -> Iterator[Product]:
    with scripted_product(migrated_sqlite, tmp_path) as product:
        yield product


def say(product: Product, text: str, **end: Any) -> None:
    """Have the engine say a text token by token, and then end."""
    token_ids = product.gateway.bases.default.tokenizer.encode(text)

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

    product.engines.script = script


@pytest.mark.parametrize(
    ("text", "choice", "arguments"),
    [
        (CALL, "auto", '{"a": 1'),
        (CALL, "required", '{"a": 1'),
        (CALL, NAMED, '{"a": 1'),
        (CALL[:20], "auto", None),
        (CALL[:20], NAMED, ""),
        (CALL[:6], "auto", None),
        (CALL[:6], NAMED, ""),
    ],
)
def test_a_call_that_is_cut_is_a_part_of_one_and_never_content(
    product: Product, text: str, choice: Any, arguments: str | None
) -> None:
    say(product, text)
    asked = {"tools": [NOW], "tool_choice": choice, "max_tokens": 99}
    (whole,) = product.chat(**asked).json()["choices"]
    chunks = [event["choices"][0] for event in events(product.chat(**asked, stream=True))]
    deltas = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
    assert not whole["message"]["content"]
    assert not any(chunk["delta"].get("content") for chunk in chunks)
    shown = [call["function"] for call in whole["message"].get("tool_calls", ())]
    assert shown == ([] if arguments is None else [{"name": "now", "arguments": arguments}])
    assert "".join(part["function"]["arguments"] for part in deltas) == (arguments or "")
    assert [part["function"].get("name") for part in deltas[:1]] == ["now"] * len(shown)
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "length"


def test_text_at_an_answers_own_end_is_content_though_a_mark_begins_so(product: Product) -> None:
    say(product, "a <tool_", finish_reason="stop", stop_cause="eos")
    (whole,) = product.chat(tools=[NOW]).json()["choices"]
    assert whole["message"]["content"] == "a <tool_"


@pytest.mark.parametrize(("token_ids", "content"), [({}, "a"), ({"[TOOL_CALLS]": 7}, "a [TOOL")])
def test_nothing_is_left_out_for_a_mark_that_is_a_token(token_ids: Any, content: str) -> None:
    use = ToolUse((Tool("now", None, None, False, "tools[0]"),), "auto", ("now",))
    parser = parser_of(AnswerForm(BUILT_IN["mistral"], use, None, token_ids))
    assert parser is not None
    assert parser.push("a [TOOL", final=True, is_cut=True).content == content
