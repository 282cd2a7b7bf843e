"""Long prompts over HTTP: a request is charged before work is done for it, and refused by bytes."""

from dataclasses import replace
from typing import Any

import pytest

from server.limits.memory import MemoryLimiter
from tests.server.bases import change_base
from tests.server.factories import NOW_MS
from tests.server.in_process import InProcess

SPACES = " " * 3_500_000
TOO_LONG = "Good day to you. " * 300
"""More characters than are tokenized inline; few enough bytes to have to be tokenized."""


class CountingTokenizer:
    """The demo's tokenizer, which notes the length of each text that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        self.encoded.append(len(text))
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def product(product: InProcess) -> InProcess:
    """A gateway whose limiter's clock stands still, so that no limit refills while a test runs."""
    tokenizer: Any = CountingTokenizer(product.gateway.bases.default.tokenizer)
    change_base(product.gateway, tokenizer=tokenizer)
    product.gateway = replace(product.gateway, limiter=MemoryLimiter(lambda: NOW_MS))
    return product


def encoded(product: InProcess) -> list[int]:
    counting: Any = product.gateway.bases.default.tokenizer
    return counting.encoded


def codes(answers: list[Any]) -> list[str]:
    return [answer.json()["error"]["code"] for answer in answers]


def test_a_text_that_cannot_fit_by_its_bytes_is_charged_and_never_tokenized(product) -> None:
    user = product.user("greedy", requests_per_minute=5)
    answers = [user.complete("base", prompt=SPACES) for _ in range(6)]
    assert codes(answers) == ["context_length_exceeded"] * 5 + ["rate_limit_exceeded"]
    assert encoded(product) == []


def test_a_chat_is_measured_as_its_template_renders_it(product) -> None:
    user = product.user("greedy")
    ask = {"model": "base", "messages": [{"role": "user", "content": "x" * 3_500_000}]}
    assert codes([user.call("POST", "/v1/chat/completions", ask)]) == ["context_length_exceeded"]
    assert encoded(product) == []


def test_a_prompt_that_is_tokenized_and_then_refused_has_used_a_request(product) -> None:
    user = product.user("greedy", requests_per_minute=2, max_concurrency=1)
    answers = [user.complete("base", prompt=TOO_LONG) for _ in range(3)]
    assert codes(answers) == ["context_length_exceeded"] * 2 + ["rate_limit_exceeded"]
    assert encoded(product) == [len(TOO_LONG)] * 2


def test_a_prompt_whose_bytes_exceed_what_is_left_of_the_tokens_is_not_tokenized(product) -> None:
    user = product.user("greedy", tokens_per_minute=300)
    assert user.complete("base", prompt="Hi", max_tokens=200).status_code == 200
    answer = user.complete("base", prompt=TOO_LONG, truncate_prompt_tokens=5)
    assert codes([answer]) == ["rate_limit_exceeded"]
    assert encoded(product) == [2]


def test_a_long_prompt_that_is_served_is_charged_once(product) -> None:
    user = product.user("good", requests_per_minute=9, tokens_per_minute=9000, max_concurrency=3)
    answer = user.complete("base", prompt=TOO_LONG, truncate_prompt_tokens=100)
    assert answer.status_code == 200
    message = product.engines.asked[-1]
    assert message.num_prompt_tokens == 100
    assert answer.headers["x-ratelimit-remaining-requests"] == "8"
    again = user.complete("base", prompt="Hi")
    assert again.headers["x-ratelimit-remaining-requests"] == "7"
