"""Texts of a request reach the engine as tokens, with the bytes that it does not know."""

from dataclasses import replace

import pytest

from engine.wire.messages import ReasoningBudget, SamplingParams
from registry.errors import Invalid
from server.inference.generation_request import GenerationRequest
from server.inference.prompts import Prompts
from server.inference.sampling import sampling_of
from server.inference.texts import Text
from server.text.tokenizer import Tokenizer
from server.tools.built_in import BUILT_IN
from server.tools.dialect import Dialect
from tests.server.in_process import DEMO


@pytest.fixture(scope="module")
def text() -> Text:
    """A model whose reasoning opens with a token, and closes with several."""
    tokenizer = Tokenizer(DEMO)
    dialect = Dialect(BUILT_IN["hermes"], True, {"<think>": 7, "<tool_call>": 8})
    return Text(tokenizer, dialect, len(tokenizer.vocabulary), words={2048: b"own"})


def asked(
    text: Text, *, is_reasoning: bool = False, stop: tuple[bytes, ...] = (), **fields: object
):
    sampling = SamplingParams(max_tokens=0, stop=stop)
    request = GenerationRequest(model="m", prompts=["a"], sampling=sampling, max_tokens=9, **fields)  # type: ignore[arg-type]
    return sampling_of(request, text, Prompts([[1]], is_reasoning), 9)


@pytest.mark.parametrize("is_reasoning", [False, True])
def test_a_budget_has_the_marks_of_the_model_and_its_tokens(text: Text, is_reasoning: bool) -> None:
    closing = tuple(text.tokenizer.encode("</think>", add_special_tokens=False))
    assert len(closing) > 1
    found = asked(text, is_reasoning=is_reasoning, thinking_token_budget=0)
    assert found.reasoning == ReasoningBudget(
        max_tokens=0, is_begun=is_reasoning, opens=(b"<think>",), closes=(b"</think>",),
        opening=(7,), closing=closing, words=((2048, b"own"), (7, b"<think>")),
    )  # fmt: skip
    assert asked(text).reasoning is None


def test_a_model_that_writes_no_reasoning_takes_no_budget_for_it(text: Text) -> None:
    plain = replace(text, dialect=Dialect(BUILT_IN["llama3_json"], True, {}))
    assert asked(plain).reasoning is None
    with pytest.raises(Invalid) as error:
        asked(plain, thinking_token_budget=0)
    assert error.value.param == "thinking_token_budget"


def test_special_tokens_are_looked_through_for_stop_strings_if_they_are_text(text: Text) -> None:
    assert asked(text).words == ()
    assert asked(text, stop=(b"x",)).words == ((2048, b"own"),)
    found = dict(asked(text, stop=(b"x",), shows_special_tokens=True).words)
    assert (found[2048], found[6]) == (b"own", b"<|style_json|>")
