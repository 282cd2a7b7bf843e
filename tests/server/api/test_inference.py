"""Completions over HTTP: choices, streams, logprobs and holds."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine.wire.messages import AddRequest, RequestOutput
from server.accounts.tenants import set_details
from server.billing.prices import ensure_price
from server.billing.rating import amount_nanousd
from server.pool.suspects import fingerprint
from server.tools.built_in import BUILT_IN
from server.tools.dialect import Dialect
from tests.server.bases import change_base
from tests.server.factories import NOW_MS, limit_budget
from tests.server.fake_engines import MAX_MODEL_LEN, answer_at_once
from tests.server.scripted_product import (
    CHAT,
    Product,
    events,
    token_ids,
)

EOS = 1
IGNORE = {"x-chorale-ignore-unknown-fields": "true"}


def test_n_answers_are_n_choices_in_order_and_one_usage(scripted: Product) -> None:
    body = scripted.chat(n=3, return_token_ids=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for index, choice in enumerate(body["choices"]):
        assert choice["token_ids"] == list(token_ids(index))
        assert choice["message"]["content"] == scripted.words(token_ids(index))
        assert choice["finish_reason"] == "length"
    prompt = len(scripted.engines.asked[0].prompt_token_ids)
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == 9


def test_a_cached_token_is_told_and_costs_less(scripted: Product) -> None:
    def cached(message: AddRequest) -> list[RequestOutput]:
        (output,) = answer_at_once(message)
        return [output._replace(num_prompt_tokens=20, num_cached_tokens=16)]

    scripted.engines.script = cached
    usage = scripted.text().json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16
    price = scripted.gateway.database.write_sync(lambda conn: ensure_price(conn, NOW_MS))
    paid = 4 * price.prompt_nanousd + 16 * price.cached_nanousd + 3 * price.completion_nanousd
    assert usage["x_chorale"]["cost_nanousd"] == paid


def test_the_answers_of_a_beam_search_are_choices_the_best_one_first(scripted: Product) -> None:
    """The engine says at once that a search has begun, and all tokens of an answer at its end."""

    def search(message: AddRequest) -> list[RequestOutput]:
        name, answers = message.request_id, [(*answer_tokens[:2], EOS), (*answer_tokens, EOS)]
        ends = [
            RequestOutput(
                name, 2 + index, index, tokens, finish_reason="stop", stop_cause="eos",
                num_completion_tokens=5, is_last=index == 1,
            )
            for index, tokens in enumerate(answers)
        ]  # fmt: skip
        return [RequestOutput(name, 0, 0), RequestOutput(name, 1, 1), *ends]

    answer_tokens = token_ids(0)
    scripted.engines.script = search
    body = scripted.chat(n=2, use_beam_search=True, max_tokens=9).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == [scripted.words(answer_tokens[:2]), scripted.words(answer_tokens)]
    assert body["usage"]["completion_tokens"] == 5
    (asked,) = scripted.engines.asked
    assert (asked.sampling_params.beam_search, asked.token_lease, asked.drafts) == (True, 18, False)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_of_n_answers_has_each_ones_pieces_role_and_end(scripted: Product, kind) -> None:
    ask = scripted.chat if kind == "chat" else scripted.text
    chunks = events(ask(n=3, stream=True, stream_options={"include_usage": True}))
    for index in range(3):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        texts = [c["delta"]["content"] if kind == "chat" else c["text"] for c in own]
        assert "".join(texts) == scripted.words(token_ids(index))
        assert [c["finish_reason"] for c in own] == [None, None, "length"]
        if kind == "chat":
            assert ["role" in c["delta"] for c in own] == [True, False, False]
    assert [c["usage"] for c in chunks[:-1]] == [None] * 9
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 9


def test_a_list_of_prompts_is_answered_by_index_under_one_hold(scripted: Product) -> None:
    texts = ["Hello there", "You", "Good day to you"]
    encode = scripted.gateway.bases.default.tokenizer.encode
    for prompt in (texts, [encode(text) for text in texts]):
        body = scripted.text(prompt=prompt, n=2, echo=True, return_token_ids=True).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        for index, choice in enumerate(body["choices"]):
            assert choice["text"] == texts[index // 2] + scripted.words(token_ids(index))
            assert choice["prompt_token_ids"] == encode(texts[index // 2])
        (message,) = scripted.engines.asked
        num_prompt_tokens = sum(len(encode(text)) for text in texts)
        assert body["usage"]["prompt_tokens"] == num_prompt_tokens
        assert (message.token_lease, message.sampling_params.n) == (6 * 9, 2)
        hold = scripted.hold()
        assert (hold.num_prompt_tokens, hold.token_lease) == (num_prompt_tokens, 6 * 9)
        scripted.engines.asked.clear()


def test_a_hard_budget_has_to_pay_for_a_token_of_each_prompt_of_a_list(scripted: Product) -> None:
    prompts, database = [[40, 41], [50], [60]], scripted.gateway.database
    price = database.write_sync(lambda conn: ensure_price(conn, NOW_MS))
    needed = amount_nanousd(4, 0, 3, price)
    for amount, status in ((needed - 1, 429), (needed, 200)):
        limit_budget(database, scripted.tenant_id, amount)
        assert scripted.text(prompt=prompts).status_code == status
    assert scripted.hold().token_lease == 3


def test_every_chunk_says_how_many_tokens_there_have_been(scripted: Product) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(scripted.text(n=2, stream=True, stream_options=options))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4, 5, 6]
    assert all(
        c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + c["usage"]["completion_tokens"]
        for c in chunks
    )
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    for options in ({"continuous_usage_stats": True}, {"include_usage": False}):
        chunks = events(scripted.chat(stream=True, stream_options=options))
        assert not any("usage" in chunk for chunk in chunks)


def said_by(answer: httpx.Response, stream: bool) -> str:
    choices = [c["choices"][0] for c in (events(answer) if stream else [answer.json()])]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    return "".join(part.get("content") or part.get("text") or "" for part in parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_special_tokens_and_what_ended_the_answer_are_text_where_that_is_asked_for(
    scripted: Product, stream: bool, tools: Any
) -> None:
    special, end = 6, 1
    tokenizer = scripted.gateway.bases.default.tokenizer

    def script(message: AddRequest) -> list[RequestOutput]:
        ended = {"finish_reason": "stop", "stop_cause": "eos", "is_last": True}
        return [
            RequestOutput(message.request_id, seq, new_token_ids=(token,), **(ended if seq else {}))
            for seq, token in enumerate((special, end))
        ]

    scripted.engines.script = script
    for fields, wanted in (
        ({}, []),
        ({"include_stop_str_in_output": True}, []),
        ({"skip_special_tokens": False}, [special]),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, [special, end]),
    ):
        text = "".join(tokenizer.token_text(token) for token in wanted)
        asked = {"stop": "x", "stream": stream, **fields}
        assert said_by(scripted.chat(tools=tools, **asked), stream) == text
        assert said_by(scripted.text(**asked), stream) == text
        words = dict(scripted.engines.asked[-1].sampling_params.words)
        assert (words.get(special) == b"<|style_json|>") == ("skip_special_tokens" in fields)


def test_a_long_prompt_is_cut_to_its_last_tokens_on_request(scripted: Product) -> None:
    ids = [40 + i % 50 for i in range(MAX_MODEL_LEN + 100)]
    cut = scripted.text(prompt=ids, truncate_prompt_tokens=5, echo=True)
    assert scripted.engines.asked[-1].prompt_token_ids == tuple(ids[-5:])
    assert cut.json()["choices"][0]["text"].startswith(scripted.words(ids[-5:]))
    scripted.text(prompt=ids, truncate_prompt_tokens=-1, max_tokens=9)
    assert scripted.engines.asked[-1].prompt_token_ids == tuple(ids[-(MAX_MODEL_LEN - 9) :])
    assert scripted.text(prompt=ids).json()["error"]["code"] == "context_length_exceeded"


def test_a_last_message_of_the_assistant_is_continued_on_request(scripted: Product) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good day"}]

    def prompt(**changes: Any) -> str:
        assert scripted.chat(messages=messages, **changes).status_code == 200
        return scripted.words(scripted.engines.asked[-1].prompt_token_ids)

    whole = prompt(add_generation_prompt=False)
    assert prompt().startswith(whole), "a new answer begins by default"
    begun = prompt(continue_final_message=True)
    assert begun.endswith("Good day")
    assert whole.startswith(begun)
    assert prompt(continue_final_message=True, add_generation_prompt=False) == begun


def test_hold_lease_and_limit_cover_the_prompt_once_and_every_answer(scripted: Product) -> None:
    answer = scripted.text(n=4, max_tokens=20)
    message = scripted.engines.asked[-1]
    num_prompt_tokens = len(message.prompt_token_ids)
    assert (message.token_lease, message.sampling_params.max_tokens) == (80, 20)
    hold = scripted.hold()
    assert (hold.num_prompt_tokens, hold.token_lease) == (num_prompt_tokens, 80)
    price = scripted.gateway.database.write_sync(lambda conn: ensure_price(conn, NOW_MS))
    assert hold.amount_nanousd == amount_nanousd(num_prompt_tokens, 0, 80, price)
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - num_prompt_tokens - 80
    # The first request used its prompt and 12 tokens; the next reserves its prompt and one token.
    again = scripted.text(max_tokens=1)
    left = int(again.headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - (num_prompt_tokens + 12) - (num_prompt_tokens + 1)


def test_without_max_tokens_every_answer_may_fill_the_context(scripted: Product) -> None:
    scripted.chat(n=2, max_tokens=None)
    message = scripted.engines.asked[-1]
    rest = MAX_MODEL_LEN - len(message.prompt_token_ids)
    assert (message.sampling_params.max_tokens, message.token_lease) == (rest, 2 * rest)


def test_bad_words_reach_the_engine_as_they_begin_a_text_and_as_they_go_on(
    scripted: Product,
) -> None:
    encode = scripted.gateway.bases.default.tokenizer.encode
    wanted = {
        tuple(encode(spelled, add_special_tokens=False))
        for spelled in ("fox", " fox", "grey fox", " grey fox")
    }
    for ask in (scripted.chat, scripted.text):
        ask(bad_words=["fox", " grey fox", "fox"])
        assert set(scripted.engines.asked[-1].sampling_params.bad_words) == wanted
        assert len(scripted.engines.asked[-1].sampling_params.bad_words) == 4
        ask()
        assert scripted.engines.asked[-1].sampling_params.bad_words == ()


def test_a_model_without_reasoning_has_no_budget_for_it(scripted: Product) -> None:
    assert scripted.chat(thinking_token_budget=None).status_code == 200
    change_base(scripted.gateway, dialect=Dialect(BUILT_IN["hermes"], True, {}))
    for most in (0, 5):
        assert scripted.chat(thinking_token_budget=most).status_code == 200
        assert scripted.engines.asked[-1].sampling_params.reasoning.max_tokens == most
    scripted.chat()
    assert scripted.engines.asked[-1].sampling_params.reasoning is None


def test_the_tier_is_the_priority_and_is_told(scripted: Product) -> None:
    assert scripted.chat(service_tier="flex").json()["service_tier"] == "flex"
    assert scripted.engines.asked[-1].priority == 1
    chunks = events(scripted.chat(service_tier="flex", stream=True))
    assert {chunk["service_tier"] for chunk in chunks} == {"flex"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logit_bias": {"999999": 1}}, 'logit_bias["999999"]'),
        ({"prompt": [[7], [999999]]}, "prompt[1]"),
        ({"prompt": [[7], [8] * MAX_MODEL_LEN]}, "prompt"),
        ({"min_tokens": 10}, "min_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_costs_nothing(
    scripted: Product, changes, param
) -> None:
    refused = scripted.text(**changes)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert scripted.engines.asked == []
    assert not scripted.gateway.bases.default.running
    left = int(scripted.text(max_tokens=1).headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - len(scripted.engines.asked[-1].prompt_token_ids) - 1


def test_a_token_that_the_model_has_no_row_for_is_not_served(scripted: Product) -> None:
    base = scripted.gateway.bases.default
    smaller = replace(base.model, config=base.model.config | {"vocab_size": 50})
    assert replace(base, model=smaller).text.vocabulary_size == 50


def test_a_request_is_known_again_by_everything_that_reaches_the_model(scripted: Product) -> None:
    scripted.chat()
    scripted.chat(service_tier="flex")
    same, again = scripted.engines.asked
    assert same.request_id != again.request_id
    assert fingerprint(same) == fingerprint(again)
    for change in (
        {"n": 2}, {"logit_bias": {"5": 1}}, {"min_p": 0.1}, {"logprobs": True}, {"max_tokens": 8},
        {"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 1.1},
        {"response_format": {"type": "json_object"}},
    ):  # fmt: skip
        scripted.chat(**change)
        assert fingerprint(scripted.engines.asked[-1]) != fingerprint(same)


ODD = {"surprise\r\nx": 1, "messages": [{"role": "user", "content": "hi", "mood": {"a": 1}}]}
IGNORED = "messages.mood, surprise??x"


def test_unknown_fields_are_left_out_and_named_if_the_request_says_so(scripted: Product) -> None:
    plain = scripted.chat()
    assert scripted.chat(**ODD).json()["error"]["param"] in ("messages[0].mood", "surprise\r\nx")
    answer = scripted.post("chat/completions", CHAT | ODD, IGNORE)
    assert (answer.status_code, answer.headers["x-chorale-ignored-fields"]) == (200, IGNORED)
    assert answer.json()["choices"] == plain.json()["choices"]
    first, second = scripted.engines.asked
    assert replace(first, request_id="", deadline_s=0) == replace(
        second, request_id="", deadline_s=0
    )
    for known in ({"store": True}, {"stream_options": {"include_usage": "x"}}):
        refused = scripted.post("chat/completions", CHAT | ODD | known, IGNORE)
        assert refused.status_code == 400


def test_unknown_fields_are_left_out_if_the_tenant_is_set_so(scripted: Product) -> None:
    scripted.gateway.database.write_sync(
        lambda conn: set_details(
            conn, scripted.tenant_id, {"ignore_unknown_fields": True}, now_ms=NOW_MS
        )
    )
    answer = scripted.chat(**ODD, stream=True)
    assert (answer.status_code, answer.headers["x-chorale-ignored-fields"]) == (200, IGNORED)
    path = "/tokenize"
    assert scripted.post(path, ODD).headers["x-chorale-ignored-fields"] == IGNORED
    refused = scripted.post(path, ODD, {"x-chorale-ignore-unknown-fields": "false"})
    assert refused.status_code == 400
    many = {f"odd{number:02}": 1 for number in range(20)}
    told = scripted.chat(**many).headers["x-chorale-ignored-fields"]
    assert told.endswith("odd15, and 4 more")
