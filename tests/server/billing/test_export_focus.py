"""FOCUS 1.2: columns, types, nulls and rules follow the specification."""

import csv
import io
import json
from collections import Counter
from datetime import datetime
from decimal import Decimal

import pytest

from server.billing.exports import focus
from server.billing.exports.csv_rows import parse_cell
from server.billing.receipts.receipt import COLUMNS as RECEIPT_COLUMNS
from tests.server import focus_1_2
from tests.server.receipt_makers import make_kept, make_row, make_rows, make_usage, reverse, seal

NANO = Decimal(1).scaleb(-9)


@pytest.fixture(scope="module")
def receipts():
    """Receipts of every kind; half are reversed, in their month or after it was issued."""
    rows = make_rows(seed=11, count=60)
    for i, receipt in enumerate(seal(rows)):
        if i % 2 and receipt["amount_nanousd"]:
            rows.append(reverse(receipt) | {"period": "2026-02" if i % 4 == 1 else "2026-03"})
    return seal(rows)


@pytest.fixture(scope="module")
def rows(receipts):
    """Rows as a reader of the file sees them; null is None."""
    text = (focus.HEADER + focus.encode(receipts)).decode()
    found = csv.DictReader(io.StringIO(text, newline=""))
    return [{name: parse_cell(cell) for name, cell in row.items()} for row in found]


def test_every_mandatory_column_is_there_and_those_of_our_features_first_ours_last():
    wanted = {
        name for name, column in focus_1_2.COLUMNS.items()
        if column.level == "Mandatory" or name in focus_1_2.OF_OURS
    }  # fmt: skip
    standard = [name for name in focus.COLUMNS if not name.startswith("x_")]
    assert wanted <= set(standard) <= focus_1_2.COLUMNS.keys()
    assert standard == sorted(standard)
    assert focus.COLUMNS[len(standard) :] == ("x_EntryId", "x_Receipt")


@pytest.mark.parametrize("name", [name for name in focus.COLUMNS if not name.startswith("x_")])
def test_a_columns_cells_are_of_its_type_and_null_only_where_they_may_be(rows, name):
    column = focus_1_2.COLUMNS[name]
    cells = {row[name] for row in rows}
    assert column.is_nullable or None not in cells
    for cell in cells - {None}:
        assert focus_1_2.FORMATS[column.type].fullmatch(cell)
        assert column.values is None or cell in column.values


def test_what_is_null_with_what(rows):
    for row in rows:
        is_usage, is_correction = row["ChargeCategory"] == "Usage", row["ChargeClass"] is not None
        for name in (
            "ContractedUnitPrice", "ListUnitPrice", "PricingCategory", "PricingQuantity", "SkuId",
            "SkuPriceId",
        ):  # fmt: skip
            assert row[name] is not None or not is_usage or is_correction, name
        assert (row["ConsumedQuantity"] is None) == (not is_usage)
        for name, other in (
            ("ConsumedUnit", "ConsumedQuantity"),
            ("PricingUnit", "PricingQuantity"),
            ("SkuMeter", "SkuId"),
            ("ResourceType", "ResourceId"),
            ("SubAccountName", "SubAccountId"),
        ):
            assert (row[name] is None) == (row[other] is None), (name, other)
        assert row["ResourceId"] is not None or row["ResourceName"] is None
        assert row["SkuPriceId"] is not None or row["SkuPriceDetails"] is None
        for name in ("ConsumedUnit", "PricingUnit"):
            assert row[name] is None or row[name] in focus_1_2.UNITS


def test_unit_price_times_quantity_is_the_cost_to_the_nano_dollar(rows):
    for row in rows:
        for price, cost in (
            ("ContractedUnitPrice", "ContractedCost"),
            ("ListUnitPrice", "ListCost"),
        ):
            if row[price] is not None:
                assert Decimal(row[price]) >= 0
                product = Decimal(row[price]) * Decimal(row["PricingQuantity"])
                # The cost of tokens is exact; a GB-hour's cost is rounded once, in the receipt.
                most = NANO * Decimal("0.500000001") if row["PricingUnit"] == "GB-Hours" else 0
                assert abs(product - Decimal(row[cost])) <= most
        if row["ContractedUnitPrice"] is None:
            assert row["ContractedCost"] == row["ListCost"] == row["BilledCost"]
        if row["ChargeCategory"] not in ("Usage", "Purchase"):
            assert row["EffectiveCost"] == row["BilledCost"]


def test_periods_are_half_open_and_in_utc(rows, receipts):
    by_entry = {str(receipt["entry_id"]): receipt for receipt in receipts}
    for row in rows:
        receipt = by_entry[row["x_EntryId"]]
        start, end = (
            datetime.fromisoformat(row[f"ChargePeriod{side}"]) for side in ("Start", "End")
        )
        ended = datetime.fromisoformat(receipt["ended_at"])
        began = datetime.fromisoformat(receipt["started_at"] or receipt["ended_at"])
        assert start <= began <= ended <= end
        assert start < end
        assert row["BillingPeriodStart"] == f"{receipt['period']}-01T00:00:00Z"
    months = {(row["BillingPeriodStart"][:7], row["BillingPeriodEnd"]) for row in rows}
    assert months == {("2026-02", "2026-03-01T00:00:00Z"), ("2026-03", "2026-04-01T00:00:00Z")}


def test_an_invoices_billed_cost_is_what_its_receipts_come_to(rows, receipts):
    billed, wanted = Counter(), Counter()
    for row in rows:
        billed[row["InvoiceId"]] += Decimal(row["BilledCost"])
    for receipt in receipts:
        if receipt["kind"] != "payment" and "payment" not in receipt["debit_account"]:
            invoice = f"{receipt['tenant_id']}/{receipt['period']}"
            wanted[invoice] += receipt["amount_nanousd"] * NANO
    assert len(wanted) == 4
    assert billed == wanted


def test_only_a_correction_of_an_issued_month_is_one_by_class(rows, receipts):
    kinds = {str(receipt["entry_id"]): receipt for receipt in receipts}
    classes = Counter(
        (kinds[row["x_EntryId"]]["reverses_entry_id"] is not None, row["BillingPeriodStart"][:7],
         row["ChargeClass"])
        for row in rows
    )  # fmt: skip
    assert set(classes) == {
        (False, "2026-02", None), (True, "2026-02", None), (True, "2026-03", "Correction"),
    }  # fmt: skip


def one(row):
    [receipt] = seal([row])
    return focus.focus_rows(receipt)


def facts(rows, *names):
    return [tuple(row[name] for name in names) for row in rows]


def test_a_request_is_a_row_for_each_kind_of_tokens_that_it_has():
    names = ("SkuMeter", "ConsumedQuantity", "BilledCost", "SkuPriceId")
    assert facts(one(make_usage(prompt=7, cached=2, completion=5)), *names) == [
        ("Prompt Tokens", "5", "0.000000750", "1/prompt"),
        ("Cached Prompt Tokens", "2", "0.000000150", "1/cached"),
        ("Completion Tokens", "5", "0.000003000", "1/completion"),
    ]
    assert facts(one(make_usage(prompt=0, cached=0, completion=0)), *names) == [
        ("Prompt Tokens", "0", "0.000000000", "1/prompt")
    ]


def test_what_we_broke_is_counted_at_its_list_price_and_costs_nothing():
    rows = one(make_usage(prompt=7, cached=0, completion=5, finish_reason="error",
                          stop_cause="engine_failure"))  # fmt: skip
    names = ("ConsumedQuantity", "ListUnitPrice", "ListCost", "ContractedUnitPrice", "BilledCost")
    assert facts(rows, *names) == [
        ("7", "0.000000150", "0.000001050", "0.000000000", "0.000000000"),
        ("5", "0.000000600", "0.000003000", "0.000000000", "0.000000000"),
    ]


def test_what_is_kept_is_priced_by_gb_hours():
    [row] = one(make_kept("pinned", size_bytes=10**9, duration_ms=5_400_000))
    assert facts([row], "ConsumedQuantity", "ConsumedUnit", "BilledCost", "ResourceId") == [
        ("1.500000000000000000", "GB-Hours", "0.060000002", "d" * 64)
    ]


def test_a_credit_is_negative_and_a_payment_no_charge_nor_one_that_is_taken_back():
    give = {"is_charge": False, "memo": "sorry"}
    [row] = one(make_row("credit", 5 * 10**9, **give))
    assert facts([row], "ChargeCategory", "BilledCost", "ChargeDescription", "SkuId") == [
        ("Credit", "-5.000000000", "sorry", None)
    ]
    paid = make_row("payment", 5 * 10**9, **give) | {"debit_account": "cash/payment"}
    assert one(paid) == []
    [receipt] = seal([paid])
    assert one(reverse(receipt)) == []


def test_a_reversed_charge_is_one_of_it_taken_back():
    [charge] = seal([make_usage(prompt=7, cached=2, completion=5)])
    [row] = one(reverse(charge))
    assert facts([row], "ChargeCategory", "ChargeClass", "BilledCost", "PricingQuantity") == [
        ("Usage", None, "-0.000003900", "-1")
    ]
    assert row["SkuPriceId"] == f"entry/{charge['entry_id']}"


def test_the_first_row_of_an_entry_has_its_receipt_and_no_other(rows, receipts):
    found = [json.loads(row["x_Receipt"]) for row in rows if row["x_Receipt"]]
    assert found == [receipt for receipt in receipts if receipt["kind"] != "payment"]
    assert all(tuple(receipt) == RECEIPT_COLUMNS for receipt in found)
    seen = set()
    for row in rows:
        assert (row["x_Receipt"] is None) == (row["x_EntryId"] in seen)
        seen.add(row["x_EntryId"])


def test_a_name_in_a_bill_is_no_formula():
    row = make_usage(model="=1+1") | {"tenant_name": "@SUM(A1)", "adapter_digest": "d" * 64}
    cells = focus.focus_cells(*seal([row]))[0]
    named = dict(zip(focus.COLUMNS, cells, strict=True))
    assert (named["BillingAccountName"], named["ResourceName"]) == ("'@SUM(A1)", "'=1+1")
