"""Receipts as charges in FOCUS 1.2, the FinOps Foundation's format of bills.

The rows follow from the receipt alone, so that a reader of a file can make them again and compare.
https://github.com/FinOps-Open-Cost-and-Usage-Spec/FOCUS_Spec, tag v1.2.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from decimal import Context, Decimal

from server.billing.exports.csv_rows import cell, encode_cells
from server.billing.exports.json_lines import encode_json
from server.billing.months import next_month
from server.billing.rating import GB_HOUR, TokenPrices, format_usd, rate
from server.billing.receipts.receipt import COLUMNS as RECEIPT_COLUMNS
from server.billing.receipts.receipt import Receipt, Value, int_of

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

HEADER = encode_cells([COLUMNS])

Row = dict[str, str | None]
"""Values by the names of COLUMNS; None is null."""

_PROVIDER = "Chorale"
_SERVICE = "LoRA Serving"
_CASH = "cash"
"""First part of the name, or the whole name, of the account that payments come from."""
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


def encode(receipts: Iterable[Receipt]) -> bytes:
    return encode_cells(row for receipt in receipts for row in focus_cells(receipt))


def focus_cells(receipt: Receipt) -> list[list[str]]:
    """Return the rows of a receipt as cells of CSV, in the order of COLUMNS."""
    return [[cell(row[name]) for name in COLUMNS] for row in focus_rows(receipt)]


def focus_rows(receipt: Receipt) -> list[Row]:
    """Return the rows of a receipt: for usage one for each kind of tokens, otherwise one.

    A payment has no row, since it is no charge. The rows' BilledCost add up to the amount of the
    receipt; the ChargeCategory is Usage if the amount is spend, otherwise Credit. The first row
    contains the receipt itself.
    """
    kind = str(receipt["kind"])
    if kind == "usage":
        rows = list(_usage_rows(receipt))
    elif kind in _KEPT_METERS:
        rows = [_kept_row(receipt, kind)]
    elif kind == "correction":
        rows = [_correction_row(receipt)]
    elif _is_payment(receipt):
        return []
    else:
        rows = [_credit_row(receipt)]
    rows[0]["x_Receipt"] = encode_json({name: receipt[name] for name in RECEIPT_COLUMNS})
    return rows


def _usage_rows(receipt: Receipt) -> Iterator[Row]:
    """Yield a row for each kind of tokens used; without any, a row of 0 prompt tokens."""
    prompt, cached, completion = (
        int_of(receipt, f"{name}_tokens") for name in ("prompt", "cached", "completion")
    )
    price = TokenPrices.of(receipt)
    paid = rate(receipt, price)
    tokens = {"prompt": prompt - cached, "cached": cached, "completion": completion}
    for name, meter in _TOKEN_METERS:
        if tokens[name] or (name == "prompt" and not any(tokens.values())):
            unit_price = getattr(price, f"{name}_nanousd")
            billed, listed = getattr(paid, name), tokens[name] * unit_price
            row = _metered_row(receipt, name, meter, str(tokens[name]), "Tokens")
            row |= _costs(billed, listed)
            row["ListUnitPrice"] = format_usd(unit_price)
            # Tokens that are rated 0 have a contracted price of 0.
            row["ContractedUnitPrice"] = format_usd(unit_price if billed == listed else 0)
            yield row


def _kept_row(receipt: Receipt, kind: str) -> Row:
    quantity = _gb_hours(int_of(receipt, "size_bytes"), int_of(receipt, "duration_ms"))
    row = _metered_row(receipt, kind, _KEPT_METERS[kind], quantity, "GB-Hours")
    row |= _costs(int_of(receipt, "amount_nanousd"))
    row["ListUnitPrice"] = row["ContractedUnitPrice"] = format_usd(int_of(receipt, "kept_nanousd"))
    return row


def _correction_row(receipt: Receipt) -> Row:
    """Return the row of a correction: one unit of a kind of charge, taken back at its price."""
    charged = str(receipt["debit_account"]).partition("/")[2]
    amount = int_of(receipt, "amount_nanousd")
    sku_price = f"entry/{receipt['reverses_entry_id']}"
    row = _metered_row(receipt, "correction", f"Correction of {charged}", "-1", "Units")
    row |= _costs(amount) | {"SkuPriceId": sku_price, "ChargeFrequency": "One-Time"}
    row["ListUnitPrice"] = row["ContractedUnitPrice"] = format_usd(abs(amount))
    return row


def _credit_row(receipt: Receipt) -> Row:
    row = _row(receipt) | _costs(int_of(receipt, "amount_nanousd"))
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
    """Return the columns that all rows of a receipt share, as for a one-time charge."""
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
    # What undoes an entry on a later statement than its own month's corrects an issued statement.
    if receipt["reverses_entry_id"] is not None and period != str(receipt["ended_at"])[:7]:
        row["ChargeClass"] = "Correction"
    return row


def _costs(billed_nanousd: int, list_nanousd: int | None = None) -> Row:
    costs: Row = dict.fromkeys(_COSTS, format_usd(billed_nanousd))
    if list_nanousd is not None:
        costs["ListCost"] = format_usd(list_nanousd)
    return costs


def _is_payment(receipt: Receipt) -> bool:
    accounts = (receipt["debit_account"], receipt["credit_account"])
    names = {str(account).partition("/")[0] for account in accounts}
    return receipt["kind"] == "payment" or _CASH in names


def _gb_hours(size_bytes: int, duration_ms: int) -> str:
    """Return GB-hours to 18 places, so that times the price they are exact to the nano-dollar."""
    quantity = _EXACT.divide(Decimal(size_bytes * duration_ms), Decimal(GB_HOUR))
    return f"{quantity.quantize(_QUANTITY, context=_EXACT):f}"


def _charge_period(receipt: Receipt) -> tuple[str, str]:
    """Return the start and end of a charge, widened to whole seconds, at least one second apart."""
    ended = datetime.fromisoformat(str(receipt["ended_at"]))
    began = datetime.fromisoformat(str(receipt["started_at"] or receipt["ended_at"]))
    start = began.replace(microsecond=0)
    end = ended.replace(microsecond=0)
    if end < ended or end <= start:
        end = max(start, end) + _SECOND
    return f"{start:%Y-%m-%dT%H:%M:%SZ}", f"{end:%Y-%m-%dT%H:%M:%SZ}"


def _text(value: Value) -> str | None:
    """Return a text, or None for an empty one, which FOCUS does not know."""
    return None if value in (None, "") else str(value)
