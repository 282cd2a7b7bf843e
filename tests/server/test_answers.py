"""Answers in OpenAI's shapes: text in pieces, logprobs with exact bytes, usage that adds up."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.messages import RequestOutput, TokenLogprobs
from server.answers import Answer, Choice, Part, event, usage
from server.logprobs import LogprobsText

EURO = "€".encode()
VOCABULARY = [b"", b"a", b"b", EURO[:1], EURO[1:], b" cd", b"\xff"]


def make_output(*token_ids, logprobs=False, finish_reason=None, **fields):
    named = tuple(TokenLogprobs(logprob=-float(i), top=((i, -1.0),)) for i in token_ids)
    return RequestOutput(
        request_id="r", seq=0, new_token_ids=token_ids, logprobs=named if logprobs else None,
        finish_reason=finish_reason, **fields,
    )  # fmt: skip


def make_choice(is_chat=True, index=0, echo=""):
    return Choice(index, VOCABULARY, is_chat, echo)


def test_usage_components_add_up_and_what_is_ours_is_under_one_key():
    final = RequestOutput(
        request_id="r", seq=0, finish_reason="stop", stop_cause="eos",
        num_prompt_tokens=7, num_completion_tokens=5,
    )  # fmt: skip
    body = usage(final, 123, 1)
    assert body["total_tokens"] == body["prompt_tokens"] + body["completion_tokens"] == 12
    assert body["x_chorale"]["cost_nanousd"] == 123


def test_an_event_is_one_data_line():
    answer = Answer.of("r", "m", True, "abc", "default")
    # Python's and httpx's lines end at each of these, an event stream's at the first three.
    said = "ä\n\r\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029c"
    raw = event(answer.chunk(make_choice().chunk(Part(said))))
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


def test_the_prompt_is_echoed_once_before_the_first_text():
    choice = make_choice(is_chat=False, echo="say: ")
    parts = [choice.take(make_output(1)), choice.take(make_output(2, finish_reason="stop"))]
    assert [part.text for part in parts] == ["say: a", "b"]


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
        "tokens": [" cd", "\ufffd"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"a": -0.1, " cd": -1.0}, {"\ufffd": -2.0}],
        "text_offset": [0, 3],
    }
    # The character ends with its second token, so what follows stands one further.
    more = logprobs.render([4, 2], [TokenLogprobs(logprob=-1.0)] * 2)
    assert more["text_offset"] == [3, 4]


def test_pieces_of_characters_share_one_text_and_the_likeliest_has_it():
    named = TokenLogprobs(logprob=-3.0, top=((3, -0.1), (1, -0.7)))
    body = LogprobsText(VOCABULARY, is_chat=False).render([6], [named])
    assert body["top_logprobs"] == [{"\ufffd": -0.1, "a": -0.7}]


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
    streamed, whole, total = make_choice(is_chat), make_choice(is_chat), Part()
    chunks = [streamed.chunk(streamed.take(output), with_token_ids=True) for output in outputs]
    for output in outputs:
        total.append(whole.take(output))
    body = whole.whole(total, prompt_token_ids=[1])
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


def test_the_official_client_reads_every_shape():
    final = make_output(1, 5, logprobs=True, finish_reason="stop", stop_cause="eos")
    counts = usage(final, 0, 1)
    for is_chat, kind in ((True, ChatCompletion), (False, Completion)):
        answer, choice = Answer.of("r", "m", is_chat, "abc", "flex"), make_choice(is_chat, index=3)
        body = answer.whole([choice.whole(choice.take(final), None)], counts)
        read = kind.model_validate(body, strict=True)
        assert read.choices[0].index == 3
    assert read.choices[0].logprobs.tokens == ["a", " cd"]
    answer, choice = Answer.of("r", "m", True, "abc", "flex"), make_choice()
    chunk = answer.chunk(choice.chunk(choice.take(final)))
    read = ChatCompletionChunk.model_validate(chunk, strict=True)
    assert read.service_tier == "flex"
    assert read.choices[0].logprobs.content[0].bytes == [97]
