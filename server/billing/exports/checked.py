"""Turns values read from a file into a receipt, after a check of their names and types."""

import re
from collections.abc import Mapping

from server.billing.exports.csv_rows import parse_cell
from server.billing.receipts.receipt import COLUMNS, SEAL, TYPES, Receipt, Value

_REQUIRED = ("entry_id", "kind", "tenant_id", "receipt_seq", "amount_nanousd", *SEAL)
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_BOOLS = {"true": True, "false": False}


def check_receipt(values: object) -> Receipt:
    """Return the values as a receipt. Raises ValueError, whose message says what is wrong.

    A column that is missing is None.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"it is no receipt, but {type(values).__name__}")
    for name, value in values.items():
        if name not in TYPES:
            raise ValueError(f"there is no column {name!r:.80}")
        if value is not None and type(value) is not TYPES[name]:
            raise ValueError(f"{name} is {value!r:.80}, no {TYPES[name].__name__}")
        if isinstance(value, str):
            value.encode()  # Raises ValueError for half a surrogate pair.
    for name in _REQUIRED:
        if values.get(name) is None:
            raise ValueError(f"{name} is missing")
    return dict.fromkeys(COLUMNS) | dict(values)


def check_header(names: list[str]) -> None:
    """Check the header of a CSV file. Raises ValueError."""
    if unknown := [name for name in names if name not in TYPES]:
        raise ValueError(f"it is no header of an export, there is no column {unknown[0]!r:.80}")
    if missing := [name for name in _REQUIRED if name not in names]:
        raise ValueError(f"it is no header of an export, {missing[0]} is missing")
    if len(set(names)) != len(names):
        raise ValueError("it has a column twice")


def receipt_of_cells(names: list[str], cells: list[str]) -> Receipt:
    """Make a receipt of a CSV row. Raises ValueError."""
    if len(names) != len(cells):
        raise ValueError(f"it has {len(cells)} cells for {len(names)} columns")
    return check_receipt(
        {name: _value(name, text) for name, text in zip(names, cells, strict=True)}
    )


def _value(name: str, text: str) -> Value:
    expected = TYPES.get(name)
    if text == "" or expected is str:
        return parse_cell(text)
    if expected is bool and text in _BOOLS:
        return _BOOLS[text]
    if expected is int and _INTEGER.fullmatch(text):
        return int(text)
    return text  # A text of the wrong type, which `check_receipt` refuses by the field's name.
