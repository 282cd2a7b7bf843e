"""Events of a stream: prepared frames make the same bytes as encoding each event."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.messages import RequestOutput, TokenLogprobs
from server.api import answers
from server.api.answer_events import AnswerEvents
from server.api.answers import Answer, Choice, ShownPrompt
from server.api.padding import Padding

EURO = "€".encode()
VOCABULARY = [
    b"", b"a", b'"\\', EURO[:1], EURO[1:], b" cd", b"\xff", "\u2028\x85".encode(), b"\x00\n",
    "😀".encode(),
]  # fmt: skip
# A model's name is in every event, and may look like anything but the text's mark.
MODEL = 'm"odel {"content":""}\u2028'
NAMED = (TokenLogprobs(logprob=-0.5, top=((1, -0.5),)),)

Said = list[tuple[int, list[int], bool]]
"""Outputs: number of the answer, its tokens, whether they have logprobs."""

said = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def outputs_of(said: Said) -> list[RequestOutput]:
    """Both answers end, the second last."""
    last = {0: len(said), 1: len(said) + 1}
    return [
        RequestOutput(
            request_id="r",
            seq=seq,
            index=index,
            new_token_ids=tuple(ids),
            logprobs=NAMED * len(ids) if has_logprobs else None,
            finish_reason="length" if seq == last[index] else None,
            stop_cause="max_tokens" if seq == last[index] else None,
            num_prompt_tokens=3,
            num_completion_tokens=seq + 1,
            is_last=seq == last[1],
        )
        for seq, (index, ids, has_logprobs) in enumerate([*said, (0, [1], False), (1, [5], False)])
    ]


def events_of(
    outputs: list[RequestOutput],
    *,
    is_chat: bool = True,
    has_usage: bool = False,
    is_counted: bool = False,
    padded_to: int = 0,
) -> list[bytes]:
    written: list[bytes] = []
    events = AnswerEvents(
        Answer("r", MODEL, is_chat, "abc", "default", 1),
        [Choice(index, VOCABULARY, is_chat, ShownPrompt()) for index in range(2)],
        Padding(padded_to),
        written.append,
        usage_so_far=answers.counts if is_counted else None,
        usage=answers.counts if has_usage else None,
    )
    for output in outputs:
        events.take(output)
    return written


def rendered(outputs: list[RequestOutput], *, is_chat: bool, has_usage: bool) -> list[bytes]:
    """The events as objects that are encoded one by one."""
    answer = Answer("r", MODEL, is_chat, "abc", "default", 1)
    choices = [Choice(index, VOCABULARY, is_chat, ShownPrompt()) for index in range(2)]
    usage = {"usage": None} if has_usage else {}
    written = []
    for output in outputs:
        choice = choices[output.index]
        prompt = {"prompt_token_ids": None} if is_chat and choice.is_first_chunk else {}
        chunk = answer.chunk(choice.chunk(choice.take(output)))
        written.append(answers.event(chunk | prompt | usage))
    if has_usage:
        written.append(answers.event(answer.usage_chunk(answers.counts(outputs[-1]))))
    return [*written, answers.DONE]


@given(said, st.booleans(), st.booleans())
def test_events_have_the_same_bytes_with_and_without_frames(said, is_chat, has_usage):
    outputs = outputs_of(said)
    form = {"is_chat": is_chat, "has_usage": has_usage}
    assert events_of(outputs, **form) == rendered(outputs, **form)


def test_after_the_first_event_only_the_text_is_encoded(monkeypatch):
    encoded = []
    whole = answers.event
    monkeypatch.setattr(answers, "event", lambda data: encoded.append(data) or whole(data))
    outputs = outputs_of([(0, [1], False)] * 40)
    assert len(events_of(outputs, is_chat=True, has_usage=True)) == 40 + 2 + 2
    # The first event, both ends, the usage, and a frame for each answer.
    assert len(encoded) == 6


@pytest.mark.parametrize("is_counted", [True, False])
def test_events_with_counts_and_padded_ones_are_made_one_by_one(is_counted):
    outputs = outputs_of([(0, [1], False)] * 3)
    written = events_of(outputs, is_counted=is_counted, padded_to=0 if is_counted else 64)
    assert is_counted or {len(event) % 64 for event in written} == {0}
    objects = [json.loads(event[6:]) for event in written[:-1]]
    counted = [each["usage"]["completion_tokens"] for each in objects if "usage" in each]
    assert counted == ([1, 2, 3, 4, 5] if is_counted else [])
