"""The pages of the bill."""

import hashlib
import re
import sys
from decimal import ROUND_HALF_UP, Decimal
from html import unescape

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from registry.tables import adapters
from server.billing.months import end_of, month_of
from server.billing.statements import Statement, Statements
from server.billing.storage_stretches import Stretch, post_stretches
from server.billing.tables import statements
from server.database.clock import now_ms
from tests.server.console.browsing import SignIn, Visitor
from tests.server.in_process import InProcess, User


def pay(user: User, dollars: str) -> None:
    path = f"/admin/v1/tenants/{user.tenant_id}/payments"
    body = {"amount_usd": dollars, "memo": "<i>wire</i>"}
    headers = {"idempotency-key": f"{user.tenant_id}-{dollars}"}
    assert user.product.operator.call("POST", path, body, headers).status_code == 201


def issue(user: User) -> Statement:
    """Issue the statement of this month, as if it was over."""
    gateway, month = user.product.gateway, month_of(now_ms())
    issuing = Statements(gateway.database, gateway.signer, now_ms=lambda conn: end_of(month))
    return issuing.issue(user.tenant_id, month)


def test_an_open_month_has_what_the_ledger_has(acme: User, visitor: Visitor) -> None:
    assert "There is nothing on the bill yet." in visitor.get("/console/bill").text
    pay(acme, "12.5")
    month = month_of(now_ms())
    page = visitor.get("/console/bill").text
    found = acme.call("GET", "/v1/statements").json()["data"][0]
    assert (found["period"], found["status"]) == (month, "open")
    assert f'title="{found["total_nanousd"]} nano-dollars"' in page
    assert f"start={month}-01" in page
    assert page.count("$12.50") == 2  # the credit, and the month with its sign


def test_an_issued_statement_is_on_its_page_as_it_was_signed(acme: User, signed_in: SignIn) -> None:
    pay(acme, "3")
    issued, visitor = issue(acme), signed_in(acme)
    assert issued.sha256[:12] in visitor.get("/console/bill").text
    page = visitor.get(f"/console/bill/{issued.period}").text
    found = re.search(r"data-document>(.*?)</code>", page)
    assert found
    assert hashlib.sha256(unescape(found[1]).encode()).hexdigest() == issued.sha256
    for value in (issued.sha256, issued.signature, issued.signing_key):
        assert f'="{value}"' in page
    assert "&lt;i&gt;wire&lt;/i&gt;" in page
    assert page.count(">-3.000000000<") == 2  # the kind, and the payment
    assert "<i>" not in page


def test_lines_name_their_adapter_and_multiply_as_printed(acme: User, signed_in: SignIn) -> None:
    at_ms, signer = now_ms(), acme.product.gateway.signer
    stretch = Stretch(
        kind="storage", source="test", source_id="1", tenant_id=acme.tenant_id, adapter_id="ada_1",
        adapter_version=1, adapter_digest="d" * 64, tier="store", size_bytes=7 * 10**9 + 1,
        started_at_ms=at_ms - 1, at_ms=at_ms, duration_ms=3_599_993,
    )  # fmt: skip
    adapter = {"adapter_id": "ada_1", "tenant_id": acme.tenant_id, "name": "support"}

    def keep(conn: Connection) -> None:
        conn.execute(sa.insert(adapters).values(adapter | {"created_at_ms": 1}))
        post_stretches(conn, signer, [stretch], at_ms)

    acme.product.gateway.database.write_sync(keep)
    page = signed_in(acme).get(f"/console/bill/{issue(acme).period}").text
    row = re.search(r"<td>storage</td><td>support</td><td>gb_hours</td>(.*?)</tr>", page, re.DOTALL)
    assert row
    _, quantity, unit, amount = re.findall(r">([0-9.]+)</td>", row[1])
    product = (Decimal(quantity) * Decimal(unit)).quantize(Decimal("1e-9"), ROUND_HALF_UP)
    assert str(product) == amount


def test_a_statements_file_is_what_the_api_answers(acme: User, signed_in: SignIn) -> None:
    pay(acme, "3")
    issued = issue(acme)
    file = signed_in(acme).get(f"/console/bill/{issued.period}/statement.json")
    assert file.json() == acme.call("GET", f"/v1/statements/{issued.period}").json()
    assert f"statement-{issued.period}.json" in file.headers["content-disposition"]


def test_what_follows_a_statement_is_in_the_open_months(acme: User, signed_in: SignIn) -> None:
    pay(acme, "4")
    issue(acme)
    pay(acme, "3")
    page = signed_in(acme).get("/console/bill").text
    assert 'title="-3000000000 nano-dollars"' in page
    assert 'title="-4000000000 nano-dollars"' in page


def test_a_page_of_statements_leads_to_the_older_ones(acme: User, visitor: Visitor) -> None:
    months = [f"20{year}-{month:02d}" for year in (21, 22) for month in range(1, 13)] + ["2023-01"]
    rows = [
        {
            "tenant_id": acme.tenant_id, "period": month, "issued_at_ms": 0, "num_entries": 1,
            "total_nanousd": 1, "document": '{"spent_nanousd": 1}', "sha256": "0" * 64,
            "signing_key": "k", "signature": "s",
        }
        for month in months
    ]  # fmt: skip
    acme.product.gateway.database.write_sync(lambda c: c.execute(sa.insert(statements), rows))
    first = visitor.get("/console/bill").text
    assert 'href="/console/bill?before=2021-02"' in first
    second = visitor.get("/console/bill?before=2021-02").text
    assert "/console/bill/2021-01" in second
    assert "/console/bill/2021-02" not in second
    assert "?before=" not in second


@pytest.mark.parametrize("format", ["csv", "jsonl", "focus", "cloudevents"])
def test_an_export_is_what_the_api_exports(acme: User, signed_in: SignIn, format: str) -> None:
    pay(acme, "3")
    file = signed_in(acme).get(f"/console/bill/export?format={format}")
    assert file.status_code == 200
    same = acme.call("GET", f"/v1/usage/export?format={format}")
    assert file.content == same.content
    assert file.content
    assert file.headers["content-disposition"] == same.headers["content-disposition"]


def test_a_statements_page_exports_its_receipts(acme: User, signed_in: SignIn) -> None:
    pay(acme, "3")
    issued, visitor = issue(acme), signed_in(acme)
    page = visitor.get(f"/console/bill/{issued.period}").text
    link = f"/console/bill/export?period={issued.period}"
    assert f'href="{link}"' in page
    assert len(visitor.get(link).text.splitlines()) == 2
    assert len(visitor.get("/console/bill/export?period=2021-01").text.splitlines()) == 1
    assert visitor.get("/console/bill/export?period=x").status_code == 400


def test_a_format_whose_library_is_missing_is_not_offered(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert visitor.get("/console/bill").text.count("<option>parquet") == 2
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    page = visitor.get("/console/bill").text
    assert "parquet" not in page
    assert page.count("<option>focus") == 2


def test_an_export_is_of_the_days_that_were_asked_for(acme: User, visitor: Visitor) -> None:
    pay(acme, "3")
    days = "start=2021-01-01&end=2021-12-31"
    assert visitor.get(f"/console/bill/export?format=jsonl&{days}").text == ""
    wrong = visitor.get("/console/bill/export?start=2021-01-01&end=2026-01-01")
    assert wrong.status_code == 400
    assert "366 days" in wrong.text


def test_schedules_are_listed(acme: User, signed_in: SignIn) -> None:
    acme.call("PUT", "/v1/usage/exports/focus", {"interval": "hour"})
    page = signed_in(acme).get("/console/bill").text
    assert f"exports/{acme.tenant_id}/focus/" in page


@pytest.mark.parametrize(("period", "status"), [("2021-01", 404), ("2021-13", 400), ("x", 400)])
@pytest.mark.parametrize("file", ["", "/statement.json"])
def test_a_month_without_a_statement_has_no_page(
    acme: User, signed_in: SignIn, period: str, status: int, file: str
) -> None:
    assert signed_in(acme).get(f"/console/bill/{period}{file}").status_code == status


def test_another_tenants_statement_is_not_found(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    pay(acme, "3")
    other = product.user(f"not-{acme.name}")
    assert signed_in(other).get(f"/console/bill/{issue(acme).period}").status_code == 404
