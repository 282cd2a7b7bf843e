"""The page of spend: what it sums, what its filters select, and what it says of budgets."""

import csv
import html
import io
import json
import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from server.billing.usage import UsageSum
from server.console.budgets import forecast_of
from server.console.days import quick_ranges
from server.console.spend import plot_of
from server.database.clock import now_ms
from server.text.times import DAY_MS, day_of
from tests.server.console.browsing import SignIn, Visitor, shown
from tests.server.console.test_bill import pay
from tests.server.export_ledger import use
from tests.server.factories import limit_budget
from tests.server.in_process import ADMIN_KEY, InProcess, User

LAST_MS = now_ms() // DAY_MS * DAY_MS - DAY_MS // 2
"""Noon of the last whole day when the tests began: they may go on past midnight."""


def spend(product: InProcess, user: User, model: str, count: int = 1, days_ago: int = 0, **fields):
    at_ms = LAST_MS - days_ago * DAY_MS
    use(product.gateway.database, user.tenant_id, count, model=model, at_ms=at_ms, **fields)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_page_says_what_the_usage_api_says(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    use(product.gateway.database, acme.tenant_id, 3, model="support@2", at_ms=now_ms())
    spend(product, acme, "base", 2, days_ago=40)
    page = signed_in(acme).get("/console").text
    answer = acme.call("GET", "/v1/usage").json()["data"]
    amount = sum(line["amount_nanousd"] for line in answer)
    assert f'title="{amount} nano-dollars"' in page
    assert "support@2" in page
    assert ">base<" not in page  # it is from before the thirty days


def test_another_tenants_spend_is_not_shown(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    other = product.user("other")
    spend(product, other, "secret-model")
    assert "secret-model" not in signed_in(acme).get("/console").text


@pytest.mark.parametrize("by", ["model", "key", "kind"])
def test_the_csv_has_what_is_shown_and_adds_up_to_the_total(
    product: InProcess, acme: User, visitor: Visitor, by: str
) -> None:
    spend(product, acme, "one", 2, key_id="keyA")
    spend(product, acme, "two", 1, key_id="keyB", days_ago=1)
    link = re.search(r'href="(/console/spend.csv[^"]*)"', visitor.get(f"/console?by={by}").text)
    assert link
    answer = visitor.get(html.unescape(link[1]))
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = rows_of(answer.text)
    assert sum(int(row["num_requests"]) for row in rows) == 3
    assert {row[by] for row in rows} == {
        "model": {"one", "two"}, "key": {"keyA", "keyB"}, "kind": {"usage"},
    }[by]  # fmt: skip


def test_filters_select_a_model_with_its_versions_and_a_key(
    product: InProcess, acme: User, visitor: Visitor
) -> None:
    spend(product, acme, "one@2", 2, key_id="keyA")
    spend(product, acme, "one", 1, key_id="keyB")
    spend(product, acme, "onemore", 4, key_id="keyB")
    counts = {}
    for query in ("model=one", "key=keyB", "model=one&key=keyB", f"start={_day(1)}&end={_day(1)}"):
        rows = rows_of(visitor.get(f"/console/spend.csv?{query}").text)
        counts[query] = sum(int(row["num_requests"]) for row in rows)
    assert list(counts.values()) == [3, 5, 1, 0]


def plot(visitor: Visitor, query: str = "") -> dict[str, Any]:
    """The plot of a page: its series by label, of the last two whole days."""
    page = visitor.get(f"/console?start={_day(1)}&end={_day(0)}&{query}").text
    told = json.loads(html.unescape(page.split('data-plot="')[1].split('"')[0]))
    return {it["label"]: it["values"] for it in told["series"]} | {"unit": told["unit"]}


def test_the_plot_tells_the_largest_apart_and_adds_up(
    product: InProcess, acme: User, visitor: Visitor
) -> None:
    for size in range(1, 8):
        spend(product, acme, f"m{size}", size, days_ago=size % 2, key_id="keyA")
    spend(product, acme, "m7@2", 1, key_id="keyB")
    in_all = plot(visitor, "by=kind")
    assert list(in_all) == ["usage", "unit"]
    by_model = plot(visitor)
    assert list(by_model) == ["m7", "m6", "m5", "m4", "m3", "all others", "unit"]
    assert by_model["m6"][0] == 0 < by_model["m6"][1]
    bars = [values for label, values in by_model.items() if label != "unit"]
    assert [sum(day) for day in zip(*bars, strict=True)] == pytest.approx(in_all["usage"])
    tokens = plot(visitor, "by=key&plot=tokens")
    (line,) = rows_of(visitor.get("/console/spend.csv?key=keyB&by=key").text)
    assert tokens["keyB"] == [0, int(line["prompt_tokens"]) + int(line["completion_tokens"])]
    assert (in_all["unit"], tokens["unit"]) == ("$", "")


def test_a_plot_that_two_filters_would_make_slow_has_one_series(
    product: InProcess, acme: User, visitor: Visitor
) -> None:
    spend(product, acme, "one", 2, key_id="keyA")
    assert list(plot(visitor, "key=keyA&by=model")) == ["spend", "unit"]
    assert list(plot(visitor, "key=keyA&by=key")) == ["keyA", "unit"]


def _day(days_ago: int) -> str:
    return day_of(LAST_MS - days_ago * DAY_MS)


def test_a_name_that_a_spreadsheet_would_run_is_text_in_the_csv(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    spend(product, acme, '=HYPERLINK("x")')
    rows = rows_of(signed_in(acme).get("/console/spend.csv").text)
    assert rows[0]["model"] == '\'=HYPERLINK("x")'


def test_a_name_is_text_on_the_page(product: InProcess, acme: User, signed_in: SignIn) -> None:
    spend(product, acme, '"><script>alert(1)</script>')
    page = signed_in(acme).get("/console").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("start=yesterday", "start"), ("start=2026-13-01", "start"), ("by=tenant", "by"),
        ("plot=cost", "plot"),
        ("start=2026-02-02&end=2026-02-01", "start"), ("start=2020-01-01&end=2026-01-01", "start"),
        ("nothing=1", "nothing"), (f"model={'x' * 300}", "model"), ("end=0001-01-05", "end"),
        ("start=22026-11-02", "start must be a date"), ("start=2026-W01-1", "start must be a date"),
    ],
)  # fmt: skip
def test_a_bad_filter_is_named(acme: User, signed_in: SignIn, query: str, name: str) -> None:
    answer = signed_in(acme).get(f"/console?{query}")
    assert answer.status_code == 400
    assert name in answer.text


def test_a_link_in_the_table_narrows_the_page_to_one_model(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    spend(product, acme, "acme/a&b")
    page = signed_in(acme).get("/console").text.partition("<table")[2]
    link = next(part for part in page.split('href="') if part.startswith("/console?start"))
    query = parse_qs(urlsplit(link.split('"')[0].replace("&amp;", "&")).query)
    assert query["model"] == ["acme/a&b"]
    assert query["by"] == ["key"]


def test_a_budget_is_shown_with_what_is_left_and_when_it_ends(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    limit_budget(product.gateway.database, acme.tenant_id, 10**10)
    page = signed_in(acme).get("/console").text
    assert "$10.00</strong> left of $10.00" in page
    assert '<meter min="0" max="1" value="0.0"' in page
    assert "Nothing was spent in the last 7 days." in page


@pytest.mark.parametrize(
    ("kind", "enforcement", "said"),
    [
        ("prepaid", "soft", "$101.50 left above the $10.00 that bring a warning"),
        ("prepaid", "hard", "$101.50 left above the $10.00 that must remain"),
        ("monthly", "soft", "$10.00 left of $10.00"),
    ],
)
def test_what_is_left_is_said_of_the_budgets_own_amount(
    product: InProcess, acme: User, visitor: Visitor, kind, enforcement, said: str
) -> None:
    pay(acme, "111.5")
    path = f"/admin/v1/tenants/{acme.tenant_id}/budgets/{kind}/{enforcement}"
    assert product.operator.call("PUT", path, {"amount": "10"}).status_code == 200
    assert said in shown(visitor, "/console")
    assert ("<meter" in visitor.get("/console").text) == (kind == "monthly")
    operator = Visitor(product)
    operator.sign_in(ADMIN_KEY)
    assert said in shown(operator, f"/console/operator/tenants/{acme.name}")


@pytest.mark.parametrize(
    ("path", "filters"),
    [
        ("/console", {"model": "json", "by": "key", "plot": "tokens"}),
        ("/console/requests", {}),
        ("/console/bill/export", {}),
    ],
)
def test_a_bad_range_of_days_keeps_the_filters(
    visitor: Visitor, path: str, filters: dict[str, str]
) -> None:
    asked = {"start": "2026-02-02", "end": "2026-02-01"} | filters
    answer = visitor.get(f"{path}?{urlencode(asked)}")
    assert answer.status_code == 400
    assert "start must be at most 366 days before end" in answer.text.partition('role="alert"')[2]
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', answer.text))
    assert fields.items() >= asked.items()


# ---- ranges and the plot ----


def test_quick_ranges_are_whole_days_and_months_of_utc() -> None:
    at_ms = int(datetime(2028, 3, 1, 23, 59, tzinfo=UTC).timestamp()) * 1000
    assert quick_ranges(at_ms) == [
        ("Today", "2028-03-01", "2028-03-01"),
        ("Yesterday", "2028-02-29", "2028-02-29"),
        ("7 days", "2028-02-24", "2028-03-01"),
        ("30 days", "2028-02-01", "2028-03-01"),
        ("This month", "2028-03-01", "2028-03-01"),
        ("Last month", "2028-02-01", "2028-02-29"),
    ]


@pytest.mark.parametrize("path", ["/console", "/console/requests"])
def test_a_quick_range_is_a_link_that_keeps_the_other_filters(visitor: Visitor, path: str) -> None:
    page = visitor.get(f"{path}?model=json").text
    link = html.unescape(re.search(r'href="([^"]*)">\s*Yesterday', page)[1])
    assert "model=json" in link
    found = visitor.get(link)
    assert found.status_code == 200
    assert re.findall(r'aria-current="true">(\w+)<', found.text) == ["Yesterday"]


def test_a_model_keeps_its_hue_whatever_else_is_shown() -> None:
    def hues(*names: str) -> dict[str, int | None]:
        groups = {name: [UsageSum(at_ms=0, amount_nanousd=5)] for name in names}
        told = plot_of([UsageSum(at_ms=0, amount_nanousd=99)], 0, DAY_MS, groups)
        return {it["label"]: it["hue"] for it in told["series"]}

    alone, among = hues("json"), hues("pirate", "json", "base")
    assert alone["json"] == among["json"] != among["pirate"]
    assert alone["all others"] is None


def test_the_plot_of_a_range_has_each_of_its_days_and_those_below_zero() -> None:
    days = [UsageSum(at_ms=DAY_MS, amount_nanousd=-3 * 10**9)]
    told = plot_of(days, 0, 3 * DAY_MS)
    assert told["x"] == [0, 86_400, 172_800]
    assert told["series"][0]["values"] == [0, -3, 0]


NOON_MS = 1_767_960_000_000
"""2026-01-09, noon."""


@pytest.mark.parametrize(
    ("kind", "remaining", "daily", "said"),
    [
        ("prepaid", 0, 5, "Nothing is left of it."),
        ("prepaid", -5, 0, "Nothing is left of it."),
        ("prepaid", 10, 0, "Nothing was spent in the last 7 days."),
        ("prepaid", 10, 2, "it will be used up on 2026-01-14"),
        ("prepaid", 10**9, 1, "more than ten years"),
        ("monthly", 10, 2, "it will be used up on 2026-01-14"),
        ("monthly", 100, 2, "it lasts until the month ends"),
    ],
)
def test_a_forecast_is_the_rest_at_the_pace_of_the_last_week(
    kind, remaining: int, daily: float, said: str
) -> None:
    sentences = " ".join(forecast_of(kind, remaining, daily, NOON_MS))
    assert said in sentences
    assert ("begins on 2026-02-01" in sentences) == (kind == "monthly")
