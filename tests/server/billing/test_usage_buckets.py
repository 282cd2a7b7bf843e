"""Buckets of time and their contents, without a database."""

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import Fault
from server.api.errors import answer_of
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.usage import UsageSum
from server.billing.usage_buckets import ITEM_OF_KIND, WIDTH_S, Cost, costs_of, cut_page

DAY = 86_400
MIDNIGHT = 1_769_990_400


def pages(width, start, end, limit):
    found, cursor = [], None
    while True:
        page = cut_page(width, start, end, limit, cursor)
        found.append(page.buckets)
        if page.next_page is None:
            return found
        cursor = page.next_page


@given(
    st.sampled_from(sorted(WIDTH_S)),
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.integers(1, 200),
)
def test_pages_cut_any_time_into_buckets_without_gaps(width, start, length, limit):
    start, length = start + MIDNIGHT, min(length, WIDTH_S[width] * limit * 3)
    found = pages(width, start, start + length, limit)
    buckets = [bucket for page in found for bucket in page]
    assert all(len(page) == limit for page in found[:-1])
    assert 1 <= len(found[-1]) <= limit
    assert [begin for begin, _ in buckets[1:]] == [end for _, end in buckets[:-1]]
    assert (buckets[0][0], buckets[-1][1]) == (start, start + length)
    assert all(begin % WIDTH_S[width] == 0 for begin, _ in buckets[1:])
    assert all(0 < end - begin <= WIDTH_S[width] for begin, end in buckets)


def test_a_cursor_keeps_the_end_that_its_query_had():
    """The default end_time is the current time, which moves on between pages."""
    first = cut_page("1h", MIDNIGHT, MIDNIGHT + 7300, 2, None)
    second = cut_page("1h", MIDNIGHT, MIDNIGHT + 99_999, 2, first.next_page)
    assert second.buckets == ((MIDNIGHT + 7200, MIDNIGHT + 7300),)
    assert second.next_page is None


def cursor(place, end):
    return "page_" + base64.urlsafe_b64encode(struct.pack(">qq", place, end)).decode()


@pytest.mark.parametrize(
    "page",
    [
        "",
        "page_",
        "page_%%%",
        "é",
        cursor(MIDNIGHT + DAY, MIDNIGHT + DAY),  # nothing is left
        cursor(MIDNIGHT + 5, MIDNIGHT + DAY),  # in the middle of a day
        cursor(MIDNIGHT - DAY, MIDNIGHT + DAY),  # before its query
        cursor(MIDNIGHT, MIDNIGHT + DAY)[:-4],
    ],
)
def test_a_cursor_of_another_query_is_refused(page):
    with pytest.raises(Fault) as caught:
        cut_page("1d", MIDNIGHT, MIDNIGHT + 2 * DAY, 7, page)
    assert (answer_of(caught.value).status, caught.value.param) == (400, "page")


def test_the_items_of_a_request_are_the_whole_of_it():
    total = UsageSum(
        kind="usage",
        prompt_tokens=100,
        cached_tokens=30,
        completion_tokens=7,
        cached_amount_nanousd=60,
        completion_amount_nanousd=21,
        amount_nanousd=781,
    )
    assert list(costs_of(total)) == [
        Cost("prompt", 700, 70, "tokens"),
        Cost("cached prompt", 60, 30, "tokens"),
        Cost("completion", 21, 7, "tokens"),
    ]


def test_what_is_neither_used_nor_charged_is_no_item():
    total = UsageSum(kind="usage", prompt_tokens=5)
    assert list(costs_of(total)) == [Cost("prompt", 0, 5, "tokens")]
    assert list(costs_of(UsageSum(kind="correction"))) == []


def test_what_is_kept_is_counted_in_gibibyte_hours():
    kept = UsageSum(kind="pinned", kept_mb_s=2**31 * 3600 // 10**6, amount_nanousd=9)
    [cost] = costs_of(kept)
    assert (cost.line_item, cost.unit) == ("adapter pinning", "gibibyte_hours")
    assert cost.quantity == pytest.approx(2)


def test_money_alone_has_no_quantity():
    correction = UsageSum(kind="correction", amount_nanousd=-5)
    assert list(costs_of(correction)) == [Cost("correction", -5)]


def test_every_kind_of_cost_has_a_line_item():
    assert {"usage", *ITEM_OF_KIND} == set(SPEND_KINDS)
