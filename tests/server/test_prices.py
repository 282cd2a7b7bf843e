from decimal import Decimal
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import StopCause
from server.prices import (
    DEFAULT_PRICES,
    TokenPrices,
    add_price,
    amount_nanousd,
    current_price,
    ensure_price,
    format_usd,
    get_price,
    is_billable,
    rated_nanousd,
)
from tests.server.factories import NOW_MS

counts = st.integers(0, 2**31 - 1)
rates = st.integers(0, 10**6)
books = st.builds(TokenPrices, prompt_nanousd=rates, cached_nanousd=rates, completion_nanousd=rates)


@given(counts, counts, counts, books)
def test_the_amount_is_the_sum_of_its_components(uncached, cached, completion, price):
    amount = amount_nanousd(uncached + cached, cached, completion, price)
    parts = [
        amount_nanousd(uncached, 0, 0, price),
        amount_nanousd(cached, cached, 0, price),
        amount_nanousd(0, 0, completion, price),
    ]
    assert amount == sum(parts)
    dollars = (
        Decimal(uncached) * Decimal(price.prompt_nanousd)
        + Decimal(cached) * Decimal(price.cached_nanousd)
        + Decimal(completion) * Decimal(price.completion_nanousd)
    ) / Decimal(10**9)
    assert Decimal(format_usd(amount)) == dollars


@given(counts, counts, counts, books)
def test_a_cached_token_is_priced_once(prompt, cached, completion, price):
    cached = min(cached, prompt)
    difference = amount_nanousd(prompt, 0, completion, price) - amount_nanousd(
        prompt, cached, completion, price
    )
    assert difference == cached * (price.prompt_nanousd - price.cached_nanousd)


@given(st.integers(-(2**63), 2**63))
def test_dollars_are_exact(nanousd):
    assert Decimal(format_usd(nanousd)) * 10**9 == nanousd
    assert "e" not in format_usd(nanousd).lower()


def test_more_cached_than_prompt_is_a_bug_not_a_discount():
    with pytest.raises(AssertionError):
        amount_nanousd(1, 2, 0, DEFAULT_PRICES)


@pytest.mark.parametrize(
    ("finish_reason", "stop_cause", "billed"),
    [
        ("stop", "eos", True),
        ("length", "max_tokens", True),
        ("length", "budget", True),
        ("abort", "aborted", True),
        ("abort", "deadline", True),
        ("error", "deadline", True),
        ("abort", "gateway_lost", False),
        ("error", "engine_failure", False),
        ("error", "adapter_loading", False),
        ("error", "aborted", False),
    ],
)
def test_what_we_broke_is_free_and_what_the_client_stopped_is_not(
    finish_reason, stop_cause, billed
):
    assert is_billable(finish_reason, stop_cause) == billed


def test_a_deadline_before_the_first_token_is_free():
    for cause in ("deadline", "first_token_timeout"):
        for reason in ("abort", "length", "error"):
            assert rated_nanousd(reason, cause, 7, 0, 0, DEFAULT_PRICES) == 0
    some = rated_nanousd("abort", "deadline", 7, 2, 1, DEFAULT_PRICES)
    assert some == amount_nanousd(7, 2, 1, DEFAULT_PRICES)
    assert rated_nanousd("error", "engine_failure", 7, 2, 1, DEFAULT_PRICES) == 0


ADAPTER_FAILURES = [cause for cause in get_args(StopCause) if cause.startswith("adapter_")]


@pytest.mark.parametrize("cause", ADAPTER_FAILURES)
def test_an_adapter_that_cannot_be_served_costs_nothing(cause):
    for completion_tokens in (0, 5):  # after a preemption some may have been generated
        assert rated_nanousd("error", cause, 7, 2, completion_tokens, DEFAULT_PRICES) == 0


def test_a_new_database_gets_one_default_price(database):
    first = database.write_sync(lambda c: ensure_price(c, NOW_MS))
    again = database.write_sync(lambda c: ensure_price(c, NOW_MS + 1))
    assert first == again
    assert first.completion_nanousd == DEFAULT_PRICES.completion_nanousd


def test_a_price_takes_effect_at_its_time_and_older_versions_stay(database):
    old = database.write_sync(lambda c: ensure_price(c, NOW_MS))
    dearer = TokenPrices(prompt_nanousd=1000, cached_nanousd=1, completion_nanousd=2)
    new = database.write_sync(
        lambda c: add_price(c, dearer, effective_at_ms=NOW_MS + 10, now_ms=NOW_MS)
    )
    assert database.read_sync(lambda c: current_price(c, NOW_MS + 9)) == old
    assert database.read_sync(lambda c: current_price(c, NOW_MS + 10)) == new
    assert database.read_sync(lambda c: get_price(c, old.price_version)) == old
