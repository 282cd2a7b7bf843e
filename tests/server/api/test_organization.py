"""OpenAI's usage and costs over HTTP: shapes, filters, groups, pages and tenants."""

import json
from urllib.parse import urlencode

import httpx
import openai
import pytest
from openai.types.admin.organization import UsageCompletionsResponse, UsageCostsResponse

from server.billing.prices import get_price
from server.billing.rating import format_usd
from server.billing.receipts.receipt import SPEND_KINDS
from tests.server.export_ledger import give, keep, use_each
from tests.server.factories import NOW_MS
from tests.server.in_process import product_of_file

DAY, HOUR = 86_400, 3600
NOW = NOW_MS // 1000
MIDNIGHT = NOW - NOW % DAY
COMPLETIONS, COSTS = "usage/completions", "costs"
SHAPES = {COMPLETIONS: UsageCompletionsResponse, COSTS: UsageCostsResponse}

product = product_of_file


def use(user, *requests):
    database = user.product.gateway.database
    given = [
        fields | {"tenant_id": user.tenant_id, "at_ms": (MIDNIGHT + at) * 1000}
        for at, fields in requests
    ]
    use_each(database, *given)
    return database.read_sync(lambda conn: get_price(conn, 1))


def ask(user, what, *, start_time=MIDNIGHT, **params):
    """The answer's JSON, which must validate against OpenAI's own types."""
    answer = user.call("GET", path(what, start_time=start_time, **params))
    assert answer.status_code == 200, answer.text
    SHAPES[what].model_validate(answer.json(), strict=True)
    return answer.json()


def path(what, **params):
    return f"/v1/organization/{what}?{urlencode(params, doseq=True)}"


def results(body):
    return [bucket["results"] for bucket in body["data"]]


def test_requests_are_counted_in_the_buckets_in_which_they_ended(acme):
    cached = {"num_cached_tokens": 3}
    use(acme, (5, {}), (HOUR - 1, cached), (HOUR, {}), (3 * HOUR, {}))
    body = ask(acme, COMPLETIONS, bucket_width="1h", end_time=MIDNIGHT + 3 * HOUR)
    assert (body["object"], body["has_more"], body["next_page"]) == ("page", False, None)
    assert [bucket["start_time"] - MIDNIGHT for bucket in body["data"]] == [0, HOUR, 2 * HOUR]
    first, second, third = results(body)
    [sums] = first
    assert (sums["num_model_requests"], sums["output_tokens"]) == (2, 10)
    assert (sums["input_tokens"], sums["input_cached_tokens"]) == (14, 3)
    assert sums["input_uncached_tokens"] == 11
    dimensions = ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier")
    assert {sums[name] for name in dimensions} == {None}
    assert second[0]["num_model_requests"] == 1
    assert third == []


def test_a_bucket_in_which_nothing_was_asked_is_empty_whatever_was_charged(product, acme):
    give(product.gateway.database, "credit", acme.tenant_id, at_ms=(MIDNIGHT + 5) * 1000)
    assert results(ask(acme, COMPLETIONS, end_time=MIDNIGHT + DAY)) == [[]]


def test_minutes_and_days_are_buckets_as_well(acme):
    use(acme, (59, {}), (60, {}), (DAY, {}))
    minutes = ask(acme, COMPLETIONS, bucket_width="1m", end_time=MIDNIGHT + 121)
    assert [len(found) for found in results(minutes)] == [1, 1, 0]
    assert minutes["data"][-1]["end_time"] == MIDNIGHT + 121
    days = ask(acme, COMPLETIONS, end_time=MIDNIGHT + 2 * DAY)
    assert [found[0]["num_model_requests"] for found in results(days)] == [2, 1]


def test_a_bucket_that_begins_late_has_what_ended_in_it_only(acme):
    use(acme, (5, {}), (10, {}))
    body = ask(acme, COMPLETIONS, start_time=MIDNIGHT + 6, end_time=MIDNIGHT + DAY)
    assert body["data"][0]["start_time"] == MIDNIGHT + 6
    assert results(body)[0][0]["num_model_requests"] == 1


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        ("model", [("base", 1), ("pirate", 2)]),
        ("api_key_id", [("key1", 2), ("key2", 1)]),
        ("user_id", [(None, 3)]),
        ("batch", [(False, 3)]),
        ("service_tier", [(None, 3)]),
        ("api_source", [("unlabeled", 3)]),
    ],
)
def test_requests_are_grouped(acme, group_by, expected):
    use(acme, (5, {}), (6, {"model": "pirate"}), (7, {"model": "pirate", "key_id": "key2"}))
    [found] = results(ask(acme, COMPLETIONS, group_by=group_by, end_time=MIDNIGHT + DAY))
    assert [(result[group_by], result["num_model_requests"]) for result in found] == expected


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({"models": "base"}, 1),
        ({"models": "pirate"}, 2),
        ({"models": "pirate@3"}, 1),
        ({"models": ["base", "nobody"]}, 1),
        ({"models[]": ["base", "pirate"]}, 3),
        ({"api_key_ids[]": "key2"}, 1),
        ({"models[]": "base", "api_key_ids": "key2"}, 0),
        ({"batch": "false"}, 3),
        ({"batch": "true"}, 0),
        ({"user_ids": "somebody"}, 0),
    ],
)
def test_requests_are_filtered(acme, params, count):
    use(acme, (5, {}), (6, {"model": "pirate"}), (7, {"model": "pirate@3", "key_id": "key2"}))
    [found] = results(ask(acme, COMPLETIONS, end_time=MIDNIGHT + DAY, **params))
    assert sum(result["num_model_requests"] for result in found) == count


def test_openais_own_client_asks_for_it_and_reads_it(acme):
    use(acme, (5, {"model": "alpha"}), (6, {"model": "alpha"}), (7, {}))

    def answer(request: httpx.Request) -> httpx.Response:
        given = acme.call(request.method, request.url.raw_path.decode())
        return httpx.Response(given.status_code, json=given.json())

    with openai.OpenAI(
        base_url="http://gateway/v1", api_key="unused", admin_api_key=acme.api_key,
        http_client=httpx.Client(transport=httpx.MockTransport(answer)),
    ) as client:  # fmt: skip
        asked = {"start_time": MIDNIGHT, "limit": 1}
        [bucket] = client.admin.organization.usage.completions(
            **asked, models=["alpha", "nobody"], group_by=["model", "project_id"],
            project_ids=[acme.tenant_id, "nobody"],
        ).data  # fmt: skip
        costs = client.admin.organization.usage.costs(**asked, group_by=["line_item"])
    [sums] = bucket.results
    assert (sums.model, sums.project_id) == ("alpha", acme.tenant_id)
    assert (sums.num_model_requests, len(costs.data[0].results)) == (2, 2)


def test_a_tenant_sees_itself_and_the_operator_sees_all(product, acme):
    globex = product.user()
    use(acme, (5, {}))
    use(globex, (5, {}), (6, {}))
    both = {"group_by": "project_id", "end_time": MIDNIGHT + DAY}
    [found] = results(ask(acme, COMPLETIONS, **both))
    assert [result["project_id"] for result in found] == [acme.tenant_id]
    others = both | {"project_ids": [globex.tenant_id, "nobody"]}
    for what in SHAPES:
        assert results(ask(acme, what, **others)) == [[]]
    [found] = results(ask(product.operator, COMPLETIONS, **both))
    counts = {result["project_id"]: result["num_model_requests"] for result in found}
    assert (counts[acme.tenant_id], counts[globex.tenant_id]) == (1, 2)
    [found] = results(ask(product.operator, COMPLETIONS, **others))
    assert [result["project_id"] for result in found] == [globex.tenant_id]


@pytest.mark.parametrize("what", SHAPES)
def test_pages_hold_every_bucket_once_while_more_is_used(acme, what):
    use(acme, *((day * DAY, {}) for day in range(5)))
    asked = {"limit": 2, "end_time": MIDNIGHT + 5 * DAY}
    starts, page = [], {}
    while True:
        body = ask(acme, what, **asked, **page)
        starts += [bucket["start_time"] for bucket in body["data"]]
        assert all(len(found) == 1 for found in results(body))
        assert body["has_more"] == (body["next_page"] is not None)
        if not body["has_more"]:
            break
        page = {"page": body["next_page"]}
        use(acme, (day := len(starts) * DAY, {}), (day + 1, {}))
    assert starts == [MIDNIGHT + day * DAY for day in range(5)]


@pytest.mark.parametrize(
    ("what", "width", "count"),
    [(COMPLETIONS, "1m", 60), (COMPLETIONS, "1h", 24), (COMPLETIONS, "1d", 7), (COSTS, "1d", 7)],
)
def test_a_page_without_a_limit_has_openais_number_of_buckets(acme, what, width, count):
    body = ask(acme, what, bucket_width=width, start_time=0)
    assert len(body["data"]) == count
    assert body["has_more"]


def test_costs_by_line_item_are_the_ledgers_to_the_nanodollar(product, acme):
    database = product.gateway.database
    price = use(acme, (5, {"num_cached_tokens": 3}), (6, {"key_id": "key2"}))
    at_ms = (MIDNIGHT + 7) * 1000
    keep(database, acme.tenant_id, at_ms, size_bytes=10**9, duration_ms=3_600_000)
    give(database, "credit", acme.tenant_id, 500, at_ms)
    give(database, "payment", acme.tenant_id, 10**12, at_ms)
    body = ask(acme, COSTS, group_by="line_item", end_time=MIDNIGHT + DAY)
    [found] = results(body)
    assert [(r["line_item"], r["amount_nanousd"], r["quantity_unit"]) for r in found] == [
        ("adapter storage", price.storage_nanousd, "gibibyte_hours"),
        ("prompt", 11 * price.prompt_nanousd, "tokens"),
        ("cached prompt", 3 * price.cached_nanousd, "tokens"),
        ("completion", 10 * price.completion_nanousd, "tokens"),
    ]
    for result in found:
        assert result["amount_usd"] == format_usd(result["amount_nanousd"])
        value = result["amount_nanousd"] / 10**9
        assert result["amount"] == {"value": value, "currency": "usd"}
    [[whole]] = results(ask(acme, COSTS, end_time=MIDNIGHT + DAY))
    assert whole["amount_nanousd"] == sum(result["amount_nanousd"] for result in found)
    assert (whole["line_item"], whole["quantity"], whole["quantity_unit"]) == (None, None, None)


def test_costs_are_filtered_and_grouped(acme):
    price = use(acme, (5, {}), (6, {"key_id": "key2"}), (7, {"key_id": "key2"}))
    asked = {"end_time": MIDNIGHT + DAY, "line_items[]": ["completion", "correction"]}
    [found] = results(ask(acme, COSTS, **asked, group_by=["api_key_id", "project_id"]))
    amount = 5 * price.completion_nanousd
    assert [(r["api_key_id"], r["amount_nanousd"]) for r in found] == [
        ("key1", amount),
        ("key2", 2 * amount),
    ]
    assert {result["project_id"] for result in found} == {acme.tenant_id}
    [found] = results(ask(acme, COSTS, **asked, api_key_ids="key1"))
    assert [result["amount_nanousd"] for result in found] == [amount]


@pytest.mark.parametrize(
    ("what", "params", "param"),
    [
        (COMPLETIONS, {}, "start_time"),
        (COMPLETIONS, {"start_time": "yesterday"}, "start_time"),
        (COMPLETIONS, {"start_time": -1}, "start_time"),
        (COMPLETIONS, {"start_time": 10**15}, "start_time"),
        (COMPLETIONS, {"start_time": 253_402_300_000}, "start_time"),  # later than now
        (COMPLETIONS, {"start_time": 5, "end_time": 5}, "start_time"),
        (COMPLETIONS, {"start_time": 5, "bucket_width": "1w"}, "bucket_width"),
        (COSTS, {"start_time": 5, "bucket_width": "1h"}, "bucket_width"),
        (COMPLETIONS, {"start_time": 5, "limit": 0}, "limit"),
        (COMPLETIONS, {"start_time": 5, "limit": 32}, "limit"),
        (COMPLETIONS, {"start_time": 5, "limit": 169, "bucket_width": "1h"}, "limit"),
        (COMPLETIONS, {"start_time": 5, "limit": 1441, "bucket_width": "1m"}, "limit"),
        (COSTS, {"start_time": 5, "limit": 181}, "limit"),
        (COMPLETIONS, {"start_time": 5, "page": "2"}, "page"),
        (COMPLETIONS, {"start_time": 5, "page": "x" * 65}, "page"),
        (COMPLETIONS, {"start_time": 5, "group_by": "line_item"}, "group_by.0"),
        (COSTS, {"start_time": 5, "group_by": ["project_id", "model"]}, "group_by.1"),
        (COMPLETIONS, {"start_time": 5, "models": ["m"] * 101}, "models"),
        (COMPLETIONS, {"start_time": 5, "models": "m" * 257}, "models.0"),
        (COMPLETIONS, {"start_time": 5, "batch": "perhaps"}, "batch"),
        (COSTS, {"start_time": 5, "models": "base"}, "models"),  # unsupported, so refused
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(acme, what, params, param):
    answer = acme.call("GET", path(what, **params))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("start", "end"), [(0, DAY), (6, HOUR + 1), (7, 8), (HOUR, 2 * HOUR)])
def test_simple_usage_is_what_the_export_of_the_same_time_adds_up_to(product, acme, start, end):
    database = product.gateway.database
    use(acme, (5, {}), (6, {"finish_reason": "error"}), (HOUR, {}), (2 * HOUR, {}))
    keep(database, acme.tenant_id, (MIDNIGHT + 7) * 1000)
    give(database, "credit", acme.tenant_id, 7, (MIDNIGHT + HOUR) * 1000)
    give(database, "payment", acme.tenant_id, 7, (MIDNIGHT + 9) * 1000)
    period = f"start={MIDNIGHT + start}&end={MIDNIGHT + end}"
    usage = acme.call("GET", f"/v1/usage?{period}").json()
    assert (usage["start_time"], usage["end_time"]) == (MIDNIGHT + start, MIDNIGHT + end)
    [whole] = usage["data"]
    export = acme.call("GET", f"/v1/usage/export?format=jsonl&{period}").text
    rows = [json.loads(line) for line in export.splitlines()]
    assert rows
    spent = [row["amount_nanousd"] for row in rows if row["kind"] in SPEND_KINDS]
    assert sum(spent) == whole["amount_nanousd"]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert sum(row[name] or 0 for row in rows) == whole[name]


def test_simple_usage_is_what_was_spent_by_any_dimension_and_bookings_stand_apart(product, acme):
    database = product.gateway.database
    use(acme, (5, {}), (DAY, {}))
    give(database, "credit", acme.tenant_id, 7, (MIDNIGHT + 9) * 1000)
    asked = f"/v1/usage?start={MIDNIGHT}&end={MIDNIGHT + 2 * DAY}"
    answer = acme.call("GET", asked).json()
    [whole] = answer["data"]
    [booked] = answer["bookings"]
    assert (booked["kind"], booked["amount_usd"]) == ("credit", "-0.000000007")
    groups = acme.call("GET", f"{asked}&group_by=day&group_by=kind").json()["data"]
    assert [(g["day"], g["kind"], g["num_requests"]) for g in groups] == [
        ("2026-02-02", "usage", 1),
        ("2026-02-03", "usage", 1),
    ]
    assert sum(group["amount_nanousd"] for group in groups) == whole["amount_nanousd"]
    of_all = product.operator.call("GET", asked.replace("/v1", "/admin/v1")).json()["data"]
    assert {"tenant": acme.tenant_id} | whole in of_all
