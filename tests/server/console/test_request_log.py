"""The pages of requests: what is listed, in which order, and what one request's page says."""

import re

from server.billing.request_log import MAX_LOOKED_AT, Asked, read_page
from server.database.clock import now_ms
from server.text.times import DAY_MS, day_of
from tests.server.console.browsing import SignIn, Visitor
from tests.server.export_ledger import use
from tests.server.in_process import InProcess, User


def ask(product: InProcess, user: User, count: int = 1, **fields) -> None:
    at_ms = fields.pop("at_ms", now_ms() - 1000)
    use(product.gateway.database, user.tenant_id, count, at_ms=at_ms, **fields)


def ids_of(page: str) -> list[str]:
    return re.findall(r"/console/requests/(r\d+)", page)


def all_pages(visitor: Visitor, query: str = "") -> list[list[str]]:
    """The ids on each page, following the links to older requests."""
    pages, path = [], f"/console/requests?{query}"
    while path:
        text = visitor.get(path).text
        pages.append(ids_of(text))
        older = re.search(r'class="button" href="([^"]+)"', text)
        path = older[1].replace("&amp;", "&") if older else None
    return pages


def test_every_request_is_on_one_page_newest_first(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    for days_ago in (2, 1, 0):
        # Many that end in the same millisecond have an order, too.
        ask(product, acme, 40, at_ms=now_ms() - days_ago * DAY_MS - 1000)
    pages = all_pages(signed_in(acme))
    assert [len(page) for page in pages] == [50, 50, 20]
    numbers = [int(name[1:]) for page in pages for name in page]
    assert numbers == sorted(set(numbers), reverse=True)


def test_what_was_chosen_stays_chosen_and_a_table_without_rows_says_so(
    acme: User, signed_in: SignIn
) -> None:
    page = signed_in(acme).get("/console/requests?outcome=failed").text
    assert re.findall(r"<option[^>]* selected>(\w+)", page) == ["failed"]
    assert '<td colspan="10" class="quiet">No request here meets the conditions.</td>' in page


def test_filters_select_by_model_key_outcome_and_time(
    product: InProcess, acme: User, visitor: Visitor
) -> None:
    ask(product, acme, 1, model="one", key_id="keyA")
    ask(product, acme, 2, model="one@3", key_id="keyB")
    ask(product, acme, 3, model="two", key_id="keyB", finish_reason="error",
        stop_cause="engine_failure")  # fmt: skip
    ask(product, acme, 4, model="two", finish_reason="abort", stop_cause="aborted",
        at_ms=now_ms() - 3 * DAY_MS)  # fmt: skip
    found = {
        query: sum(map(len, all_pages(visitor, query)))
        for query in (
            "", "model=one", "key=keyB", "outcome=failed", "outcome=aborted", "outcome=served",
            f"start={_day(2)}", f"end={_day(2)}",  # midnight may pass
        )
    }  # fmt: skip
    assert list(found.values()) == [10, 3, 5, 3, 4, 3, 6, 4]


def _day(days_ago: int) -> str:
    return day_of(now_ms() - days_ago * DAY_MS)


def test_a_page_looks_at_a_bounded_number_of_entries_and_goes_on(
    product: InProcess, acme: User
) -> None:
    database = product.gateway.database
    ask(product, acme, 1, model="rare")
    ask(product, acme, MAX_LOOKED_AT + 5, model="common")
    asked = Asked(model="rare")
    first = database.read_sync(lambda c: read_page(c, acme.tenant_id, asked, 50))
    assert first.requests == []
    assert first.older is not None
    then = database.read_sync(lambda c: read_page(c, acme.tenant_id, asked, 50, first.older))
    assert [it.model for it in then.requests] == ["rare"]
    assert then.older is None


def test_a_request_shows_where_its_time_went(
    product: InProcess, acme: User, visitor: Visitor
) -> None:
    began = now_ms() / 1000 - 10
    ask(
        product, acme, model="support@2", at_ms=int(began * 1000) + 1000, started_at=began,
        first_token_at=began + 0.5, load_s=0.2, load_tier="disk", queue_s=0.1,
        num_completion_tokens=6,
    )  # fmt: skip
    (name,) = ids_of(visitor.get("/console/requests").text)
    text = visitor.get(f"/console/requests/{name}").text
    shown = re.findall(r"<span>([^<]+)</span>\s*<svg.*?<span class=\"number\">([^<]+)<", text, re.S)
    assert shown == [
        ("adapter from disk", "200 ms"), ("queue", "100 ms"), ("prefill", "200 ms"),
        ("decode", "500 ms"),
    ]  # fmt: skip
    bars = [(float(x), float(w)) for x, w in re.findall(r'x="([\d.]+)" width="([\d.]+)"', text)]
    assert bars == [(0, 20), (20, 10), (30, 20), (50, 50)]
    assert "First token after 500 ms, then one every 100 ms; 1 s in all" in text


def test_a_request_that_an_engine_died_in_says_that_its_waits_are_not_known(
    product: InProcess, acme: User, visitor: Visitor
) -> None:
    ask(product, acme)
    (name,) = ids_of(visitor.get("/console/requests").text)
    assert "as the engine died in it" in visitor.get(f"/console/requests/{name}").text


def test_another_tenants_request_is_not_there(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    ask(product, acme)
    (name,) = ids_of(signed_in(acme).get("/console/requests").text)
    other = signed_in(product.user("stranger"))
    assert other.get(f"/console/requests/{name}").status_code == 404
    assert ids_of(other.get("/console/requests").text) == []
