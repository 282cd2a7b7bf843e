"""Requests of vLLM's own server tests (0.33, tests/entrypoints/openai), and what our answers say.

The engine is real and runs the demonstration model. The tests in which our answers differed from
vLLM's are in `ANSWERED` and `REFUSED`, one row or more for each; a row's first entry is the peer's
file and test. A field that is served as vLLM serves it gets its rows there, too.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from server.text.tokenizer import Tokenizer
from tests.engine.fakes import FakeGrammars, run_until_idle
from tests.engine.gpu.backends import fake_backend
from tests.engine.real_core import build_core
from tests.oracle import merged_model
from tests.server.fake_engines import FakeEngines
from tests.server.in_process import DEMO
from tests.server.scripted_product import Product, events

CHAT: Any = {"messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 5}
TEXT: Any = {"prompt": [40, 41, 42], "max_tokens": 5}
SAYING = "Here is a common saying about apple. An apple a day, keeps"
CONTINUED: Any = CHAT | {
    "messages": [
        {"role": "user", "content": "tell me a common saying"},
        {"role": "assistant", "content": SAYING},
    ],
    "continue_final_message": True,
    "add_generation_prompt": False,
}
STREAM: Any = {"stream": True}
VOCAB_SIZE = 2048
PROMPT: Any = [40, 41, 42, 900, 7, 1300]


@pytest.fixture(scope="module")
def core(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    """The engine, on the CPU unless the parameter names a function that makes another backend."""
    torch.set_num_threads(1)
    words = Tokenizer(DEMO).vocabulary
    assert len(words) == VOCAB_SIZE
    tokens = words, [1], FakeGrammars(VOCAB_SIZE)
    make_backend = getattr(request, "param", None)
    folder = tmp_path_factory.mktemp("engine")
    return build_core(DEMO, folder, {}, tokens=tokens, make_backend=make_backend)


@pytest.fixture
def product(core: EngineCore, scripted: Product) -> Product:
    def run(message: Any) -> Any:
        core.handle("gw", message)
        return run_until_idle(core)[message.request_id]

    assert isinstance(scripted.engines, FakeEngines)
    scripted.engines.script = run
    return scripted


@pytest.fixture(scope="module")
def oracle(core: EngineCore) -> Callable[[list[int]], torch.Tensor]:
    """Logprobs of all tokens after each of some tokens, [tokens, vocab], by transformers."""
    model = merged_model(DEMO, None)

    def logprobs(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)

    return logprobs


def ask(product: Product, body: dict[str, Any]) -> Any:
    """The answer's status and its object, or the list of its events."""
    path = "chat/completions" if "messages" in body else "completions"
    answer = product.post(path, {"model": "base", "temperature": 0} | body)
    is_stream = answer.status_code == 200 and body.get("stream")
    return answer.status_code, events(answer) if is_stream else answer.json()


def has_no_usage(chunks: list[Any]) -> bool:
    return not any(chunk.get("usage") for chunk in chunks)


def has_usage_at_its_end(chunks: list[Any]) -> bool:
    *chunks, last = chunks
    return has_no_usage(chunks) and last["choices"] == [] and last["usage"]["prompt_tokens"] > 0


def has_usage_throughout(chunks: list[Any]) -> bool:
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    return counts == sorted(counts) and counts[0] == 1 and counts[-1] == 5


def usage(**options: Any) -> Any:
    return STREAM | {"stream_options": options}


def content_of(answers: list[Any], index: int = 0) -> str:
    """The text of one of the choices, whole or in parts."""
    parts = (choice for answer in answers for choice in answer["choices"])
    own = [part for part in parts if part["index"] == index]
    return "".join((part.get("message") or part["delta"]).get("content") or "" for part in own)


def names_of(answer: Any) -> list[int]:
    """The ids by which logprobs name the tokens of a text completion."""
    names = answer["choices"][0]["logprobs"]["tokens"]
    assert all(name.startswith("token_id:") for name in names)
    return [int(name.removeprefix("token_id:")) for name in names]


def logprobs_of(answer: Any) -> list[Any]:
    return answer["choices"][0]["logprobs"]["content"]


ANSWERED: list[tuple[str, Any, Callable[[Any], bool]]] = [
    ("completion/test_completion.py::test_completion_stream_options",
     TEXT | usage(include_usage=False, continuous_usage_stats=False), has_no_usage),
    ("completion/test_completion.py::test_completion_stream_options",
     TEXT | usage(include_usage=False, continuous_usage_stats=True), has_no_usage),
    ("completion/test_completion.py::test_completion_stream_options",
     TEXT | usage(include_usage=True, continuous_usage_stats=False), has_usage_at_its_end),
    ("completion/test_completion.py::test_completion_stream_options",
     TEXT | usage(include_usage=True, continuous_usage_stats=True), has_usage_throughout),
    ("completion/test_completion.py::test_completion_stream_options", TEXT | usage(), has_no_usage),
    ("chat_completion/test_chat.py::test_chat_completion_stream_options",
     CHAT | usage(include_usage=False), has_no_usage),
    ("chat_completion/test_chat.py::test_chat_completion_stream_options",
     CHAT | usage(include_usage=True, continuous_usage_stats=True), has_usage_throughout),
    ("basic/test_return_token_ids.py::test_chat_completion_with_tool_use",
     CHAT | {"return_token_ids": True},
     lambda answer: len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
     and len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]),
    ("basic/test_return_token_ids.py::test_chat_completion_with_tool_use",
     CHAT | {"return_token_ids": False},
     lambda answer: answer["prompt_token_ids"] is answer["choices"][0]["token_ids"] is None),
    ("basic/test_return_token_ids.py::test_chat_completion_with_emoji_and_token_ids",
     CHAT | STREAM | {"return_token_ids": True},
     lambda chunks: [len(chunk.get("prompt_token_ids", "")) > 0 for chunk in chunks]
     == [True, False, False, False, False]
     and all(len(chunk["choices"][0]["token_ids"]) == 1 for chunk in chunks)),
    ("basic/test_return_token_ids.py::test_basic_completion_with_emoji",
     TEXT | {"logprobs": 1, "return_token_ids": True},
     lambda answer: answer["choices"][0]["prompt_token_ids"] == TEXT["prompt"]
     and len(answer["choices"][0]["token_ids"]) == 5),
    ("basic/test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs",
     TEXT | {"echo": True, "logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True,
             "return_tokens_as_token_ids": True},
     lambda answer: names_of(answer) == TEXT["prompt"] + answer["choices"][0]["token_ids"]),
    ("basic/test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs",
     TEXT | STREAM | {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True},
     lambda chunks: chunks[0]["choices"][0]["prompt_token_ids"] == TEXT["prompt"]
     and all(names_of(chunk) == chunk["choices"][0]["token_ids"] for chunk in chunks)),
    ("completion/test_completion.py::test_single_completion", TEXT,
     lambda answer: answer["choices"][0]["prompt_logprobs"] is None),
    ("completion/test_completion.py::test_prompt_logprobs_completion",
     TEXT | {"prompt": [[40, 41], [50]], "prompt_logprobs": 0},
     lambda answer: [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [2, 1]),
    ("chat_completion/test_chat.py::test_prompt_logprobs_chat", CHAT,
     lambda answer: answer["prompt_logprobs"] is None),
    ("chat_completion/test_chat.py::test_more_than_one_prompt_logprobs_chat",
     CHAT | {"prompt_logprobs": 2},
     lambda answer: 2 <= len(answer["prompt_logprobs"][3]) <= 3),
    ("chat_completion/test_chat_echo.py::"
     "test_chat_session_with_echo_and_continue_final_message",
     CONTINUED | {"echo": True},
     lambda answer: content_of([answer]).startswith(SAYING) and content_of([answer]) != SAYING),
    ("chat_completion/test_chat_echo.py::"
     "test_chat_session_with_echo_and_continue_final_message",
     CONTINUED | STREAM | {"echo": True, "n": 2},
     lambda chunks: [content_of(chunks, i).startswith(SAYING) for i in (0, 1)] == [True, True]
     and content_of(chunks).count(SAYING) == 1),
    ("chat_completion/test_chat_echo.py::"
     "test_chat_session_with_echo_and_continue_final_message",
     CONTINUED | {"echo": False}, lambda answer: SAYING not in content_of([answer])),
    *(("completion/test_completion.py::test_completion_truncation_side_controls_prompt_truncation",
       TEXT | {"prompt": PROMPT, "return_token_ids": True, "truncate_prompt_tokens": 4,
               "truncation_side": side, "echo": True, "logprobs": 0},
       lambda answer, kept=kept: answer["choices"][0]["prompt_token_ids"] == kept
       and len(answer["choices"][0]["logprobs"]["tokens"]) == 4 + 5)
      for side, kept in (("right", PROMPT[:4]), ("left", PROMPT[-4:]))),
    *(("chat_completion/test_chat_completion.py::"
       "test_chat_completion_truncation_side_controls_prompt_truncation",
       CHAT | {"max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 2,
               "truncation_side": side},
       lambda answer, kept=kept: answer["prompt_token_ids"] == kept)
      # The template begins with <|begin|><|user|> and ends with <|end|><|assistant|>.
      for side, kept in (("right", [0, 4]), ("left", [1, 5]))),
    ("chat_completion/test_chat_with_tool_reasoning.py::test_chat_full_of_tool_and_reasoning",
     CHAT, lambda answer: answer["choices"][0]["message"]["reasoning"] is None),
    ("chat_completion/test_logprob_token_ids.py::test_logprob_token_ids_returns_requested_ids",
     CHAT | {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [100, 1000, 500],
             "return_tokens_as_token_ids": True},
     lambda answer: [[told["token"] for told in entry["top_logprobs"]]
                     for entry in logprobs_of(answer)]
     == [["token_id:100", "token_id:1000", "token_id:500"]] * 5
     and all(-99 < t["logprob"] <= 0 for e in logprobs_of(answer) for t in e["top_logprobs"])),
    ("chat_completion/test_logprob_token_ids.py::test_logprob_token_ids_default_behavior_unchanged",
     CHAT | {"logprobs": True, "top_logprobs": 5},
     lambda answer: [len(entry["top_logprobs"]) for entry in logprobs_of(answer)] == [5] * 5),
    ("sampling_params.py::truncate_prompt_tokens",
     TEXT | {"truncate_prompt_tokens": 2, "return_token_ids": True},
     lambda answer: answer["choices"][0]["prompt_token_ids"] == TEXT["prompt"][1:]),
    ("renderers::truncation_side",
     TEXT | {"truncate_prompt_tokens": 2, "truncation_side": "right", "return_token_ids": True},
     lambda answer: answer["choices"][0]["prompt_token_ids"] == TEXT["prompt"][:2]),
    ("sampling_params.py::skip_special_tokens", TEXT | {"allowed_token_ids": [6]},
     lambda answer: answer["choices"][0]["text"] == ""),
    ("sampling_params.py::skip_special_tokens",
     TEXT | {"allowed_token_ids": [6], "skip_special_tokens": False},
     lambda answer: answer["choices"][0]["text"] == "<|style_json|>" * 5),
    ("chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_valid",
     CHAT | {"logit_bias": {str(VOCAB_SIZE - 1): 1.0}},
     lambda answer: answer["choices"][0]["message"]["content"] is not None),
]  # fmt: skip

REFUSED: list[tuple[str, Any, str, list[str]]] = [
    ("completion/test_completion.py::test_completion_stream_options",
     TEXT | {"stream_options": {"include_usage": True}}, "stream_options", []),
    ("completion/test_completion.py::test_completion_stream_options",
     TEXT | {"stream_options": {"continuous_usage_stats": True}}, "stream_options", []),
    ("chat_completion/test_chat.py::test_chat_completion_stream_options",
     CHAT | {"stream_options": {"include_usage": True}}, "stream_options", []),
    ("chat_completion/test_chat.py::test_long_seed", CHAT | {"seed": 2**63}, "seed", ["less than"]),
    ("chat_completion/test_chat.py::test_long_seed",
     CHAT | {"seed": -(2**63) - 1}, "seed", ["greater than or equal"]),
    ("chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_invalid",
     CHAT | {"logit_bias": {"7": 1, "2049": 1, "3000": 1}}, 'logit_bias["2049"]',
     ["2049", "3000", str(VOCAB_SIZE)]),
    ("chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_non_integer_key",
     CHAT | {"logit_bias": {"not_a_token_id": 50}}, 'logit_bias["not_a_token_id"]',
     ["logit_bias", "not_a_token_id"]),
    ("chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_non_numeric_value",
     CHAT | {"logit_bias": {"1": "not_a_number"}}, 'logit_bias["1"]', ["logit_bias"]),
    ("chat_completion/test_chat_logit_bias_validation.py::"
     "test_chat_logit_bias_multiple_non_integer_keys",
     CHAT | {"logit_bias": {"bad1": 50.0, "7": 1, "bad2": 20.0}}, 'logit_bias["bad1"]',
     ["bad1", "bad2"]),
    ("chat_completion/test_chat_stop_token_ids_validation.py::"
     "test_chat_stop_token_ids_out_of_vocab",
     CHAT | {"stop_token_ids": [2049]}, "stop_token_ids[0]", ["2049", str(VOCAB_SIZE)]),
    ("chat_completion/test_logprob_token_ids_validation.py::"
     "test_rejects_token_ids_without_logprobs",
     CHAT | {"logprob_token_ids": [100]}, "logprob_token_ids", ["logprobs"]),
    ("chat_completion/test_logprob_token_ids_validation.py::"
     "test_rejects_token_ids_without_logprobs",
     TEXT | {"logprob_token_ids": [100]}, "logprob_token_ids", ["logprobs"]),
    ("sampling_params.py::_validate_logprobs",
     TEXT | {"logprobs": 0, "logprob_token_ids": [7, 2048]}, "logprob_token_ids[1]",
     ["2048", "out of vocabulary"]),
    ("completion/test_prompt_validation.py::test_empty_prompt", TEXT | {"prompt": ""}, "prompt",
     ["prompt", "empty"]),
    ("completion/test_prompt_validation.py::test_empty_prompt", TEXT | {"prompt": [[7], []]},
     "prompt[1]", ["prompt[1]", "empty"]),
    ("completion/test_empty_prompt_list.py::test_empty_prompt_list_rejected",
     TEXT | {"prompt": []}, "prompt", ["prompt", "empty"]),
    ("sampling_params.py::thinking_token_budget: the model does not reason",
     CHAT | {"thinking_token_budget": 5}, "thinking_token_budget", ["reasoning"]),
    ("sampling_params.py::bad_words", TEXT | {"bad_words": [""]}, "bad_words[0]", []),
    ("completion/test_beam_search: a stream",
     TEXT | STREAM | {"use_beam_search": True, "n": 2}, "stream", ["use_beam_search"]),
    ("completion/test_prompt_validation.py::test_out_of_vocab_token_ids",
     TEXT | {"prompt": [999999]}, "prompt", ["999999", "out of vocabulary", str(VOCAB_SIZE)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "claim"), [row[1:] for row in ANSWERED], ids=[row[0] for row in ANSWERED]
)
def test_the_peers_request_is_answered_as_the_peer_answers_it(product, body, claim) -> None:
    status, answer = ask(product, body)
    assert status == 200, answer
    assert claim(answer), answer


@pytest.mark.parametrize(
    ("body", "param", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_the_peers_request_is_refused_by_what_is_wrong_with_it(product, body, param, words) -> None:
    status, answer = ask(product, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert [word for word in words if word not in answer["error"]["message"]] == []
    assert product.engines.asked == []


# ---- beside the answer without the field ----


def text_of(product: Product, **fields: Any) -> str:
    status, answer = ask(product, TEXT | {"max_tokens": 12} | fields)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def test_a_stop_string_is_part_of_the_text_where_that_is_asked_for(product) -> None:
    plain = text_of(product)
    stop = plain[4:6]
    end = plain.index(stop)
    assert text_of(product, stop=[stop]) == plain[:end]
    shown = text_of(product, stop=[stop], include_stop_str_in_output=True)
    assert shown == plain[: end + len(stop)]


def test_a_bad_word_is_not_said(product) -> None:
    status, answer = ask(product, TEXT | {"max_tokens": 12, "return_token_ids": True})
    assert status == 200
    tokenizer = product.gateway.bases.default.tokenizer
    words = [tokenizer.decode([token]) for token in answer["choices"][0]["token_ids"]]
    word = next(w for w in words if w.strip() and len(tokenizer.encode(w)) == 1)
    assert word in text_of(product)
    assert word not in text_of(product, bad_words=[word])


def test_beams_are_the_answers_that_are_likeliest_as_a_whole(product) -> None:
    def scores(**fields: Any) -> list[float]:
        status, answer = ask(product, TEXT | {"logprobs": 0, "ignore_eos": True} | fields)
        assert status == 200, answer
        return [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]

    beams, (greedy,) = scores(n=4, use_beam_search=True), scores()
    assert beams == sorted(beams, reverse=True)
    assert beams[0] >= greedy
    assert len(set(beams)) == 4


# ---- numbers ----

CPU_AND_DEVICE = pytest.mark.parametrize(
    "core", [None, fake_backend], ids=["cpu", "device"], indirect=True
)


@CPU_AND_DEVICE
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_logprobs_and_ranks_of_a_prompt_are_those_of_transformers(product, oracle, kind) -> None:
    said = {"messages": [{"role": "user", "content": "]zQ vv{K#"}], "max_tokens": 1}
    body = TEXT | {"prompt": PROMPT} if kind == "text" else said
    status, answer = ask(product, body | {"prompt_logprobs": 2, "return_token_ids": True})
    assert status == 200, answer
    shown = answer["choices"][0] if kind == "text" else answer
    token_ids, (nothing, *entries) = shown["prompt_token_ids"], shown["prompt_logprobs"]
    assert nothing is None
    ranks = []
    for token_id, entry, row in zip(token_ids[1:], entries, oracle(token_ids), strict=False):
        places = {token_id: 1 + int((row > row[token_id]).sum())}
        places |= {int(i): place for place, i in enumerate(row.topk(2).indices, start=1)}
        assert {int(i): told["rank"] for i, told in entry.items()} == places
        for i, told in entry.items():
            assert told["logprob"] == pytest.approx(row[int(i)].item(), abs=1e-4)
        ranks.append(places[token_id])
    assert max(ranks) > 100, "every token was one of the likeliest"


@CPU_AND_DEVICE
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_given_tokens_are_those_of_transformers(product, oracle, stream) -> None:
    given = [1999, 3, 700, *range(100, 225)]
    asked = {"logprobs": True, "logprob_token_ids": given, "return_token_ids": True}
    status, answer = ask(product, CHAT | asked | {"stream": stream})
    assert status == 200, answer
    first, choices = (answer[0] if stream else answer), [answer] if not stream else answer
    choices = [part["choices"][0] for part in choices]
    prompt, said = first["prompt_token_ids"], sum((c["token_ids"] for c in choices), [])
    entries = sum((choice["logprobs"]["content"] for choice in choices), [])
    assert len(entries) == len(said) == 5
    rows = oracle(prompt + said)[len(prompt) - 1 :]
    texts = product.gateway.bases.default.tokenizer.vocabulary
    for token_id, entry, row in zip(said, entries, rows, strict=False):
        assert entry["logprob"] == pytest.approx(row[token_id].item(), abs=1e-4)
        told = entry["top_logprobs"]
        assert [one["logprob"] for one in told] == pytest.approx(row[given].tolist(), abs=1e-4)
        assert [bytes(one["bytes"] or ()) for one in told] == [texts[i] for i in given]
