"""Answers taken apart, whatever pieces they come in; transformers' parser is the oracle."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from server.tools.built_in import BUILT_IN
from server.tools.parser import AnswerParser, Parsed
from tests.server.tools.descriptions import DESCRIPTIONS
from tests.server.tools.transcripts import NAMES, TRANSCRIPTS

EVERY = pytest.mark.parametrize("told", TRANSCRIPTS, ids=lambda told: f"{told.family} {told.text}")


def parsed(family, pieces, names=NAMES, *, is_cut=False, **options):
    """The whole of an answer that comes in pieces, and the parser at its end."""
    parser, whole = AnswerParser(BUILT_IN[family], names, **options), Parsed()
    for piece in pieces:
        whole.append(parser.push(piece))
    whole.append(parser.push("", final=True, is_cut=is_cut))
    return whole, parser


def seen(whole):
    return whole.content, whole.reasoning, tuple((c.name, c.arguments) for c in whole.calls)


@EVERY
def test_an_answer_is_taken_apart_character_by_character(told):
    whole, parser = parsed(told.family, told.text)
    assert seen(whole) == (told.content, told.reasoning, told.calls)
    assert parser.is_whole
    assert parser.num_calls == len(told.calls)


@EVERY
def test_pieces_of_any_size_give_the_same(told):
    expected = seen(parsed(told.family, told.text)[0])
    for size in (2, 3, 5, 7, 64, 1000):
        pieces = [told.text[i : i + size] for i in range(0, len(told.text), size)]
        assert seen(parsed(told.family, pieces)[0]) == expected
    for cut in range(len(told.text)):
        assert seen(parsed(told.family, [told.text[:cut], told.text[cut:]])[0]) == expected


@EVERY
def test_the_parts_of_every_prefix_are_the_beginning_of_the_whole(told):
    """Parts that were passed on are never taken back, and nothing of the text is lost."""
    for end in range(len(told.text)):
        parser, sent = AnswerParser(BUILT_IN[told.family], NAMES), Parsed()
        for character in told.text[:end]:
            sent.append(parser.push(character))
        assert told.content.startswith(sent.content)
        assert told.reasoning.startswith(sent.reasoning)
        for (name, arguments), call in zip(told.calls, sent.calls, strict=False):
            assert call.name == name
            assert arguments.startswith(call.arguments)


@EVERY
def test_an_answer_that_is_cut_anywhere_shows_nothing_of_its_marks(told):
    """The parts of a cut answer begin those of the whole; its last call may be a part of one."""
    for end in range(len(told.text)):
        text = told.text[:end]
        whole, parser = parsed(told.family, [text], is_cut=True)
        assert told.content.startswith(whole.content.rstrip())
        assert told.reasoning.startswith(whole.reasoning.rstrip())
        for (name, arguments), call in zip(told.calls, whole.calls, strict=False):
            assert call.name == name
            assert arguments.startswith(call.arguments)
        assert len(whole.calls) == parser.num_calls + parser.has_cut_call
        for call in whole.calls[: parser.num_calls]:
            assert isinstance(json.loads(call.arguments), dict)
        assert seen(parsed(told.family, text, is_cut=True)[0]) == seen(whole)


@EVERY
def test_an_answer_that_must_call_has_no_content_wherever_it_is_cut(told):
    for end in range(len(told.text)):
        for is_cut in (True, False):
            whole, parser = parsed(told.family, [told.text[:end]], must_call=True, is_cut=is_cut)
            assert whole.content == ""
            one, _ = parsed(told.family, told.text[:end], ["f"], must_call=True, is_cut=is_cut)
            names = [call.name for call in one.calls]
            assert (one.content, names) == ("", [] if parser.is_reasoning else ["f"])


def test_the_beginning_of_a_mark_at_the_end_is_text_unless_the_answer_was_cut_within_it():
    for family, text in (("hermes", "a <tool_"), ("mistral", "a [TOOL"), ("llama3_json", '{"na')):
        assert parsed(family, [text])[0].content == text
        cut, _ = parsed(family, [text], is_cut=True)
        assert cut.content == ("" if family == "llama3_json" else "a")
    told = "a <tool_", ["<tool_call>", "<think>"]
    assert parsed("hermes", told[0], tokens=told[1], is_cut=True)[0].content == told[0]
    assert parsed("hermes", told[0], names=(), is_cut=True)[0].content == told[0]


@EVERY
def test_transformers_parser_gives_the_same(told):
    if not told.is_plain:
        pytest.skip("transformers' parser keeps less of this answer")
    theirs = parse_response(told.text, DESCRIPTIONS[told.family], prefix="")
    calls = [call["function"] for call in theirs.get("tool_calls", ())]
    assert theirs.get("content", "") == told.content.strip()
    assert theirs.get("thinking", "") == told.reasoning
    assert calls == [{"name": n, "arguments": json.loads(it)} for n, it in told.calls]


def test_calls_are_content_where_no_tool_may_be_called():
    for told in TRANSCRIPTS:
        whole, _ = parsed(told.family, told.text, names=())
        assert whole.calls == []
        assert all(name in whole.content for name, _ in told.calls)


def test_a_call_of_a_tool_that_was_not_declared_is_content():
    text = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
    whole, parser = parsed("hermes", text)
    assert seen(whole) == (text, "", ())
    assert not parser.is_whole


def test_a_call_after_one_that_was_malformed_is_a_call():
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    whole, _ = parsed("hermes", f"<tool_call>oops {call}")
    assert seen(whole) == ("<tool_call>oops", "", (("now", "{}"),))


def test_only_one_call_is_taken_where_only_one_may_be():
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    whole, _ = parsed("hermes", call * 2, most_calls=1)
    assert seen(whole) == (call, "", (("now", "{}"),))
    listed = '{"name": "now", "arguments": {}}'
    whole, _ = parsed("mistral", f"[TOOL_CALLS] [{listed}, {listed}]", most_calls=1)
    assert seen(whole) == (f", {listed}]", "", (("now", "{}"),))


def test_arguments_that_are_no_json_object_are_no_complete_call():
    for arguments in ("[]", "1"):
        text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
        whole, parser = parsed("hermes", text)
        assert seen(whole) == (text, "", ())
        assert not parser.is_whole
    for arguments in ('{"a": }', '{"a": 1]}', "{'a': 1}"):
        whole, parser = parsed("hermes", f'<tool_call>{{"name": "now", "arguments": {arguments}}}')
        assert seen(whole) == ("", "", (("now", arguments[: len(whole.calls[0].arguments)]),))
        assert (parser.num_calls, parser.has_cut_call, parser.is_whole) == (0, True, False)


def test_an_answer_may_begin_in_a_reasoning_part():
    whole, parser = parsed("hermes", "Hm.\n</think>\n\nYes.", is_reasoning=True)
    assert seen(whole) == ("Yes.", "Hm.", ())
    whole, parser = parsed("hermes", "Hm, and", is_reasoning=True)
    assert seen(whole) == ("", "Hm, and", ())
    assert not parser.is_whole


@pytest.mark.parametrize(
    "content", ['{"a": "<think> or <tool_call>"}', '["</think>", "<thi"]', '"<tool_call>"', "<a>"]
)
def test_marks_in_content_of_a_given_shape_are_text(content):
    for before, thought in (("", ""), ("<think>Hm.</think>\n\n", "Hm.")):
        for pieces in (before + content, [before + content], [before, content]):
            whole, parser = parsed("hermes", pieces, is_constrained=True)
            assert seen(whole) == (content, thought, ())
            assert parser.is_whole
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    whole, _ = parsed("hermes", f"<think>Hm.</think>\n{call}", is_constrained=True)
    assert seen(whole) == ("", "Hm.", (("now", "{}"),))


def test_a_prompt_says_whether_it_ends_in_a_reasoning_part():
    template = BUILT_IN["hermes"]
    turn = "<|im_start|>assistant\n"
    assert template.is_reasoning(f"{turn}<think>\na</think>x<|im_end|>{turn}<think>\n")
    assert not template.is_reasoning(f"{turn}<think>x<|im_end|>{turn}")
    assert not template.is_reasoning(f"{turn}<think>\n\n</think>\n\n")
    # Without the turn's mark only the prompt's very end says it.
    assert template.is_reasoning("<|Assistant|><think>\n")
    assert not template.is_reasoning("<think> is a mark. <|Assistant|>")
    assert not BUILT_IN["mistral"].is_reasoning("[/INST][THINK]")


@settings(max_examples=100)
@given(
    family=st.sampled_from(sorted(BUILT_IN)),
    pieces=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "now",
             "[THINK]", "[/THINK]", "<|python_tag|>", '{"name": "now", "', 'arguments": {', "}",
             'parameters": {', "}}", "[", "]", "\n", " ", '"', "\\", "a", "é", ","]
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_nothing_of_an_answer_is_lost(family, pieces):
    """Whatever an answer is, its text comes back but for marks, blanks and the frames of calls, as
    long as no call is left incomplete.
    """
    text = "".join(pieces)
    whole, parser = parsed(family, text)
    pieced, _ = parsed(family, pieces)
    assert seen(pieced) == seen(whole)
    if not whole.calls and not BUILT_IN[family].reasoning:
        assert whole.content == text
    texts = [whole.content, whole.reasoning, *(call.arguments for call in whole.calls)]
    if not parser.has_cut_call:
        assert sum(part.count("é") for part in texts) == text.count("é")
