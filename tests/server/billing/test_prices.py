import shutil
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from typing import get_args

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.messages import StopCause
from registry.tables import audit_log
from server.accounts.tables import tenants
from server.billing.prices import (
    DEFAULT_PRICES,
    SCOPES,
    add_price,
    ensure_price,
    get_price,
    list_prices,
    price_for,
    prices_for,
)
from server.billing.rating import (
    TokenPrices,
    amount_nanousd,
    format_usd,
    hourly_pin_nanousd,
    is_billable,
    monthly_storage_nanousd,
    rated_amounts,
)
from tests.registry.rows import add_version
from tests.server.factories import NOW_MS, make_price, make_tenant
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
        ("error", "constraint_too_slow", True),
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
    for completion_tokens in (0, 5):  # some tokens may have been generated before a preemption
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
    assert database.read_sync(lambda c: price_for(c, NOW_MS + 9)) == old
    assert database.read_sync(lambda c: price_for(c, NOW_MS + 10)) == new
    assert database.read_sync(lambda c: get_price(c, old.price_version)) == old
    assert database.read_sync(lambda c: list_prices(c, 9)) == [new, old]
    assert (new.pinned_nanousd, new.storage_nanousd) == (7, old.storage_nanousd)


# ---- the price that applies ----

TENANTS = {"t1": "gold", "t2": "gold", "t3": "iron"}
ADAPTERS = ("a1", "a2")
IDS = {"default": [""], "plan": ["gold", "iron"], "tenant": list(TENANTS), "adapter": ADAPTERS}


@st.composite
def versions(draw):
    """(scope, scope_id, from, until); times are small, so that many are equal."""
    scope = draw(st.sampled_from(SCOPES))
    at = draw(st.integers(0, 9))
    until = draw(st.none() | st.integers(at + 1, 11)) if scope != "default" else None
    return scope, draw(st.sampled_from(IDS[scope])), at, until


def model_price(book, at, tenant_id, adapter_id):
    """Number of the version that applies: the newest of the narrowest scope, unless it is over."""
    owners = ("adapter", adapter_id), ("tenant", tenant_id), ("plan", TENANTS.get(tenant_id))
    for owner in (*owners, ("default", "")):
        begun = [(v[2], number, v[3]) for number, v in enumerate(book) if v[:2] == owner]
        begun = [version for version in begun if version[0] <= at]
        if begun and (max(begun)[2] is None or at < max(begun)[2]):
            return max(begun)[1]
    raise AssertionError("the default has no end")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(book=st.lists(versions(), max_size=12), at=st.integers(0, 12))
def test_the_narrowest_scope_that_has_a_price_counts(sqlite_database, book, at):
    book = [("default", "", 0, None), *book]
    with sqlite_database.engine.execution_options(chorale_writes=True).connect() as conn:
        for tenant_id, plan in TENANTS.items():
            values = {"tenant_id": tenant_id, "name": tenant_id, "plan": plan, "status": "active"}
            values |= {"weight": 1.0, "cache_salt": "", "created_at_ms": 0}
            conn.execute(sa.insert(tenants).values(values))
        made = [
            add_price(conn, DEFAULT_PRICES, scope=scope, scope_id=scope_id, until_ms=until,
                      effective_at_ms=begin, now_ms=0)
            for scope, scope_id, begin, until in book
        ]  # fmt: skip
        for tenant_id in (None, *TENANTS):
            for adapter_id in (None, *ADAPTERS):
                found = price_for(conn, at, tenant_id=tenant_id, adapter_id=adapter_id)
                assert found == made[model_price(book, at, tenant_id, adapter_id)]
            if tenant_id:
                several = prices_for(conn, at, tenant_id=tenant_id, adapter_ids=ADAPTERS)
                assert several == {
                    adapter_id: price_for(conn, at, tenant_id=tenant_id, adapter_id=adapter_id)
                    for adapter_id in ADAPTERS
                }
        conn.rollback()


def test_a_price_of_each_scope_counts_on_both_databases(database):
    make_price(database)
    tenant = make_tenant(database, plan="gold")
    asked = {"tenant_id": tenant.tenant_id, "adapter_id": "a1"}
    found = []
    for scope, scope_id in (("plan", "gold"), ("tenant", tenant.tenant_id), ("adapter", "a1")):
        database.write_sync(
            lambda c, scope=scope, scope_id=scope_id: add_price(
                c, DEFAULT_PRICES, scope=scope, scope_id=scope_id, effective_at_ms=NOW_MS,
                until_ms=NOW_MS + 5, now_ms=NOW_MS,
            )
        )  # fmt: skip
        found.append(database.read_sync(lambda c: price_for(c, NOW_MS + 4, **asked)).scope)
    assert found == ["plan", "tenant", "adapter"]
    assert database.read_sync(lambda c: price_for(c, NOW_MS + 5, **asked)).scope == "default"
    assert database.read_sync(lambda c: price_for(c, NOW_MS, plan="gold")).scope == "plan"


def test_a_price_of_the_past_cannot_be_added(database):
    with pytest.raises(AssertionError):
        database.write_sync(
            lambda c: add_price(c, DEFAULT_PRICES, effective_at_ms=NOW_MS - 1, now_ms=NOW_MS)
        )


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
    """A GB costs ten cents for 30 days in the store and four cents for an hour on a device."""
    assert monthly_storage_nanousd(10**9, DEFAULT_PRICES) == pytest.approx(10**8, rel=0.001)
    assert hourly_pin_nanousd(10**9, DEFAULT_PRICES) == 4 * 10**7


# ---- over HTTP ----


@pytest.fixture
def product(migrated_sqlite, tmp_path):
    product = InProcess.build(tmp_path, f"sqlite:///{shutil.copy(migrated_sqlite, tmp_path)}")
    yield product
    product.close()


@pytest.fixture
def operator(product):
    return product.operator


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
    [
        {"pinned_nanousd": -1},
        {"storage_nanousd": 10**12 + 1},
        {"effective_at": 1},
        {"prompt": 1},
        {"until": 2**32},  # the default has no end
        {"until": 1, "scope": "plan", "scope_id": "gold"},
        {"scope": "city"},
        {"scope_id": "gold"},
        {"scope_id": "No Plan", "scope": "plan"},
    ],
    ids=str,
)
def test_a_price_that_cannot_be_is_refused(operator, body):
    answer = operator.call("POST", "/admin/v1/prices", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(body))
    assert len(operator.call("GET", "/admin/v1/prices").json()["data"]) == 1


def test_a_scope_has_prices_of_its_own_until_they_end(product):
    operator, acme, globex = product.operator, product.user("acme"), product.user("globex")
    operator.call("PATCH", "/admin/v1/tenants/acme", {"plan": "gold"})
    assert operator.call("GET", "/admin/v1/tenants/acme").json()["plan"] == "gold"
    plan = {"scope": "plan", "scope_id": "gold", "prompt_nanousd": 100, "storage_nanousd": 7}
    operator.call("POST", "/admin/v1/prices", plan)
    at, until = 2**32, 2**32 + 60
    body = {"scope": "tenant", "scope_id": "acme", "prompt_nanousd": 5}
    own = operator.call("POST", "/admin/v1/prices", body | {"effective_at": at, "until": until})
    assert own.status_code == 201
    own = own.json()
    assert (own["scope"], own["scope_id"], own["until"]) == ("tenant", acme.tenant_id, until)
    # Prices that were not named are the plan's.
    assert (own["prompt_nanousd"], own["storage_nanousd"]) == (5, 7)

    def prompt_price(user, at_s):
        return product.gateway.database.read_sync(
            lambda c: price_for(c, at_s * 1000, tenant_id=user.tenant_id).prompt_nanousd
        )

    assert [prompt_price(acme, at_s) for at_s in (at - 1, at, until)] == [100, 5, 100]
    assert prompt_price(globex, at) == DEFAULT_PRICES.prompt_nanousd
    asked = f"/admin/v1/prices?scope=tenant&scope_id={acme.tenant_id}"
    assert operator.call("GET", asked).json()["data"] == [own]


@pytest.mark.parametrize("scope", ["tenant", "adapter"])
def test_a_price_for_nobody_is_refused(operator, scope):
    body = {"scope": scope, "scope_id": "nobody"}
    answer = operator.call("POST", "/admin/v1/prices", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, f"{scope}_not_found")


def test_a_request_is_held_at_the_price_of_its_adapter(product):
    acme = product.user("acme")
    base_revision = product.gateway.bases.default.model.base_revision
    product.gateway.database.write_sync(
        lambda c: add_version(c, acme.tenant_id, "pirate", 1, base_revision=base_revision)
    )
    acme.call("PUT", "/v1/adapters/pirate/aliases/latest", {"version": 1})
    adapter_id = acme.call("GET", "/v1/adapters/pirate").json()["adapter_id"]
    body = {"scope": "adapter", "scope_id": adapter_id, "completion_nanousd": 9000}
    priced = product.operator.call("POST", "/admin/v1/prices", body | {"storage_nanousd": 10**12})
    version = priced.json()["price_version"]
    assert acme.complete("pirate").json()["usage"]["x_chorale"]["price_version"] == version
    assert acme.complete("base").json()["usage"]["x_chorale"]["price_version"] != version
    shown = acme.call("GET", "/v1/adapters/pirate").json()["latest"]
    dearer = replace(DEFAULT_PRICES, storage_nanousd=10**12)
    expected = monthly_storage_nanousd(shown["size_bytes"], dearer)
    assert shown["passport"]["storage_nanousd_per_month"] == expected
