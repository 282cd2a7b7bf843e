"""Every place that says what was spent says the same of one ledger, as the documents say."""

import csv
import io
import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from server.billing import budgets, credits, statements
from server.billing.audit.run import audit
from server.billing.credits import CreditKind
from server.billing.exports.formats import FORMATS
from server.billing.months import end_of, month_of
from server.billing.prices import DEFAULT_PRICES
from server.billing.receipts.receipt import Receipt
from server.billing.statements import Statements
from server.billing.tenant_figures import list_tenant_figures
from tests.server.console.browsing import SignIn
from tests.server.export_ledger import keep, use
from tests.server.factories import NOW_MS
from tests.server.fake_api import Api, fixed, make_run
from tests.server.in_process import InProcess, User

ROOT = Path(__file__).parents[3]
MONTH = month_of(NOW_MS)
DAYS = f"start={MONTH}-01&end={MONTH}-28"
TIMES = f"start={MONTH}-01&end={end_of(MONTH) // 1000}"
UNIX_TIMES = f"start_time={NOW_MS // 1000 - 86_400}&end_time={end_of(MONTH) // 1000}"
REQUEST = 7 * 150 + 5 * 600
SPENT = 2 * REQUEST + DEFAULT_PRICES.storage_nanousd
BOOKED = {"credit": -1_700_000_000, "payment": -13_000_000_000, "reversal": 10_200_000_000}


@pytest.fixture(scope="module")
def tenant(product: InProcess) -> User:
    """A tenant with three requests, a gigabyte kept for an hour, two credits and two payments, of
    which one each was corrected, as one of the requests was.
    """
    user = product.user("spender", scopes=frozenset({"usage:read"}))
    database, signer = product.gateway.database, product.gateway.signer

    def credit(kind: CreditKind, amount_usd: str) -> Receipt:
        amount = int(Decimal(amount_usd) * 10**9)
        options = {"memo": None, "idempotency_key": f"{kind} {amount}", "now_ms": NOW_MS}
        return database.write_sync(
            lambda c: credits.post_credit(c, signer, kind, user.tenant_id, amount, **options)
        )

    def correct(entry_id: object) -> None:
        options = {"memo": None, "idempotency_key": f"undo {entry_id}", "now_ms": NOW_MS}
        database.write_sync(lambda c: credits.post_correction(c, signer, int(entry_id), **options))

    use(database, user.tenant_id, 3, at_ms=NOW_MS)
    keep(database, user.tenant_id, size_bytes=10**9, duration_ms=3_600_000)
    credit("credit", "1.5")
    credit("payment", "3")
    wrong = [credit("credit", "0.2"), credit("payment", "10")]
    used = user.call("GET", f"/v1/usage/export?format=jsonl&{TIMES}").text.splitlines()[0]
    for receipt in (*wrong, json.loads(used)):
        correct(receipt["entry_id"])
    Statements(database, signer, now_ms=lambda _: end_of(MONTH)).issue(user.tenant_id, MONTH)
    return user


def usage(user: User) -> tuple[int, dict[str, int]]:
    answer = user.call("GET", f"/v1/usage?{TIMES}").json()
    for name in ("model", "key", "kind", "day", "adapter_digest"):
        groups = user.call("GET", f"/v1/usage?{TIMES}&group_by={name}").json()
        assert sum(group["amount_nanousd"] for group in groups["data"]) == SPENT
    booked = {it["kind"]: it["amount_nanousd"] for it in answer["bookings"]}
    return answer["data"][0]["amount_nanousd"], booked


def costs(user: User) -> int:
    answer = user.call("GET", f"/v1/organization/costs?{UNIX_TIMES}&group_by=line_item&limit=31")
    results = [result for bucket in answer.json()["data"] for result in bucket["results"]]
    return sum(result["amount_nanousd"] for result in results)


def budget(user: User) -> int:
    database = user.product.gateway.database
    return database.read_sync(lambda c: budgets.read_sums(c, user.tenant_id, NOW_MS)).spent_nanousd


def listed(user: User) -> int:
    read = user.product.gateway.database.read_sync
    figures = read(
        lambda c: list_tenant_figures(c, now_ms=NOW_MS, tenant_id=user.tenant_id, limit=1)
    )
    return figures[0].spent_nanousd


def audited(user: User) -> int:
    report = user.product.gateway.database.read_sync(audit)
    sums = ("months", "roll-ups", "days", "corrections", "accounts")
    assert [found for found in report.findings if found.check in sums] == []
    return budget(user)


def statement(user: User) -> tuple[int, dict[str, int]]:
    values = user.call("GET", f"/v1/statements/{MONTH}").json()["statement"]
    totals = {kind: values["totals"][kind]["amount_nanousd"] for kind in BOOKED}
    return values["spent_nanousd"], totals


def focus(user: User) -> tuple[int, dict[str, int]]:
    text = user.call("GET", f"/v1/usage/export?format=focus&{TIMES}").text
    sums = {"Usage": 0, "Credit": 0}
    for row in csv.DictReader(io.StringIO(text)):
        sums[row["ChargeCategory"]] += int(Decimal(row["BilledCost"]) * 10**9)
    assert sums["Credit"] == -1_500_000_000
    return sums["Usage"], BOOKED


def export(user: User) -> tuple[int, dict[str, int]]:
    text = user.call("GET", f"/v1/usage/export?format=csv&{TIMES}").text
    sums = dict.fromkeys(("usage", "storage", "correction", *BOOKED), 0)
    for row in csv.DictReader(io.StringIO(text)):
        sums[row["kind"]] += int(row["amount_nanousd"])
    booked = {kind: sums.pop(kind) for kind in BOOKED}
    return sum(sums.values()), booked


def titled(page: str, near: str) -> int:
    """The first amount on a page after a text, in nano-dollars."""
    found = re.search(r'title="(-?\d+) nano-dollars"', page[page.index(near) :])
    assert found
    return int(found[1])


def test_every_surface_of_the_documents_says_the_same(
    tenant: User,
    signed_in: SignIn,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def command(user: User) -> int:
        answer = user.call("GET", f"/v1/usage?{TIMES}&group_by=kind").json()
        api = Api(fixed({("GET", "/v1/usage"): (200, answer)}))
        try:
            shown = make_run(api.url, monkeypatch, tmp_path)("usage", "show", "--group-by", "kind")
        finally:
            api.close()
        amounts = dict(re.findall(r"^(\w+) .*?(-?[0-9.]+) *$", shown.stdout, re.MULTILINE))
        assert {kind: int(Decimal(amounts[kind]) * 10**9) for kind in BOOKED} == BOOKED
        return int(Decimal(amounts["total"]) * 10**9)

    visitor = signed_in(tenant)
    [summary] = tenant.call("GET", "/v1/statements").json()["data"]
    places = {
        "`GET /v1/usage`": usage,
        "`chorale usage show`": command,
        "`GET /v1/organization/costs`": costs,
        "`GET /v1/budgets`": budget,
        "the console's page Spend": lambda _: titled(
            visitor.get(f"/console?{DAYS}").text, "<dt>spent</dt>"
        ),
        "the console's page Bill": lambda _: titled(
            visitor.get("/console/bill").text, f"/console/bill/{MONTH}"
        ),
        "the operator's list of tenants": listed,
        "`GET /v1/statements`": lambda _: int(Decimal(summary["spent_usd"]) * 10**9),
        "`GET /v1/statements/{period}`": statement,
        "an export in FOCUS": focus,
        "any other export": export,
        "`chorale audit`": audited,
    }
    page = (ROOT / "docs/tenant/bill.md").read_text().partition('## What "spent" means')[2]
    table = re.findall(r"^\| ([^|]+) \|", page.partition("\n## ")[0], re.MULTILINE)
    assert table[1:] == list(places)
    assert {name: find(tenant) for name, find in places.items()} == {
        name: (SPENT, BOOKED) if find in (usage, statement, focus, export) else SPENT
        for name, find in places.items()
    }
    assert len(FORMATS) == 5


def test_the_statement_of_an_open_month_says_the_same(product: InProcess, tenant: User) -> None:
    read = product.gateway.database.read_sync
    found = read(lambda conn: statements.open_period(conn, tenant.tenant_id, MONTH))
    assert found.spent_nanousd == SPENT
