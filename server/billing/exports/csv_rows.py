"""Receipts as CSV: a column a field, null an empty cell, and no cell that a spreadsheet would run.

A text that begins like a formula gets a `'` before it, and so does one that begins with a `'` and
one that is empty; `parse_cell` takes it off again, so every text comes back as it was.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from server.billing.receipts.receipt import COLUMNS, Receipt, Value

_ESCAPED_STARTS = ("=", "+", "-", "@", "\t", "\r", "'")
# A number is no formula: amounts below zero stay numbers.
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def header() -> bytes:
    return encode_cells([COLUMNS])


def encode(receipts: Iterable[Receipt]) -> bytes:
    return encode_cells([[cell(receipt[name]) for name in COLUMNS] for receipt in receipts])


def cell(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    is_escaped = not value or value.startswith(_ESCAPED_STARTS)
    return "'" + value if is_escaped and not _NUMBER.fullmatch(value) else value


def parse_cell(text: str) -> str | None:
    """The text that `cell` was given."""
    return text.removeprefix("'") if text else None


def encode_cells(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
