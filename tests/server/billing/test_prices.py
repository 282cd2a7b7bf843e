import re
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from registry.tables import audit_log
from server.accounts.tables import tenants
from server.billing import prices
from server.billing.base_revisions import name_base
from server.billing.prices import (
    DEFAULT_PRICES,
    SCOPES,
    add_price,
    ensure_price,
    price_for,
    prices_for,
)
from server.billing.rating import (
    amount_nanousd,
    format_usd,
    hourly_pin_nanousd,
    monthly_storage_nanousd,
)
from server.billing.storage_stretches import Stretch, drafts_of
from tests.registry.rows import add_version
from tests.server.factories import NOW_MS, make_price, make_tenant


@given(st.integers(-(2**63), 2**63))
def test_dollars_are_exact(nanousd):
    assert Decimal(format_usd(nanousd)) * 10**9 == nanousd
    assert "e" not in format_usd(nanousd).lower()


def test_more_cached_than_prompt_is_a_bug_not_a_discount():
    with pytest.raises(AssertionError):
        amount_nanousd(1, 2, 0, DEFAULT_PRICES)


def test_a_new_database_gets_one_default_price(each_database):
    first = each_database.write_sync(lambda c: ensure_price(c, NOW_MS))
    again = each_database.write_sync(lambda c: ensure_price(c, NOW_MS + 1))
    assert first == again
    assert first.completion_nanousd == DEFAULT_PRICES.completion_nanousd


# ---- the price that applies ----

TENANTS = {"t1": "gold", "t2": "gold", "t3": "iron"}
BASES = ("small", "org/large")
ADAPTERS = {"a1": "small", "a2": "org/large", "unknown": ""}
IDS = {"default": [""], "plan": ["gold", "iron"], "tenant": list(TENANTS)}
IDS |= {"adapter": list(ADAPTERS)}


@st.composite
def versions(draw):
    """(scope, scope_id, base, from, until); times are small, so that many are equal."""
    scope = draw(st.sampled_from(SCOPES))
    base = draw(st.sampled_from(("", *BASES))) if scope != "adapter" else ""
    at = draw(st.integers(0, 9))
    has_end = (scope, base) != ("default", "")
    until = draw(st.none() | st.integers(at + 1, 11)) if has_end else None
    return scope, draw(st.sampled_from(IDS[scope])), base, at, until


def model_price(book, at, tenant_id, adapter_id, base):
    """Number of the version that applies: the newest of the narrowest, unless it is over."""
    plan = TENANTS.get(tenant_id)
    narrowest_first = [("adapter", adapter_id, "")]
    if base:
        narrowest_first += [
            ("tenant", tenant_id, base),
            ("plan", plan, base),
            ("default", "", base),
        ]
    narrowest_first += [("tenant", tenant_id, ""), ("plan", plan, ""), ("default", "", "")]
    for owner in narrowest_first:
        begun = [(v[3], number, v[4]) for number, v in enumerate(book) if v[:3] == owner]
        begun = [version for version in begun if version[0] <= at]
        if begun and (max(begun)[2] is None or at < max(begun)[2]):
            return max(begun)[1]
    raise AssertionError("the default has no end")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(book=st.lists(versions(), max_size=12), at=st.integers(0, 12))
def test_the_narrowest_scope_that_has_a_price_counts(sqlite_database, book, at):
    book = [("default", "", "", 0, None), *book]
    with sqlite_database.engine.execution_options(chorale_writes=True).connect() as conn:
        for tenant_id, plan in TENANTS.items():
            values = {"tenant_id": tenant_id, "name": tenant_id, "plan": plan, "status": "active"}
            values |= {"weight": 1.0, "cache_salt": "", "created_at_ms": 0}
            conn.execute(sa.insert(tenants).values(values))
        add_versions_of(conn, ADAPTERS)
        made = [
            add_price(conn, DEFAULT_PRICES, scope=scope, scope_id=scope_id, base_model=base,
                      until_ms=until, effective_at_ms=begin, now_ms=0)
            for scope, scope_id, base, begin, until in book
        ]  # fmt: skip
        for tenant_id in (None, *TENANTS):
            for adapter_id, base in (
                (None, ""),
                *((None, base) for base in BASES),
                *ADAPTERS.items(),
            ):
                asked = {"tenant_id": tenant_id, "adapter_id": adapter_id, "base_model": base}
                expected = made[model_price(book, at, tenant_id, adapter_id, base)]
                assert price_for(conn, at, **asked) == expected
            if tenant_id:
                several = prices_for(conn, at, tenant_id=tenant_id, adapter_ids=ADAPTERS)
                assert several == {
                    adapter_id: made[model_price(book, at, tenant_id, adapter_id, base)]
                    for adapter_id, base in ADAPTERS.items()
                }
        conn.rollback()


def add_versions_of(conn, adapters):
    """Insert versions of adapters {adapter_id: base}; the older one is of another base model."""
    for adapter_id, base in adapters.items():
        name_base(conn, f"old {adapter_id}", "forgotten")
        if base:
            name_base(conn, f"new {adapter_id}", base)
        add_version(conn, name=adapter_id, base_revision=f"old {adapter_id}", adapter_id=adapter_id)
        add_version(
            conn, name=adapter_id, version=2, base_revision=f"new {adapter_id}",
            adapter_id=adapter_id,
        )  # fmt: skip


def test_a_request_finds_its_price_by_seven_look_ups_in_one_index(sqlite_database):
    with sqlite_database.engine.connect() as conn:
        names = ("tenant_id", "plan", "adapter_id", "base_model")
        asked = prices._NEWEST_OF_EACH_SCOPE.params(at_ms=0, **dict.fromkeys(names, "x"))
        query = asked.compile(conn, compile_kwargs={"literal_binds": True})
        plan = conn.execute(sa.text(f"EXPLAIN QUERY PLAN {query}"))
        steps = [row.detail for row in plan if "price_versions" in row.detail]
    assert len(steps) == 7
    for step in steps:
        assert "ix_price_versions_scope_scope_id_base_model_effective_at_ms" in step
        assert "base_model=? AND effective_at_ms<?" in step


def test_a_price_of_each_scope_counts_on_both_databases(each_database):
    make_price(each_database)
    tenant = make_tenant(each_database, plan="gold")
    asked = {"tenant_id": tenant.tenant_id, "adapter_id": "a1"}
    found = []
    for scope, scope_id in (("plan", "gold"), ("tenant", tenant.tenant_id), ("adapter", "a1")):
        each_database.write_sync(
            lambda c, scope=scope, scope_id=scope_id: add_price(
                c, DEFAULT_PRICES, scope=scope, scope_id=scope_id, effective_at_ms=NOW_MS,
                until_ms=NOW_MS + 5, now_ms=NOW_MS,
            )
        )  # fmt: skip
        found.append(each_database.read_sync(lambda c: price_for(c, NOW_MS + 4, **asked)).scope)
    assert found == ["plan", "tenant", "adapter"]
    assert each_database.read_sync(lambda c: price_for(c, NOW_MS + 5, **asked)).scope == "default"
    assert each_database.read_sync(lambda c: price_for(c, NOW_MS, plan="gold")).scope == "plan"


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
    assert not re.search(r"_ms=|None", logged[-1].detail)


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
        {"base_model": "x" * 257},
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


def test_a_base_model_and_its_adapters_have_prices_of_their_own(product):
    acme, globex, operator = product.user("acme"), product.user("globex"), product.operator
    base_revision = product.gateway.bases.default.model.base_revision
    adapter_id = product.gateway.database.write_sync(
        lambda c: add_version(c, acme.tenant_id, "pirate", base_revision=base_revision)
    )

    def add(**body):
        made = operator.call("POST", "/admin/v1/prices", body)
        assert made.status_code == 201, made.text
        return made.json()

    def version_of(user, model):
        return user.complete(model).json()["usage"]["x_chorale"]["price_version"]

    of_tenant = add(scope="tenant", scope_id="acme", prompt_nanousd=5)
    product.gateway.database.write_sync(lambda c: name_base(c, "r" * 64, "another"))
    add(base_model="another", prompt_nanousd=1)
    assert version_of(acme, "base") == of_tenant["price_version"]
    of_base = add(base_model="base", prompt_nanousd=900, storage_nanousd=10**12)
    assert (of_base["base_model"], of_base["scope_id"]) == ("base", None)
    asked = [(acme, "base"), (acme, "pirate"), (globex, "base")]
    assert {version_of(*each) for each in asked} == {of_base["price_version"]}
    both = add(base_model="base", scope="tenant", scope_id="acme", completion_nanousd=7)
    assert both["prompt_nanousd"] == 900, "what is not named is as for the base model before"
    assert [version_of(*each) for each in asked[1:]] == [
        both["price_version"], of_base["price_version"],
    ]  # fmt: skip
    shown = acme.call("GET", "/v1/adapters/pirate").json()["latest"]
    assert shown["passport"]["storage_nanousd_per_month"] == shown["size_bytes"] * 720 * 1000
    of_adapter = add(scope="adapter", scope_id=adapter_id, cached_nanousd=1)
    assert of_adapter["completion_nanousd"] == 7
    assert version_of(acme, "pirate") == of_adapter["price_version"]


def test_a_price_of_an_adapter_names_no_base_model(product):
    acme = product.user("acme")
    adapter_id = product.gateway.database.write_sync(lambda c: add_version(c, acme.tenant_id))
    body = {"scope": "adapter", "scope_id": adapter_id, "base_model": "base"}
    answer = product.operator.call("POST", "/admin/v1/prices", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "base_model")


def test_a_price_of_a_base_model_may_end(product):
    body = {"base_model": "base", "prompt_nanousd": 1, "until": 2**32}
    made = product.operator.call("POST", "/admin/v1/prices", body)
    assert (made.status_code, made.json()["until"]) == (201, 2**32)


def test_a_day_of_storage_is_charged_at_the_price_of_the_base_model(sqlite_database):
    def post(conn):
        ensure_price(conn, 0)
        adapter_id = add_version(conn, base_revision="r" * 64)
        name_base(conn, "r" * 64, "small")
        name_base(conn, "r" * 64, "large")  # a base model that got another name
        dear = replace(DEFAULT_PRICES, storage_nanousd=10**9)
        of_base = add_price(conn, dear, base_model="large", effective_at_ms=0, now_ms=0)
        stretch = Stretch(
            kind="storage", source="storage", source_id="1", tenant_id="tenant-a",
            adapter_id=adapter_id, adapter_version=1, adapter_digest="d" * 64, tier="store",
            size_bytes=10**9, started_at_ms=0, at_ms=3_599_999, duration_ms=3_600_000,
        )  # fmt: skip
        return of_base, drafts_of(conn, [stretch])[0]

    of_base, draft = sqlite_database.write_sync(post)
    assert (draft.price_version, draft.amount_nanousd) == (of_base.price_version, 10**9)
