"""Receipts as charges of FOCUS 1.2, the FinOps Foundation's format of bills.

A pure function of the receipt, so that whoever reads a file can make its rows again and compare.
https://github.com/FinOps-Open-Cost-and-Usage-Spec/FOCUS_Spec, tag v1.2.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from decimal import Context, Decimal

from server.billing.exports.csv_rows import cell, encode_cells
from server.billing.exports.json_lines import encode_json
from server.billing.months import next_month
from server.billing.rating import TokenPrices, format_usd, rated_amounts
from server.billing.receipts.receipt import COLUMNS as RECEIPT_COLUMNS
from server.billing.receipts.receipt import Receipt, Value

COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency",
    "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "ContractedUnitPrice", "EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost",
    "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName",
    "PublisherName", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory",
    "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter", "SkuPriceDetails", "SkuPriceId",
    "SubAccountId", "SubAccountName", "x_EntryId", "x_Receipt",
)  # fmt: skip

Row = dict[str, str | None]
"""By the names of COLUMNS; None is null."""

_PROVIDER = "Chorale"
_SERVICE = "LoRA Serving"
_CASH = "cash"
"""The account that payments come from, or the first part of its name."""
_GB_HOUR = Decimal(10**9 * 3_600_000)
"""Bytes times milliseconds."""
_COSTS = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")
_EXACT = Context(prec=60)
_QUANTITY = Decimal(1).scaleb(-18)
_SECOND = timedelta(seconds=1)
_TOKEN_METERS = (
    ("prompt", "Prompt Tokens"),
    ("cached", "Cached Prompt Tokens"),
    ("completion", "Completion Tokens"),
)
_KEPT_METERS = {
    "storage": "Adapter Storage",
    "pinned": "Pinned Adapter Residency",
    "resident": "Adapter Residency",
}


def header() -> bytes:
    return encode_cells([COLUMNS])


def encode(receipts: Iterable[Receipt]) -> bytes:
    return encode_cells(row for receipt in receipts for row in focus_cells(receipt))


def focus_cells(receipt: Receipt) -> list[list[str]]:
    """The rows of a receipt as CSV has them, in the order of COLUMNS."""
    return [[cell(row[name]) for name in COLUMNS] for row in focus_rows(receipt)]


def focus_rows(receipt: Receipt) -> list[Row]:
    """A row for each kind of tokens, or one; none for a payment, which is no charge.

    Their BilledCost sums to the receipt's amount. The first row has the receipt itself.
    """
    kind = str(receipt["kind"])
    if kind == "usage":
        rows = list(_usage_rows(receipt))
    elif kind in _KEPT_METERS:
        rows = [_kept_row(receipt, kind)]
    elif (charged := _charged_kind(receipt)) is not None:
        rows = [_correction_row(receipt, charged)]
    elif _is_payment(receipt):
        return []
    else:
        rows = [_credit_row(receipt)]
    rows[0]["x_Receipt"] = encode_json({name: receipt[name] for name in RECEIPT_COLUMNS})
    return rows


def _usage_rows(receipt: Receipt) -> Iterator[Row]:
    """Of each kind of tokens that there are; of a request without any, of no prompt tokens."""
    prompt, cached, completion = (
        int(receipt[f"{name}_tokens"] or 0) for name in ("prompt", "cached", "completion")
    )
    unit_prices = {name: int(receipt[f"{name}_nanousd"] or 0) for name, _ in _TOKEN_METERS}
    paid = rated_amounts(
        str(receipt["finish_reason"]),
        str(receipt["stop_cause"]),
        prompt,
        cached,
        completion,
        TokenPrices(**{f"{name}_nanousd": price for name, price in unit_prices.items()}),
        is_failed=bool(receipt["is_failed"]),
    )
    tokens = {"prompt": prompt - cached, "cached": cached, "completion": completion}
    for name, meter in _TOKEN_METERS:
        if tokens[name] or (name == "prompt" and not any(tokens.values())):
            billed, listed = getattr(paid, name), tokens[name] * unit_prices[name]
            row = _metered_row(receipt, name, meter, str(tokens[name]), "Tokens")
            row |= _costs(billed, listed)
            row["ListUnitPrice"] = format_usd(unit_prices[name])
            # What we broke is agreed to cost nothing.
            row["ContractedUnitPrice"] = format_usd(unit_prices[name] if billed == listed else 0)
            yield row


def _kept_row(receipt: Receipt, kind: str) -> Row:
    quantity = _gb_hours(int(receipt["size_bytes"] or 0), int(receipt["duration_ms"] or 0))
    row = _metered_row(receipt, kind, _KEPT_METERS[kind], quantity, "GB-Hours")
    row |= _costs(int(receipt["amount_nanousd"] or 0))
    row["ListUnitPrice"] = row["ContractedUnitPrice"] = format_usd(
        int(receipt["kept_nanousd"] or 0)
    )
    return row


def _correction_row(receipt: Receipt, charged: str) -> Row:
    """One charge of that kind, taken back at its price."""
    amount = int(receipt["amount_nanousd"] or 0)
    sku_price = f"entry/{receipt['reverses_entry_id']}"
    row = _metered_row(receipt, "correction", f"Correction of {charged}", "-1", "Units")
    row |= _costs(amount) | {"SkuPriceId": sku_price, "ChargeFrequency": "One-Time"}
    row["ListUnitPrice"] = row["ContractedUnitPrice"] = format_usd(abs(amount))
    return row


def _credit_row(receipt: Receipt) -> Row:
    row = _row(receipt) | _costs(int(receipt["amount_nanousd"] or 0))
    description = receipt["memo"] or "Credit"
    return row | {"ChargeCategory": "Credit", "ChargeDescription": str(description)}


def _metered_row(receipt: Receipt, sku: str, meter: str, quantity: str, unit: str) -> Row:
    row = _row(receipt)
    of = f" of {receipt['model']}" if receipt["model"] else ""
    version = receipt["price_version"]
    return row | {
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{meter}{of}",
        "ChargeFrequency": "Usage-Based",
        "ConsumedQuantity": quantity,
        "ConsumedUnit": unit,
        "PricingCategory": "Standard",
        "PricingQuantity": quantity,
        "PricingUnit": unit,
        "SkuId": sku,
        "SkuMeter": meter,
        "SkuPriceId": f"{'free' if version is None else version}/{sku}",
    }


def _row(receipt: Receipt) -> Row:
    """What every row of a receipt has, as a charge that happens once."""
    row: Row = dict.fromkeys(COLUMNS)
    tenant_id, period = str(receipt["tenant_id"]), str(receipt["period"])
    start, end = _charge_period(receipt)
    row |= {
        "BillingAccountId": tenant_id,
        "BillingAccountName": _text(receipt["tenant_name"]),
        "BillingCurrency": "USD",
        "BillingPeriodStart": f"{period}-01T00:00:00Z",
        "BillingPeriodEnd": f"{next_month(period)}-01T00:00:00Z",
        "ChargeFrequency": "One-Time",
        "ChargePeriodStart": start,
        "ChargePeriodEnd": end,
        "InvoiceId": f"{tenant_id}/{period}",
        "InvoiceIssuerName": _PROVIDER,
        "ProviderName": _PROVIDER,
        "PublisherName": _PROVIDER,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": _SERVICE,
        "ServiceSubcategory": "Generative AI",
        "SubAccountId": _text(receipt["key_id"]),
        "SubAccountName": _text(receipt["key_id"]),
        "x_EntryId": str(receipt["entry_id"]),
    }
    if receipt["adapter_digest"]:
        row["ResourceId"] = str(receipt["adapter_digest"])
        row["ResourceName"] = _text(receipt["model"] or receipt["adapter_id"])
        row["ResourceType"] = "LoRA adapter"
    # An entry is on the statement of its own month, unless that one was issued before.
    if receipt["kind"] == "correction" and period != str(receipt["ended_at"])[:7]:
        row["ChargeClass"] = "Correction"
    return row


def _costs(billed_nanousd: int, list_nanousd: int | None = None) -> Row:
    costs: Row = dict.fromkeys(_COSTS, format_usd(billed_nanousd))
    if list_nanousd is not None:
        costs["ListCost"] = format_usd(list_nanousd)
    return costs


def _charged_kind(receipt: Receipt) -> str | None:
    """Of a correction: what kind of charge it takes back."""
    if receipt["kind"] != "correction":
        return None
    name, _, kind = str(receipt["debit_account"]).partition("/")
    return kind if name == "revenue" else None


def _is_payment(receipt: Receipt) -> bool:
    accounts = (receipt["debit_account"], receipt["credit_account"])
    names = {str(account).partition("/")[0] for account in accounts}
    return receipt["kind"] == "payment" or _CASH in names


def _gb_hours(size_bytes: int, duration_ms: int) -> str:
    """To 18 places: times the price it is the cost to the nano-dollar, which was rounded once."""
    quantity = _EXACT.divide(Decimal(size_bytes * duration_ms), _GB_HOUR)
    return f"{quantity.quantize(_QUANTITY, context=_EXACT):f}"


def _charge_period(receipt: Receipt) -> tuple[str, str]:
    """From the second in which it began to the end of the one in which it ended."""
    ended = datetime.fromisoformat(str(receipt["ended_at"]))
    began = datetime.fromisoformat(str(receipt["started_at"] or receipt["ended_at"]))
    start = began.replace(microsecond=0)
    end = ended.replace(microsecond=0)
    if end < ended or end <= start:
        end = max(start, end) + _SECOND
    return f"{start:%Y-%m-%dT%H:%M:%SZ}", f"{end:%Y-%m-%dT%H:%M:%SZ}"


def _text(value: Value) -> str | None:
    """FOCUS knows no empty texts."""
    return None if value in (None, "") else str(value)
