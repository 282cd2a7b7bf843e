"""Reads exports of any format, a row at a time and without a database."""

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from registry.extras import require
from server.billing.exports import focus
from server.billing.exports.checked import check_header, check_receipt, receipt_of_cells
from server.billing.exports.cloud_events import cloud_event
from server.billing.receipts.receipt import Receipt

MAX_LINE_BYTES = 1 << 20
"""Longest line of an export; a receipt is hundreds of times shorter."""

_PARQUET = b"PAR1"


class ExportUnreadable(Exception):
    """A file is no export, or was changed. line: the line, or in Parquet the row, from 1."""

    def __init__(self, line: int, reason: str) -> None:
        self.line = line
        self.reason = reason
        super().__init__(f"Line {line} cannot be read: {reason}.")


def read_export(source: Path | BinaryIO) -> Iterator[Receipt]:
    """Yield the receipts of a file in its order; its first bytes tell the format.

    The receipts have the right fields and types; whether they are true is not checked here. In
    CloudEvents and FOCUS, all values beside a receipt must be those that follow from it. A file
    object stays open; for Parquet it must be able to seek.
    Raises ExportUnreadable, ExtraMissing, OSError.
    """
    if isinstance(source, Path):
        with source.open("rb") as file:
            yield from _read(file)
    else:
        yield from _read(source)


def _read(file: BinaryIO) -> Iterator[Receipt]:
    head = file.read(len(_PARQUET))
    if head == _PARQUET:
        file.seek(0)
        yield from _read_parquet(file)
        return
    lines = _lines(file, head)
    if head.startswith(b"{"):
        yield from _read_json(lines)
    elif head:
        yield from _read_csv(lines)


def _lines(file: BinaryIO, head: bytes) -> Iterator[str]:
    """Yield the lines of a file, with their ends. Raises ExportUnreadable.

    head: the first bytes, which are read already.
    """
    line, number = head if head.endswith(b"\n") else head + file.readline(MAX_LINE_BYTES + 1), 1
    while line:
        if len(line) > MAX_LINE_BYTES:
            raise ExportUnreadable(number, f"it has more than {MAX_LINE_BYTES} bytes")
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise ExportUnreadable(number, f"it is no UTF-8, {error}") from error
        line, number = file.readline(MAX_LINE_BYTES + 1), number + 1


def _read_json(lines: Iterator[str]) -> Iterator[Receipt]:
    for number, text in enumerate(lines, start=1):
        with _named(number):
            value = json.loads(text, object_pairs_hook=_unique)
            receipt = _receipt_of_event(value) if "specversion" in value else check_receipt(value)
        yield receipt


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name is there twice")
    return values


def _receipt_of_event(event: dict[str, Any]) -> Receipt:
    receipt = check_receipt(event.get("data"))
    expected = cloud_event(receipt)
    for name in {*event, *expected} - {"data"}:
        if event.get(name) != expected.get(name):
            raise ValueError(f"{name} is {event.get(name)!r:.80}, not {expected.get(name)!r:.80}")
    return receipt


def _read_csv(lines: Iterator[str]) -> Iterator[Receipt]:
    rows = _csv_rows(lines)
    _, names = next(rows, (1, []))
    if tuple(names) == focus.COLUMNS:
        yield from _read_focus(rows)
        return
    with _named(1):
        check_header(names)
    for line, cells in rows:
        with _named(line):
            receipt = receipt_of_cells(names, cells)
        yield receipt


@contextmanager
def _named(line: int) -> Iterator[None]:
    """Turn errors in a receipt or a number into ExportUnreadable with that line."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ExportUnreadable(line, str(error)) from error


def _csv_rows(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) of each row; a text may contain newlines, so line is the row's first."""
    line, rows = 1, csv.reader(lines, strict=True)
    try:
        for cells in rows:
            yield line, cells
            line = rows.line_num + 1
    except csv.Error as error:
        raise ExportUnreadable(line, str(error)) from error


def _read_focus(rows: Iterator[tuple[int, list[str]]]) -> Iterator[Receipt]:
    """Yield each receipt after all its rows were compared with those that follow from it."""
    for line, cells in rows:
        with _named(line):
            receipt = _receipt_of_focus(cells)
            first, *others = focus.focus_cells(receipt) or [[]]
            _compare(cells, first)
        for wanted in others:
            line, cells = next(rows, (line + 1, []))
            with _named(line):
                _compare(cells, wanted)
        yield receipt


def _receipt_of_focus(cells: Sequence[str]) -> Receipt:
    text = cells[-1] if len(cells) == len(focus.COLUMNS) else ""
    if not text:
        raise ValueError("it belongs to no receipt before it")
    return check_receipt(json.loads(text, object_pairs_hook=_unique))


def _compare(cells: Sequence[str], expected: Sequence[str]) -> None:
    if len(cells) != len(expected):
        raise ValueError(f"it has {len(cells)} cells, where the receipt makes {len(expected)}")
    for name, found, wanted in zip(focus.COLUMNS, cells, expected, strict=True):
        if found != wanted:
            raise ValueError(f"{name} is {found!r:.80}, the receipt makes it {wanted!r:.80}")


def _read_parquet(file: BinaryIO) -> Iterator[Receipt]:
    require("The format parquet", "pyarrow")
    from pyarrow import ArrowException

    from server.billing.exports import parquet

    row = 1
    try:
        for values in parquet.read(file):
            yield check_receipt(values)
            row += 1
    except (ValueError, OSError, ArrowException) as error:
        raise ExportUnreadable(row, str(error)) from error
