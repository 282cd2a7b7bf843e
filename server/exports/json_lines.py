"""Receipts as JSON lines: all columns, in their order, null as null."""

import json
from collections.abc import Iterable

from server.receipts import COLUMNS, Receipt

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def encode(receipts: Iterable[Receipt]) -> bytes:
    lines = [encode_json({name: receipt[name] for name in COLUMNS}) for receipt in receipts]
    return "".join(f"{line}\n" for line in lines).encode()
