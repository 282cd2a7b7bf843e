"""Receipts as CSV: a column for each field, null as an empty cell, and no cell that is a formula.

A text that begins like a formula gets a `'` before it, so that no spreadsheet runs it. So does a
text that begins with a `'` or is empty. `parse_cell` removes the `'`, so every text is restored.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from server.billing.receipts.receipt import COLUMNS, Receipt, Value

_ESCAPED_STARTS = ("=", "+", "-", "@", "\t", "\r", "'")
# Numbers are not escaped, though `-` begins a formula, too: negative amounts stay numbers.
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


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
    """Return the text that `cell` was called with; None for an empty cell."""
    return text.removeprefix("'") if text else None


def encode_cells(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


HEADER = encode_cells([COLUMNS])
