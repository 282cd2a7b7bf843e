"""A simulation under the actual prices equals the bill; under others, the export re-rated."""

import asyncio
import contextlib
import json
import shutil
from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.wire.messages import PROOF_TENANT
from server.accounts.tenants import create_tenant
from server.billing import credits, ledger
from server.billing.base_revisions import name_base
from server.billing.entries import lock_ledger
from server.billing.holds import insert_hold
from server.billing.prices import DEFAULT_PRICES, add_price, price_for
from server.billing.rating import Prices
from server.billing.receipts.rows import iterate_receipts, select_receipts
from server.billing.simulate import simulate
from server.billing.storage_stretches import Stretch, post_stretches
from server.billing.tables import entries
from server.database.database import DEFAULT_FILE, Database
from tests.registry.rows import add_version
from tests.server.factories import ENGINE, NOW_MS, SIGNER, make_end, make_hold, make_price
from tests.server.fake_api import Api, fixed, make_run

FIELDS = tuple(Prices.__dataclass_fields__)
ENDS = [("stop", "eos"), ("abort", "aborted"), ("error", "engine_failure"), ("abort", "deadline")]
USES = [(None, 0, 5), ("ad_1", 3, 0), ("ad_1", 1, 5), ("ad_1", 9, 1)]
"""(adapter_id, cached, completion) for prompts of 7 tokens; the last is impossible."""
END_MS = NOW_MS + 10**9
BASES = {"b" * 64: "small"}
"""Names of base models by revision; another revision has none."""


def fill(conn):
    """Post all kinds of entries of two tenants and a canary at two prices; {tenant_id: plan}."""
    plans = {}
    add_version(conn, adapter_id="ad_1", base_revision="b" * 64)
    for base_revision, base_model in BASES.items():
        name_base(conn, base_revision, base_model)
    for name, plan in (("acme", "gold"), ("globex", "standard")):
        plans[create_tenant(conn, name, now_ms=NOW_MS, plan=plan).tenant_id] = plan
    acme, globex = plans
    dear = Prices(**{name: 7 for name in FIELDS[:3]}, **{name: 10**9 + 7 for name in FIELDS[3:]})
    add_price(conn, dear, scope="tenant", scope_id=acme, effective_at_ms=NOW_MS, now_ms=NOW_MS)
    number = 0
    for tenant_id in plans:
        price = price_for(conn, NOW_MS, tenant_id=tenant_id)
        for reason, cause in ENDS:
            for adapter_id, cached, completion in USES:
                number += 1
                hold = make_hold(price, f"r{number}", tenant_id=tenant_id, adapter_id=adapter_id)
                insert_hold(conn, hold)
                counts = {"num_cached_tokens": cached, "num_completion_tokens": completion}
                record = make_end(
                    number, f"r{number}", tenant_id=tenant_id, finish_reason=reason,
                    stop_cause=cause, base_revision="bc"[number % 3 == 0] * 64, **counts,
                )  # fmt: skip
                if number % 7 == 0:
                    ledger.mark_failed(conn, SIGNER, f"r{number}", NOW_MS)
                ledger.post(conn, SIGNER, ENGINE, [record], NOW_MS)
    canary = make_end(number + 1, "c1", tenant_id=PROOF_TENANT)
    ledger.post(conn, SIGNER, ENGINE, [canary], NOW_MS)
    ledger.mark_failed(conn, SIGNER, "r1", NOW_MS + 5000)
    lock_ledger(conn)
    kept = [
        make_stretch(kind, f"{tenant_id}/{number}", tenant_id, 10 ** (4 * number) + number)
        for tenant_id in plans
        for kind in ("storage", "pinned", "resident")
        for number in range(3)
    ]
    kept.append(make_stretch("resident", "free", acme, 10**9, is_free=True))
    for receipt in post_stretches(conn, SIGNER, kept, NOW_MS)[:2]:
        with contextlib.suppress(Exception):
            credits.post_correction(
                conn, SIGNER, receipt["entry_id"], memo=None, now_ms=NOW_MS,
                idempotency_key=f"c{receipt['entry_id']}",
            )  # fmt: skip
    for kind in ("credit", "payment"):
        credits.post_credit(
            conn, SIGNER, kind, globex, 12345, memo=None, idempotency_key=kind, now_ms=NOW_MS
        )
    return plans


def make_stretch(kind, source_id, tenant_id, size_bytes, **fields):
    return Stretch(
        kind=kind, source=kind, source_id=source_id, tenant_id=tenant_id, adapter_id="ad_1",
        adapter_version=1 + size_bytes % 2, adapter_digest="d" * 64, tier="device",
        size_bytes=size_bytes, started_at_ms=NOW_MS, at_ms=NOW_MS + 1, duration_ms=1_234_567,
        **fields,
    )  # fmt: skip


@pytest.fixture(scope="module")
def filled(migrated_sqlite, tmp_path_factory):
    """(database, its plans, its receipts), shared by tests that do not change them."""
    folder = tmp_path_factory.mktemp("simulate")
    shutil.copy(migrated_sqlite, folder / DEFAULT_FILE)
    database = Database(data_dir=folder)
    make_price(database)
    plans = database.write_sync(fill)
    yield database, plans, receipts_of(database)
    database.close()


def receipts_of(database):
    """All receipts but those of proofs, which are no tenant's."""
    query = select_receipts().where(entries.c.tenant_id != PROOF_TENANT)
    return database.read_sync(lambda c: list(iterate_receipts(c, query)))


def run_simulation(database, book, start_ms=0, end_ms=END_MS, **options):
    """{(tenant_id, kind): (entries, actual, simulated)}"""
    lines = asyncio.run(simulate(database, book, start_ms, end_ms, **options))
    return {
        (line.tenant_id, line.kind): (
            line.num_entries, line.actual_nanousd, line.simulated_nanousd,
        )
        for line in lines
    }  # fmt: skip


def by_line(receipts, amount_of):
    found = {}
    for receipt in receipts:
        key = receipt["tenant_id"], receipt["kind"]
        count, actual, simulated = found.get(key, (0, 0, 0))
        amount = receipt["amount_nanousd"]
        found[key] = count + 1, actual + amount, simulated + amount_of(receipt)
    return found


def rerate(receipt, receipts, plans, book):
    """Amount of an export's row under a price book, by plain arithmetic."""
    if receipt["kind"] == "correction":
        [undone] = [r for r in receipts if r["entry_id"] == receipt["reverses_entry_id"]]
        return -rerate(undone, receipts, plans, book)
    if receipt["kind"] in ("credit", "payment"):
        return receipt["amount_nanousd"]
    if receipt["price_version"] is None:
        return 0

    def price(name, was):
        revision = receipt["base_revision"]
        if receipt["kind"] != "usage" and receipt["adapter_version"] == 1:
            revision = "b" * 64
        owners = [("adapter", receipt["adapter_id"]), ("base", BASES.get(revision))]
        owners += [("tenant", receipt["tenant_id"])]
        owners += [("plan", plans[receipt["tenant_id"]]), ("default", "")]
        named = [book[owner][name] for owner in owners if name in book.get(owner, {})]
        return Decimal(named[0] if named else was)

    if receipt["kind"] != "usage":
        rate = price(f"{receipt['kind']}_nanousd", receipt["kept_nanousd"])
        hours = Decimal(receipt["duration_ms"]) / 3_600_000
        exact = Decimal(receipt["size_bytes"]) / 10**9 * hours * rate
        return int(exact.quantize(Decimal(1), rounding=ROUND_HALF_UP))
    nothing_came = receipt["stop_cause"] == "deadline" and receipt["completion_tokens"] == 0
    impossible = receipt["cached_tokens"] > receipt["prompt_tokens"]
    broke = receipt["stop_cause"] == "engine_failure" or receipt["is_failed"]
    if nothing_came or impossible or broke:
        return 0
    uncached = receipt["prompt_tokens"] - receipt["cached_tokens"]
    parts = ("prompt", uncached), ("cached", receipt["cached_tokens"])
    return int(sum(
        count * price(f"{name}_nanousd", receipt[f"{name}_nanousd"])
        for name, count in (*parts, ("completion", receipt["completion_tokens"]))
    ))  # fmt: skip


def test_under_the_prices_that_were_it_is_the_bill(filled):
    database, plans, receipts = filled
    billed = by_line(receipts, lambda receipt: receipt["amount_nanousd"])
    assert {kind for _, kind in billed} == {
        "usage", "storage", "pinned", "resident", "credit", "payment", "correction",
    }  # fmt: skip
    assert run_simulation(database, {}) == billed
    assert run_simulation(database, {}, window=7) == billed
    for tenant_id in plans:
        mine = {key: line for key, line in billed.items() if key[0] == tenant_id}
        assert run_simulation(database, {}, tenant_id=tenant_id) == mine


def test_only_what_ended_in_the_time_counts(filled):
    database, _, receipts = filled
    start_ms, end_ms = NOW_MS + 3000, NOW_MS + 9000
    inside = [r for r in receipts if "T02:40:03" <= r["ended_at"][10:19] < "T02:40:09"]
    assert 0 < len(inside) < len(receipts)
    found = run_simulation(database, {}, start_ms, end_ms)
    assert found == by_line(inside, lambda receipt: receipt["amount_nanousd"])


prices = st.dictionaries(st.sampled_from(FIELDS), st.integers(0, 10**12))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(default=prices, gold=prices, acme=prices, small=prices, adapter=prices)
def test_under_another_book_it_is_what_the_export_makes_of_it(
    filled, default, gold, acme, small, adapter
):
    database, plans, receipts = filled
    book = {
        ("default", ""): default,
        ("plan", "gold"): gold,
        ("tenant", next(iter(plans))): acme,
        ("base", "small"): small,
        ("adapter", "ad_1"): adapter,
    }
    expected = by_line(receipts, lambda receipt: rerate(receipt, receipts, plans, book))
    assert run_simulation(database, book) == expected


def test_both_databases_say_the_same(each_database):
    make_price(each_database)
    each_database.write_sync(fill)
    book = {("default", ""): {"prompt_nanousd": 11, "storage_nanousd": 13 * 10**9}}
    book["base", "small"] = {"prompt_nanousd": 12, "storage_nanousd": 14 * 10**9}
    plans = {r["tenant_id"]: "" for r in receipts_of(each_database)}
    receipts = receipts_of(each_database)
    expected = by_line(receipts, lambda receipt: rerate(receipt, receipts, plans, book))
    assert run_simulation(each_database, book, window=9) == expected


def test_what_failed_while_it_was_free_stays_free(sqlite_database):
    database = sqlite_database
    make_price(database)
    nothing = Prices(**dict.fromkeys(FIELDS, 0))

    def use(conn):
        price = add_price(conn, nothing, effective_at_ms=NOW_MS, now_ms=NOW_MS)
        for number in (1, 2):
            insert_hold(conn, make_hold(price, f"r{number}"))
            ledger.post(conn, SIGNER, ENGINE, [make_end(number, f"r{number}")], NOW_MS)
        assert ledger.mark_failed(conn, SIGNER, "r2", NOW_MS) is None  # it was free

    database.write_sync(use)
    book = {("default", ""): {"prompt_nanousd": 1}}
    assert run_simulation(database, book) == {("ten_1", "usage"): (2, 0, 7)}


# ---- over HTTP, and from the command line ----


def test_an_operator_asks_what_a_month_would_have_cost(product):
    database = product.gateway.database
    database.write_sync(fill)
    dear = {name: 2 * getattr(DEFAULT_PRICES, name) for name in FIELDS}
    version = product.operator.call("POST", "/admin/v1/prices", dear).json()["price_version"]
    before = receipts_of(database)

    def ask(**body):
        times = {"start": str(NOW_MS // 1000), "end": str(END_MS // 1000), **body}
        return product.operator.call("POST", "/admin/v1/billing/simulate", times)

    by_version = ask(price_version=version, tenant="globex").json()
    by_book = ask(book={"default": dear}, tenant="globex").json()
    assert by_version == by_book
    usage = {line["kind"]: line for line in by_book["data"]}["usage"]
    assert usage["simulated_nanousd"] == 2 * usage["actual_nanousd"] > 0
    assert usage["difference_usd"] == usage["actual_usd"]
    of_base = ask(book={"bases": {"small": {"prompt_nanousd": 10**9}}}).json()
    assert of_base["total"]["difference_nanousd"] > 10**9
    same = ask(book={"tenants": {"acme": {}}, "plans": {"gold": {}}, "bases": {"small": {}}}).json()
    assert same["total"]["difference_nanousd"] == 0
    assert same["total"]["actual_nanousd"] == sum(receipt["amount_nanousd"] for receipt in before)
    assert receipts_of(database) == before
    refused = [ask(), ask(price_version=1, book={}), ask(book={"default": {"prompt_nanousd": -1}})]
    assert [answer.status_code for answer in refused] == [400] * 3
    unknown = [
        ask(price_version=99), ask(price_version=1, tenant="nobody"),
        ask(book={"adapters": {"x": {}}}), ask(book={"tenants": {"nobody": {}}}),
    ]  # fmt: skip
    assert [answer.status_code for answer in unknown] == [404] * 4


def test_the_command_line_asks_for_one_kind_of_prices(monkeypatch, tmp_path):
    amounts = {name: "1.000000000" for name in ("actual_usd", "simulated_usd", "difference_usd")}
    line = {"tenant": "acme", "tenant_id": "ten_1", "kind": "usage", "num_entries": 3, **amounts}
    own = {**line, "tenant": None, "tenant_id": "ten_2"}
    answer = {"data": [line, own], "total": {"num_entries": 3, **amounts}}
    api = Api(fixed({("POST", "/admin/v1/billing/simulate"): (200, answer)}))
    run = make_run(api.url, monkeypatch, tmp_path)
    book = tmp_path / "book.json"
    book.write_text('{"plans": {"gold": {"prompt_nanousd": 1}}}')
    shown = run("simulate", "--start", "2026-03-01", "--prompt-nanousd", "0").stdout.splitlines()
    assert [row.split()[0] for row in shown] == ["tenant", "acme", "ten_2", "all"]
    assert json.loads(run("simulate", "--price-version", "2", "--json").stdout) == answer
    run("simulate", "--book", str(book), "--tenant", "acme")
    sent = [json.loads(request.content) for request in api.requests]
    assert sent[0]["book"] == {"default": {"prompt_nanousd": 0}}
    assert sent[1]["price_version"] == 2
    assert (sent[2]["book"], sent[2]["tenant"]) == (json.loads(book.read_text()), "acme")
    assert run("simulate").exit_code == 2
    assert run("simulate", "--price-version", "2", "--prompt-nanousd", "1").exit_code == 2
    assert run("simulate", "--book", str(tmp_path / "none")).exit_code == 2
    api.close()
