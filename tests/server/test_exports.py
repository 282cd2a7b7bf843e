import asyncio
import csv
import io
import json

import pytest

from server import exports, ledger, usage
from server.rating import amount_nanousd
from server.usage import Which, page_events, sum_entries
from tests.server.factories import (
    ENGINE,
    NOW_MS,
    SIGNER,
    insert_holds,
    make_end,
    make_hold,
    make_price,
)

DAY_MS = 86_400_000
FOREVER = (0, 2**62)


@pytest.fixture
def price(database):
    return make_price(database)


def use(database, price, *requests):
    """Hold and post a request per dict of `tenant`, `model`, `key`, `at_ms`, and record fields."""
    first = 1 + (database.read_sync(lambda c: ledger.settled_seq(c, ENGINE)))
    records = []
    for seq, given in enumerate(requests, first):
        fields = dict(given)
        request_id = fields.pop("request_id", f"r{seq}")
        who = {"tenant_id": fields.pop("tenant", "ten_1"), "model": fields.pop("model", "base")}
        insert_holds(
            database, make_hold(price, request_id, key_id=fields.pop("key", "key1"), **who)
        )
        at = fields.pop("at_ms", NOW_MS + seq) / 1000
        records.append(make_end(seq, request_id, tenant_id=who["tenant_id"], at=at, **fields))
    database.write_sync(lambda c: ledger.post(c, SIGNER, ENGINE, records, NOW_MS))


def sums(database, tenant_id):
    which = Which(tenant_ids=[tenant_id])
    return database.read_sync(lambda c: sum_entries(c, *FOREVER, which=which))


def exported(database, format, tenant_id="ten_1", period=FOREVER, **options):
    async def run():
        stream = exports.stream(database, format, tenant_id, *period, **options)
        return [chunk async for chunk in stream]

    return asyncio.run(run())


def csv_rows(chunks):
    return list(csv.DictReader(io.StringIO(b"".join(chunks).decode(), newline="")))


def test_pages_hold_every_event_once_in_the_order_they_ended(database, price):
    use(database, price, *({"at_ms": NOW_MS + 10 - i // 2} for i in range(9)))
    pages, after = [], None
    while True:
        page = database.read_sync(
            lambda c, after=after: page_events(c, "ten_1", *FOREVER, after=after, limit=2)
        )
        if not page:
            break
        pages += page
        after = usage.cursor_of(page[-1])
    keys = [(event["ended_at_ms"], event["event_id"]) for event in pages]
    assert keys == sorted(set(keys))
    assert len(keys) == 9


def test_the_exports_sums_are_the_ledgers(database, price):
    use(database, price, *({"num_completion_tokens": i} for i in range(12)), {"tenant": "ten_2"})
    [whole] = sums(database, "ten_1")
    rows = csv_rows(exported(database, "csv", page_size=5))
    lines = b"".join(exported(database, "jsonl", page_size=5)).splitlines()
    for found in (rows, [json.loads(line) for line in lines]):
        assert len(found) == whole.num_requests == 12
        assert sum(int(r["completion_tokens"]) for r in found) == whole.completion_tokens
        assert sum(int(r["amount_nanousd"]) for r in found) == whole.amount_nanousd
        assert {r["tenant_id"] for r in found} == {"ten_1"}
    operators = csv_rows(exported(database, "csv", tenant_id=None))
    assert {row["tenant_id"] for row in operators} == {"ten_1", "ten_2"}


def test_an_exported_row_says_what_ran_and_what_it_cost(database, price):
    use(database, price, {"model": "acme-bot", "at_ms": NOW_MS + 1234, "num_completion_tokens": 9})
    [row] = csv_rows(exported(database, "csv"))
    assert tuple(row) == exports.COLUMNS
    amount = amount_nanousd(7, 0, 9, price)
    assert (row["amount_nanousd"], row["amount_usd"]) == (str(amount), f"0.{amount:09d}")
    assert row["ended_at"] == "2026-02-02T02:40:01.234Z"
    assert (row["model"], row["adapter_digest"]) == ("acme-bot", "")
    [line] = exported(database, "jsonl")
    parsed = json.loads(line)
    assert tuple(parsed) == exports.COLUMNS
    assert (parsed["amount_nanousd"], parsed["adapter_digest"]) == (amount, None)


def test_a_model_name_cannot_become_a_formula(database, price):
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", 'say "hi",\nnow', "plain"]
    use(database, price, *({"model": name} for name in names))
    models = [row["model"] for row in csv_rows(exported(database, "csv"))]
    assert models == [*("'" + name for name in names[:6]), *names[6:]]
    lines = b"".join(exported(database, "jsonl")).splitlines()
    assert [json.loads(line)["model"] for line in lines] == names


def test_an_export_is_streamed_a_page_at_a_time(database, price):
    use(database, price, *({} for _ in range(7)))
    chunks = exported(database, "csv", page_size=3)
    assert [chunk.count(b"\r\n") for chunk in chunks] == [1, 3, 3, 1]
    assert all(exported(database, "jsonl", page_size=3))


def test_an_empty_export_is_a_header(database, price):
    assert csv_rows(exported(database, "csv")) == []
    assert b"".join(exported(database, "csv")).startswith(b"event_id,request_id,tenant_id")
    assert exported(database, "jsonl") == []


def test_what_is_posted_during_an_export_is_not_in_it(database, price):
    use(database, price, {}, {})

    async def run():
        stream = exports.stream(database, "jsonl", "ten_1", *FOREVER, page_size=1)
        first = await anext(stream)
        await asyncio.to_thread(use, database, price, {}, {})
        return [first, *[chunk async for chunk in stream]]

    assert len(asyncio.run(run())) == 2
    assert len(exported(database, "jsonl", page_size=1)) == 4
