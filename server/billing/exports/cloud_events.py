"""Receipts as CloudEvents 1.0 in JSON, one event a line."""

from collections.abc import Iterable, Mapping
from typing import Any

from server.billing.exports.json_lines import encode_json
from server.billing.receipts.receipt import COLUMNS, Receipt

TYPE = "chorale.ledger.entry.v1"
SOURCE = "urn:chorale:ledger"


def encode(receipts: Iterable[Receipt]) -> bytes:
    return "".join(f"{encode_json(cloud_event(receipt))}\n" for receipt in receipts).encode()


def cloud_event(receipt: Receipt) -> Mapping[str, Any]:
    """Return a receipt's event. source and id identify the entry, so duplicates can be found."""
    return {
        "specversion": "1.0",
        "id": str(receipt["entry_id"]),
        "source": SOURCE,
        "type": TYPE,
        "subject": receipt["tenant_id"],
        "time": receipt["posted_at"],
        "datacontenttype": "application/json",
        "data": {name: receipt[name] for name in COLUMNS},
    }
