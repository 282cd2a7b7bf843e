import dataclasses
import io
import json
import re
from decimal import ROUND_HALF_UP, Decimal

import pytest
import sqlalchemy as sa

from registry.tables import adapters
from server.api.receipt_models import IssuedStatement
from server.billing import holds, ledger
from server.billing.exports.reading import read_export
from server.billing.months import end_of
from server.billing.prices import get_price
from server.billing.receipts.check import ReceiptCheck, statement_faults
from server.billing.statements import Statements
from server.billing.storage_stretches import Stretch, post_stretches
from tests.server.export_ledger import give
from tests.server.factories import ENGINE, NOW_MS, make_end, make_hold
from tests.server.fake_api import Api, fixed, make_run

MONTH = "2026-02"
"""Month of NOW_MS."""


@pytest.fixture
def product(product):
    set_time(product, end_of(MONTH))
    return product


def set_time(product, now_ms):
    database, signer = product.gateway.database, product.gateway.signer
    issuing = Statements(database, signer, now_ms=lambda _: now_ms)
    product.gateway = dataclasses.replace(product.gateway, statements=issuing)


def use(user, number, at_ms=NOW_MS):
    def post(conn):
        hold = make_hold(get_price(conn, 1), f"r{number}", tenant_id=user.tenant_id)
        holds.insert_hold(conn, hold)
        end = make_end(number, f"r{number}", tenant_id=user.tenant_id, at=at_ms / 1000)
        ledger.post(conn, user.product.gateway.signer, ENGINE, [end], NOW_MS)

    user.product.gateway.database.write_sync(post)


def get(user, path=""):
    answer = user.call("GET", f"/v1/statements{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def issue(product, **body):
    return product.operator.call("POST", "/admin/v1/statements", {"period": MONTH} | body)


def test_an_open_month_says_how_it_stands_and_an_issued_one_is_signed(product):
    acme = product.user("acme")
    use(acme, 1)
    use(acme, 2)
    charged = 2 * (7 * 150 + 5 * 600)
    opened = get(acme, f"/{MONTH}")
    assert (opened["status"], opened.keys() & {"sha256", "signature"}) == ("open", set())
    assert opened["statement"]["totals"] == {"usage": {"num_entries": 2, "amount_nanousd": charged}}
    assert opened["statement"]["closing_balance_nanousd"] == charged
    assert issue(product).json()["data"][0]["tenant_id"] == acme.tenant_id
    issued = get(acme, f"/{MONTH}")
    assert issued["status"] == "issued"
    keys = {product.gateway.signer.key_id: product.gateway.signer.public}
    sealed = issued["statement"], issued["sha256"], issued["signature"]
    assert list(statement_faults(*sealed, keys)) == []
    for name in ("total_nanousd", "num_entries", "closing_balance_nanousd", "totals", "period"):
        assert issued["statement"][name] == opened["statement"][name]


def test_the_example_of_a_statement_has_the_names_of_one(product):
    acme = product.user("acme")
    use(acme, 1)
    issue(product)
    statement = get(acme, f"/{MONTH}")["statement"]
    [example] = IssuedStatement.model_fields["statement"].examples
    assert example.keys() == statement.keys()
    assert example["lines"][0].keys() == statement["lines"][0].keys()


def test_months_are_listed_with_what_they_came_to(product):
    acme = product.user("acme")
    assert get(acme) == {"object": "list", "data": [], "has_more": False}
    use(acme, 1)
    [opened] = get(acme)["data"]
    assert (opened["period"], opened["status"], opened["issued_at"]) == (MONTH, "open", None)
    issue(product)
    [issued] = get(acme)["data"]
    assert issued == opened | {
        "status": "issued",
        "issued_at": end_of(MONTH) // 1000,
        "sha256": get(acme, f"/{MONTH}")["sha256"],
    }
    assert issued["total_usd"] == "0.000004050"


def test_open_months_come_first_and_the_newest_of_all(product):
    acme = product.user("acme")
    use(acme, 1)
    issue(product)
    for number, month in ((2, "2026-02"), (3, "2026-03")):
        use(acme, number, end_of(month))
    found = [(listed["period"], listed["status"]) for listed in get(acme)["data"]]
    assert found == [("2026-04", "open"), ("2026-03", "open"), ("2026-02", "issued")]


def test_the_operator_issues_for_all_or_for_one_and_once(product, monkeypatch):
    users = [product.user(name) for name in ("acme", "globex", "initech")]
    for number, user in enumerate(users[:2], start=1):
        use(user, number)

    def tenants(answer):
        return {found["tenant_id"] for found in answer.json()["data"]}

    assert tenants(issue(product, tenant="globex")) == {users[1].tenant_id}
    assert tenants(issue(product, tenant="initech")) == set()
    assert tenants(issue(product)) == {users[0].tenant_id}
    assert issue(product).json() == {"object": "list", "data": [], "has_more": False}
    assert issue(product, tenant="nobody").status_code == 404


def test_more_tenants_than_one_call_issues_for_are_told_of(product, monkeypatch):
    monkeypatch.setattr("server.api.endpoints.statements.MAX_ISSUED", 2)
    for number in range(1, 4):
        use(product.user(f"tenant-{number}"), number)
    first, second = issue(product).json(), issue(product).json()
    assert (len(first["data"]), first["has_more"]) == (2, True)
    assert (len(second["data"]), second["has_more"]) == (1, False)


def test_a_month_that_is_not_over_is_refused(product):
    acme = product.user("acme")
    use(acme, 1)
    set_time(product, end_of(MONTH) - 1)
    answer = issue(product)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "period_not_over")
    assert get(acme, f"/{MONTH}")["status"] == "open"


@pytest.mark.parametrize("period", ["2026-13", "2026-2", "26-02", "x", "2026-02-01"])
def test_a_period_is_a_month(product, period):
    answer = product.user("acme").call("GET", f"/v1/statements/{period}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "period")
    assert issue(product, period=period).status_code == 400


def test_the_audit_log_says_none_where_an_address_is_taken_away(product):
    product.user("acme")
    changes = {"address": None, "ignore_unknown_fields": True}
    product.operator.call("PATCH", "/admin/v1/tenants/acme", changes)
    lines = product.operator.call("GET", "/admin/v1/audit-log").json()["data"]
    details = {line["action"]: line["detail"] for line in lines}
    assert details["tenant.address"] == "address=none"
    assert details["tenant.ignore_unknown_fields"] == "ignore_unknown_fields=true"


def test_the_command_line_shows_a_month_and_keeps_it_for_the_verifier(
    product, monkeypatch, tmp_path
):
    acme, database = product.user("acme"), product.gateway.database
    details = {"legal_name": "Acme Ltd.", "address": "1 Main Street"}
    changed = product.operator.call("PATCH", "/admin/v1/tenants/acme", details).json()
    assert changed.items() >= details.items()
    path = "/admin/v1/tenants/acme"
    assert product.operator.call("PATCH", path, {"legal_name": "a\0"}).status_code == 400
    assert product.operator.call("PATCH", path, {"plan": None}).json() == changed
    use(acme, 1)
    adapter = {"adapter_id": "ada_1", "tenant_id": acme.tenant_id, "name": "support"}
    row = adapter | {"created_at_ms": 1}
    database.write_sync(lambda conn: conn.execute(sa.insert(adapters).values(row)))
    stretches = [
        Stretch(
            kind="storage", source="test", source_id=str(size_bytes), tenant_id=acme.tenant_id,
            adapter_id="ada_1", adapter_version=1, adapter_digest="d" * 64, tier="store",
            size_bytes=size_bytes, started_at_ms=NOW_MS - 1000, at_ms=NOW_MS, duration_ms=1000,
        )
        for size_bytes in (37_000_001, 37_000_003, 37_000_007)
    ]  # fmt: skip
    signer = product.gateway.signer
    database.write_sync(lambda conn: post_stretches(conn, signer, stretches, NOW_MS))
    give(database, "payment", acme.tenant_id, 10**9)
    issue(product)
    answers = {
        ("GET", "/v1/statements"): (200, get(acme)),
        ("GET", f"/v1/statements/{MONTH}"): (200, get(acme, f"/{MONTH}")),
    }
    api = Api(fixed(answers))
    run = make_run(api.url, monkeypatch, tmp_path)
    try:
        assert MONTH in run("statements", "list").stdout
        assert json.loads(run("statements", "list", "--json").stdout) == get(acme)["data"]
        shown = run("statements", "show", MONTH).stdout
        kept = run("statements", "show", MONTH, "--json").stdout
    finally:
        api.close()
    (tmp_path / "statement.json").write_text(kept)
    key = product.gateway.signer.public.raw.hex()
    assert run("receipts", "verify", "statement.json", "--key", key).exit_code == 0
    assert re.search(r"^address +1 Main Street", shown, re.MULTILINE)
    assert re.search(r"^spent_usd +0\.\d{9}$", shown, re.MULTILINE)
    line = r"^(\w+) +([-\w]+) +(\w+) +([-\d]+) +([-\d.]+) +(0\.\d{9}) +(-?0\.\d{9})$"
    lines = re.findall(line, shown, re.MULTILINE)
    assert {(kind, name) for kind, name, *_ in lines} == {
        ("usage", "base"), ("storage", "support"), ("storage", "-"),
    }  # fmt: skip
    # In a column all amounts end at the same place and have the same decimals.
    assert len({len(found[0]) for found in re.finditer(line, shown, re.MULTILINE)}) == 1
    for *_, quantity, unit_usd, amount_usd in lines:
        product = Decimal(quantity) * Decimal(unit_usd)
        assert product.quantize(Decimal("1e-9"), ROUND_HALF_UP) == Decimal(amount_usd)
    [payment] = re.findall(r"^2026-\S+ .* (-[0-9.]+)$", shown, re.MULTILINE)
    assert payment == "-1.000000000"


# ---- exports of a statement's period ----


def test_an_export_of_a_period_has_what_its_statement_sums_up(product):
    acme = product.user("acme")
    use(acme, 1)
    issue(product)
    use(acme, 2)  # too late for its own month
    use(acme, 3, end_of(MONTH))
    set_time(product, end_of("2026-03"))
    issue(product, period="2026-03")
    for period, count in ((MONTH, 1), ("2026-03", 2), ("2026-04", 0)):
        rows = acme.call("GET", f"/v1/usage/export?format=jsonl&period={period}").text.splitlines()
        assert [json.loads(row)["period"] for row in rows] == [period] * count
        of_all = f"/admin/v1/usage/export?format=jsonl&period={period}"
        assert product.operator.call("GET", of_all).text.splitlines() == rows
    found = get(acme, "/2026-03")
    check = ReceiptCheck(
        {found["statement"]["signing_key"]: product.gateway.signer.public},
        statement=found["statement"],
    )
    text = acme.call("GET", "/v1/usage/export?format=csv&period=2026-03").content
    for row, receipt in enumerate(read_export(io.BytesIO(text)), start=1):
        check.add(row, receipt)
    check.finish()
    assert check.findings == []


@pytest.mark.parametrize(
    "query", ["period=2026-13", "period=x", f"period={MONTH}&start=2026-01-01"]
)
def test_a_period_to_export_is_a_month_and_has_no_other_start_or_end(product, query):
    answer = product.user("acme").call("GET", f"/v1/usage/export?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "period")
