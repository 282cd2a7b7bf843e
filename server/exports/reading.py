"""An export read back, whatever its format, a row at a time and without a database."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from server.exports.checked import check_receipt, receipt_of_cells
from server.receipts import Receipt

MAX_LINE_BYTES = 1 << 20
"""Hundreds of times a receipt: what is longer is no export."""


class ExportUnreadable(Exception):
    """A file that is no export, or has been changed. line: from 1; of Parquet the row."""

    def __init__(self, line: int, reason: str) -> None:
        self.line = line
        self.reason = reason
        super().__init__(f"Line {line} cannot be read: {reason}.")


def read_export(source: Path | BinaryIO) -> Iterator[Receipt]:
    """Its receipts in the order of the file, the format told from its first bytes.

    They have the fields and types of receipts; whether they are true is for who checks them. A file
    that is handed in stays open; Parquet needs one that can seek. Raises ExportUnreadable, OSError.
    """
    if isinstance(source, Path):
        with source.open("rb") as file:
            yield from _read(file)
    else:
        yield from _read(source)


def _read(file: BinaryIO) -> Iterator[Receipt]:
    lines = _Lines(file)
    first = next(lines, None)
    if first is None:
        return
    lines.put_back(first)
    if first.startswith(b"{"):
        yield from _read_json(lines)
    else:
        yield from _read_csv(lines)


class _Lines:
    """Lines with their ends, counted. number: of the last one given. Raises ExportUnreadable."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._first: bytes | None = None
        self.number = 0

    def put_back(self, line: bytes) -> None:
        self._first = line
        self.number -= 1

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> bytes:
        line, self._first = self._first, None
        if line is None and not (line := self._file.readline(MAX_LINE_BYTES + 1)):
            raise StopIteration
        self.number += 1
        if len(line) > MAX_LINE_BYTES:
            raise ExportUnreadable(self.number, f"it has more than {MAX_LINE_BYTES} bytes")
        return line

    def texts(self) -> Iterator[str]:
        for line in self:
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise ExportUnreadable(self.number, f"it is no UTF-8, {error}") from error


def _read_json(lines: _Lines) -> Iterator[Receipt]:
    for text in lines.texts():
        try:
            yield check_receipt(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ExportUnreadable(lines.number, str(error)) from error


def _read_csv(lines: _Lines) -> Iterator[Receipt]:
    line, names = 1, None
    try:
        # A text may hold newlines: the line that an error names is the one where its row begins.
        for cells in csv.reader(lines.texts(), strict=True):
            if names is None:
                names = cells
            else:
                yield receipt_of_cells(names, cells)
            line = lines.number + 1
    except (ValueError, csv.Error) as error:
        raise ExportUnreadable(line, str(error)) from error
