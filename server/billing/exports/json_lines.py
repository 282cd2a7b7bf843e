"""Receipts as JSON lines: all columns, in their order, null as null."""

import json
from collections.abc import Iterable

from server.billing.receipts.receipt import COLUMNS, Receipt
from server.text.line_ends import one_line

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def encode_json(value: object) -> str:
    """Encode a value as JSON in one line, without spaces."""
    return one_line(_encode(value))


def encode(receipts: Iterable[Receipt]) -> bytes:
    lines = [encode_json({name: receipt[name] for name in COLUMNS}) for receipt in receipts]
    return "".join(f"{line}\n" for line in lines).encode()
