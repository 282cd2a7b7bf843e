"""Answers in OpenAI's shapes: text in pieces, logprobs with exact bytes, usage that adds up."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.wire.messages import RequestOutput, TokenLogprobs
from server.api.answers import Answer, Choice, Part, ShownPrompt, counts, event, usage
from server.api.logprobs import LogprobsText, PromptLogprobs, extend
from server.tools.built_in import BUILT_IN
from server.tools.parser import AnswerParser, Parsed

EURO = "€".encode()
VOCABULARY = [b"", b"a", b"b", EURO[:1], EURO[1:], b" cd", b"\xff"]


def make_output(*token_ids, logprobs=False, finish_reason=None, **fields):
    named = tuple(TokenLogprobs(logprob=-float(i), top=((i, -1.0),)) for i in token_ids)
    return RequestOutput(
        request_id="r", seq=0, new_token_ids=token_ids, logprobs=named if logprobs else None,
        finish_reason=finish_reason, **fields,
    )  # fmt: skip


def make_choice(is_chat=True, index=0, **prompt):
    return Choice(index, VOCABULARY, is_chat, ShownPrompt(**prompt))


def score(*token_ids):
    """An output that has only the logprobs of these tokens of the prompt."""
    top = ((1, -0.5), (2, -0.7))
    ranks = {1: 1, 2: 2}
    named = tuple(
        TokenLogprobs(logprob=dict(top).get(i, -3.0), rank=ranks.get(i, 17), top=top)
        for i in token_ids
    )
    return RequestOutput(request_id="r", seq=0, prompt_logprobs=named)


def test_usage_components_add_up_and_what_is_ours_is_under_one_key():
    final = RequestOutput(
        request_id="r", seq=0, finish_reason="stop", stop_cause="eos",
        num_prompt_tokens=7, num_completion_tokens=5, num_accepted_tokens=3, num_rejected_tokens=9,
    )  # fmt: skip
    body = usage(final, counts(final), 123, 1)
    assert body["completion_tokens_details"] == {
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 9,
    }
    assert body["total_tokens"] == body["prompt_tokens"] + body["completion_tokens"] == 12
    assert body["x_chorale"]["cost_nanousd"] == 123


def test_an_event_is_one_data_line():
    answer = Answer("r", "m", True, "abc", "default")
    # Python and httpx end a line at each of these, an event stream only at the first three.
    said = "ä\n\r\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029c"
    raw = event(answer.chunk(make_choice().chunk(Part(Parsed(said)))))
    assert raw.startswith(b"data: {")
    assert raw.endswith(b"\n\n")
    assert raw.decode().splitlines() == [raw.decode().removesuffix("\n\n"), ""]
    body = json.loads(raw[6:])
    assert body["choices"][0]["delta"] == {"role": "assistant", "content": said}
    assert body["service_tier"] == "default"


def test_only_the_first_chunk_of_each_answer_has_a_role():
    choices = [make_choice(index=i) for i in range(2)]
    chunks = [choices[i].chunk(choices[i].take(make_output(1))) for i in (0, 1, 0)]
    assert [(c["index"], "role" in c["delta"]) for c in chunks] == [
        (0, True),
        (1, True),
        (0, False),
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_prompt_is_echoed_once_before_the_first_text_with_its_logprobs(is_streamed):
    logprobs = PromptLogprobs(VOCABULARY, [5, 1, 3], num_echoed=1, num_listed=2)
    choice = make_choice(is_chat=False, echo=" cda\ufffd", token_ids=[5, 1, 3], logprobs=logprobs)
    outputs = [score(1), score(3), make_output(2, logprobs=True), make_output(1, logprobs=True)]
    parts = [choice.take(output) for output in outputs]
    if is_streamed:
        body, second = map(choice.chunk, parts[2:])
        assert (body["text"], second["text"]) == (" cda\ufffdb", "a")
        assert body["prompt_token_ids"] == [5, 1, 3]
        assert second["prompt_token_ids"] is None
        extend(body["logprobs"], second["logprobs"])
    else:
        total = Part()
        for part in parts:
            total.append(part)
        body = choice.whole(total)
        assert body["text"] == " cda\ufffdba"
        likely = {
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "2": {"logprob": -0.7, "rank": 2, "decoded_token": "b"},
        }
        last = {"3": {"logprob": -3.0, "rank": 17, "decoded_token": "\ufffd"}}
        assert body["prompt_logprobs"] == [None, likely, last | likely]
    assert body["logprobs"] == {
        "tokens": [" cd", "a", "bytes:\\xe2", "b", "a"],
        "token_logprobs": [None, -0.5, -3.0, -2.0, -1.0],
        "top_logprobs": [
            None, {"a": -0.5}, {"a": -0.5, "bytes:\\xe2": -3.0}, {"b": -1.0}, {"a": -1.0},
        ],
        "text_offset": [0, 3, 4, 5, 6],
    }  # fmt: skip


def test_chat_logprobs_have_exact_bytes_and_text_with_replacements():
    named = [TokenLogprobs(logprob=-0.5, top=((3, -0.5), (0, -2.0)))]
    assert LogprobsText(VOCABULARY, is_chat=True).render([3], named) == {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -0.5,
                "bytes": [EURO[0]],
                "top_logprobs": [
                    {"token": "\ufffd", "logprob": -0.5, "bytes": [EURO[0]]},
                    {"token": "", "logprob": -2.0, "bytes": None},
                ],
            }
        ],
        "refusal": None,
    }


def test_completion_logprobs_say_where_tokens_stand_and_name_the_chosen_one_too():
    logprobs = LogprobsText(VOCABULARY, is_chat=False)
    first = logprobs.render(
        [5, 3], [TokenLogprobs(logprob=-1.0, top=((1, -0.1),)), TokenLogprobs(logprob=-2.0)]
    )
    assert first == {
        "tokens": [" cd", "bytes:\\xe2"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"a": -0.1, " cd": -1.0}, {"bytes:\\xe2": -2.0}],
        "text_offset": [0, 3],
    }
    # The character is complete with its second token, so the next offset is one higher.
    more = logprobs.render([4, 2], [TokenLogprobs(logprob=-1.0)] * 2)
    assert more["text_offset"] == [3, 4]


def test_no_likely_token_is_lost_where_two_have_one_text():
    logprobs = LogprobsText([*VOCABULARY, b"a", b""], is_chat=False)
    pieces = TokenLogprobs(logprob=-0.1, top=((6, -0.1), (3, -0.2), (4, -0.3)))
    assert len(logprobs.render([6], [pieces])["top_logprobs"][0]) == 3
    same = TokenLogprobs(logprob=-0.2, top=((7, -0.1), (1, -0.2), (8, -0.3), (0, -0.4)))
    (named,) = logprobs.render([1], [same])["top_logprobs"]
    assert named == {"token_id:7": -0.1, "a": -0.2, "": -0.3, "token_id:0": -0.4}


@pytest.mark.parametrize("is_chat", [True, False])
def test_tokens_are_named_by_their_ids_on_request_and_keep_their_bytes(is_chat):
    named = [TokenLogprobs(logprob=-0.5, top=((1, -0.5), (3, -2.0)))]
    shown = LogprobsText(VOCABULARY, is_chat, as_ids=True).render([1], named)
    if not is_chat:
        assert shown["tokens"] == ["token_id:1"]
        assert shown["top_logprobs"] == [{"token_id:1": -0.5, "token_id:3": -2.0}]
        return
    (entry,) = shown["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:1", [97])
    assert [likely["token"] for likely in entry["top_logprobs"]] == ["token_id:1", "token_id:3"]


def test_a_token_beyond_the_vocabulary_has_no_text():
    named = [TokenLogprobs(logprob=-1.0)]
    entry = LogprobsText(VOCABULARY, is_chat=True).render([999], named)["content"][0]
    assert (entry["token"], entry["bytes"]) == ("", None)


@pytest.mark.parametrize("is_chat", [True, False])
@given(st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_stream_in_pieces_is_the_whole_answer(is_chat, pieces):
    outputs = [make_output(*ids, logprobs=True) for ids in pieces[:-1]]
    outputs.append(make_output(*pieces[-1], logprobs=True, finish_reason="length"))
    streamed, whole = (make_choice(is_chat, token_ids=[1]) for _ in range(2))
    total = Part()
    chunks = [streamed.chunk(streamed.take(output)) for output in outputs]
    for output in outputs:
        total.append(whole.take(output))
    body = whole.whole(total)
    texts = [c["delta"]["content"] if is_chat else c["text"] for c in chunks]
    assert "".join(texts) == (body["message"]["content"] if is_chat else body["text"])
    assert [i for c in chunks for i in c["token_ids"]] == body["token_ids"]
    assert body["finish_reason"] == chunks[-1]["finish_reason"] == "length"
    assert [c["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    joined = [c["logprobs"] for c in chunks if c["logprobs"]]
    assert bool(joined) == bool(body["logprobs"])
    for name in ("content",) if is_chat else ("tokens", "text_offset", "top_logprobs"):
        whole_entries = (body["logprobs"] or {name: []})[name]
        assert [entry for logprobs in joined for entry in logprobs[name]] == whole_entries


PIECES = [
    b"", b"<think>", b"Hm", b" and", b"</think>", b"\n\n", b"Let me see.", b"<tool_call>",
    b'{"name": "now", "arguments": ', b'{"a"', b": 1", b"2}", b"}", b"</tool_call>", b"<tool",
]  # fmt: skip
THOUGHT = [1, 5, 2, 3, 5, 4, 5, 6]
CALL = [7, 8, 9, 10, 11, 12, 13]


def make_talker(echo="", **options):
    parser = AnswerParser(BUILT_IN["hermes"], ["now"])
    # The marks of reasoning are special tokens, which have no bytes of their own.
    vocabulary = [b"" if i in (1, 4) else piece for i, piece in enumerate(PIECES)]
    marks = {1: PIECES[1], 4: PIECES[4]}
    return Choice(0, vocabulary, True, ShownPrompt(echo), parser, marks, **options)


def outputs_of(token_ids, size=1, **end):
    groups = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
    ends = [{}] * (len(groups) - 1) + [{"finish_reason": "stop"} | end]
    return [make_output(*ids, **fields) for ids, fields in zip(groups, ends, strict=True)]


def whole_of(outputs, **options):
    choice, total = make_talker(**options), Part()
    for output in outputs:
        total.append(choice.take(output))
    return choice, choice.whole(total)


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_reasoning_and_calls_are_told_apart_whole_and_streamed(size):
    outputs = outputs_of(THOUGHT + CALL + CALL, size)
    choice, body = whole_of(outputs)
    message = body["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "Hm and")
    assert message["reasoning"] == message["reasoning_content"]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "now", "arguments": '{"a": 12}'}
    ] * 2
    assert body["finish_reason"] == "tool_calls"
    # <think>, what was thought, the line ends and </think>.
    assert choice.num_reasoning_tokens == 6
    streamed = make_talker()
    parts = [streamed.take(output) for output in outputs]
    chunks = [streamed.chunk(part) for part in parts if not streamed.is_silent(part)]
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Hm and"
    calls = {0: "", 1: ""}
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        assert ("id" in part) == (not calls[part["index"]])
        calls[part["index"]] += part["function"]["arguments"]
    assert list(calls.values()) == ['{"a": 12}'] * 2
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert streamed.num_reasoning_tokens == 6


def test_an_echo_stands_before_the_content_and_leaves_reasoning_and_calls():
    outputs = outputs_of(THOUGHT + CALL, 99)
    choice = make_talker(echo="So: ")
    message = choice.whole(choice.take(outputs[0]))["message"]
    assert (message["content"], message["reasoning_content"]) == ("So: Let me see.", "Hm and")
    streamed = make_talker(echo="So: ")
    chunks = [streamed.chunk(streamed.take(output))["delta"] for output in outputs_of(THOUGHT, 3)]
    assert "".join(delta.get("content", "") for delta in chunks) == "So: Let me see."
    assert "".join(delta.get("reasoning_content", "") for delta in chunks) == "Hm and"


def test_an_answer_is_silent_while_a_mark_may_have_begun():
    choice = make_talker()
    parts = [choice.take(output) for output in outputs_of([6, 14, 6])]
    assert [choice.is_silent(part) for part in parts] == [False, True, False]
    assert [part.said.content for part in parts] == ["Let me see.", "", "<toolLet me see."]


@pytest.mark.parametrize("cause", ["eos", "stop_token"])
@pytest.mark.parametrize("size", [1, 99])
def test_the_token_that_ends_an_answer_is_text_if_that_is_asked_for(size, cause):
    for shows_stop, said in ((False, "Let me see."), (True, "Let me see. and")):
        outputs = outputs_of([*THOUGHT, 3], size, stop_cause=cause)
        choice, body = whole_of(outputs, shows_stop=shows_stop)
        assert body["message"]["content"] == said
        assert choice.num_reasoning_tokens == 6
    _, body = whole_of(outputs_of(CALL, size, stop_cause=cause))
    assert body["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("num_tokens", range(1, 1 + len(CALL)))
def test_a_call_that_is_cut_off_is_a_part_of_one_whole_and_streamed(num_tokens):
    outputs = outputs_of([6, *CALL[:num_tokens]], finish_reason="length")
    _, body = whole_of(outputs)
    message, streamed = body["message"], make_talker()
    chunks = [streamed.chunk(streamed.take(output)) for output in outputs]
    deltas = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
    arguments = ["", "", '{"a"', '{"a": 1', '{"a": 12}', '{"a": 12}', '{"a": 12}'][num_tokens - 1]
    assert message["content"] == "Let me see."
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "Let me see."
    calls = message.get("tool_calls", [])
    assert [call["function"] for call in calls] == (
        [{"name": "now", "arguments": arguments}] if arguments else []
    )
    assert "".join(delta["function"]["arguments"] for delta in deltas) == arguments
    assert all(call["id"] for call in (*calls, *deltas[:1]))
    assert body["finish_reason"] == chunks[-1]["finish_reason"] == "length"


def test_calls_end_an_answer_unless_its_last_one_is_cut_by_a_stop_string():
    for cut, reason in ((CALL + CALL[:4], "stop"), (CALL + CALL[:1], "tool_calls")):
        assert whole_of(outputs_of(cut))[1]["finish_reason"] == reason


def test_a_client_may_do_without_the_reasoning_and_still_pays_for_it():
    choice, body = whole_of(outputs_of(THOUGHT), shows_reasoning=False)
    assert body["message"] == {
        "role": "assistant", "content": "Let me see.", "refusal": None,
        "reasoning": None, "reasoning_content": None,
    }  # fmt: skip
    assert choice.num_reasoning_tokens == 6
    final = outputs_of([6])[0]
    assert counts(final, 6)["completion_tokens_details"]["reasoning_tokens"] == 6
    assert "reasoning_tokens" not in counts(final)["completion_tokens_details"]


def test_the_official_client_reads_calls_and_reasoning():
    answer = Answer("r", "m", True, "abc", "default")
    _, body = whole_of(outputs_of(THOUGHT + CALL))
    final = make_output(1, finish_reason="stop", stop_cause="eos")
    read = ChatCompletion.model_validate(
        answer.whole([body], usage(final, counts(final, 6), 0, 1)), strict=True
    )
    assert read.choices[0].message.tool_calls[0].function.name == "now"
    assert read.usage.completion_tokens_details.reasoning_tokens == 6
    choice = make_talker()
    for output in outputs_of(THOUGHT + CALL):
        chunk = answer.chunk(choice.chunk(choice.take(output)))
        ChatCompletionChunk.model_validate(chunk, strict=True)
