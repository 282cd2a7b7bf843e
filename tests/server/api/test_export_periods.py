"""An export of a statement's period."""

import io
import json

import pytest

from server.billing.exports.reading import read_export
from server.billing.months import end_of
from server.billing.receipts.check import ReceiptCheck
from tests.server.api.test_statement_routes import MONTH, get, issue, set_time, use


def test_an_export_of_a_period_has_what_its_statement_sums_up(product):
    acme = product.user("acme")
    use(acme, 1)
    set_time(product, end_of(MONTH))
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
