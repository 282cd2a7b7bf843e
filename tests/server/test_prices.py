import shutil
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from typing import get_args

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import StopCause
from registry.tables import audit_log
from server.prices import (
    DEFAULT_PRICES,
    add_price,
    current_price,
    ensure_price,
    get_price,
    list_prices,
)
from server.rating import (
    TokenPrices,
    amount_nanousd,
    format_usd,
    hourly_pin_nanousd,
    is_billable,
    monthly_storage_nanousd,
    rated_amounts,
)
from tests.server.factories import NOW_MS
from tests.server.in_process import InProcess

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
            assert rated_amounts(reason, cause, 7, 0, 0, DEFAULT_PRICES).total == 0
    some = rated_amounts("abort", "deadline", 7, 2, 1, DEFAULT_PRICES).total
    assert some == amount_nanousd(7, 2, 1, DEFAULT_PRICES)
    assert rated_amounts("error", "engine_failure", 7, 2, 1, DEFAULT_PRICES).total == 0


ADAPTER_FAILURES = [cause for cause in get_args(StopCause) if cause.startswith("adapter_")]


@pytest.mark.parametrize("cause", ADAPTER_FAILURES)
def test_an_adapter_that_cannot_be_served_costs_nothing(cause):
    for completion_tokens in (0, 5):  # after a preemption some may have been generated
        ended = rated_amounts("error", cause, 7, 2, completion_tokens, DEFAULT_PRICES)
        assert ended.total == 0


def test_a_new_database_gets_one_default_price(database):
    first = database.write_sync(lambda c: ensure_price(c, NOW_MS))
    again = database.write_sync(lambda c: ensure_price(c, NOW_MS + 1))
    assert first == again
    assert first.completion_nanousd == DEFAULT_PRICES.completion_nanousd


def test_a_price_takes_effect_at_its_time_and_older_versions_stay(database):
    old = database.write_sync(lambda c: ensure_price(c, NOW_MS))
    dearer = replace(DEFAULT_PRICES, prompt_nanousd=1000, pinned_nanousd=7)
    new = database.write_sync(
        lambda c: add_price(c, dearer, effective_at_ms=NOW_MS + 10, now_ms=NOW_MS)
    )
    assert database.read_sync(lambda c: current_price(c, NOW_MS + 9)) == old
    assert database.read_sync(lambda c: current_price(c, NOW_MS + 10)) == new
    assert database.read_sync(lambda c: get_price(c, old.price_version)) == old
    assert database.read_sync(lambda c: list_prices(c, 9)) == [new, old]
    assert (new.pinned_nanousd, new.storage_nanousd) == (7, old.storage_nanousd)


sizes = st.integers(0, 2**40)
kept = st.builds(
    lambda storage, pinned: replace(DEFAULT_PRICES, storage_nanousd=storage, pinned_nanousd=pinned),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
)


@given(sizes, kept)
def test_what_is_kept_costs_its_share_of_a_gb_to_the_nearest_nanodollar(size_bytes, price):
    def exact(nanousd):
        share = Decimal(size_bytes) * nanousd / 10**9
        return int(share.quantize(Decimal(1), rounding=ROUND_HALF_UP))

    assert hourly_pin_nanousd(size_bytes, price) == exact(price.pinned_nanousd)
    assert monthly_storage_nanousd(size_bytes, price) == exact(price.storage_nanousd * 720)


def test_the_default_prices_are_those_of_public_lists():
    """A GB: ten cents for 30 days in the store, four for an hour on a device."""
    assert monthly_storage_nanousd(10**9, DEFAULT_PRICES) == pytest.approx(10**8, rel=0.001)
    assert hourly_pin_nanousd(10**9, DEFAULT_PRICES) == 4 * 10**7


# ---- over HTTP ----


@pytest.fixture
def operator(migrated_sqlite, tmp_path):
    product = InProcess.build(tmp_path, f"sqlite:///{shutil.copy(migrated_sqlite, tmp_path)}")
    yield product.operator
    product.close()


def test_an_operator_sets_prices_and_what_is_not_named_stays(operator):
    body = {"prompt_nanousd": 200, "cached_nanousd": 100, "completion_nanousd": 800}
    made = operator.call("POST", "/admin/v1/prices", body)
    assert made.status_code == 201
    again = operator.call("POST", "/admin/v1/prices", {"pinned_nanousd": 9}).json()
    assert {name: again[name] for name in body} == body
    assert (again["storage_nanousd"], again["pinned_nanousd"]) == (139_000, 9)
    listed = operator.call("GET", "/admin/v1/prices").json()["data"]
    assert [price["price_version"] for price in listed] == [3, 2, 1]
    assert listed[0] == again
    logged = operator.product.gateway.database.read_sync(
        lambda conn: conn.execute(sa.select(audit_log.c.target, audit_log.c.detail)).all()
    )
    assert [row.target for row in logged] == ["1", "2", "3"]
    assert "pinned_nanousd=9" in logged[-1].detail


@pytest.mark.parametrize(
    "body",
    [{"pinned_nanousd": -1}, {"storage_nanousd": 10**12 + 1}, {"effective_at": 1}, {"prompt": 1}],
    ids=str,
)
def test_a_price_that_cannot_be_is_refused(operator, body):
    answer = operator.call("POST", "/admin/v1/prices", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(body))
    assert len(operator.call("GET", "/admin/v1/prices").json()["data"]) == 1
