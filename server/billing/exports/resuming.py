"""Finds the place where a file that broke off can be continued: after its last complete entry."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from server.billing.exports import focus
from server.billing.exports.formats import INFO, ExportFormat


@dataclass(frozen=True, slots=True)
class Whole:
    """The complete part of a file.

    size_bytes: size up to the end of its last entry.   entry_id: number of that entry; None if no
    part can be continued, so that the export begins again.
    """

    size_bytes: int = 0
    entry_id: int | None = None


def whole_part(file: BinaryIO, format: ExportFormat) -> Whole:
    """Return the part of a file that can stay, wherever it was cut off.

    In FOCUS the last entry is dropped, since it may lack rows. A file that is no export is not
    continued.
    """
    if INFO[format].encode is None:
        return Whole()
    whole, row = Whole(), Whole()
    try:
        for size_bytes, line in _rows(file, format):
            found = Whole(size_bytes, _entry_id(line, format))
            if format != "focus" or found.entry_id != row.entry_id:
                whole = row
            row = found
    except (ValueError, LookupError, TypeError, csv.Error):
        return Whole()
    return whole if format == "focus" else row


def _rows(file: BinaryIO, format: ExportFormat) -> Iterator[tuple[int, bytes]]:
    """Yield (file size up to the end of the row, row) for each row after the header."""
    header = INFO[format].header
    if file.read(len(header)) != header:
        return
    size_bytes, row = len(header), b""
    for line in file:
        row += line
        # A text with newlines is in quotes, and quotes in it are doubled, so a complete row has an
        # even number of quotes.
        if line.endswith(b"\n") and (not header or row.count(b'"') % 2 == 0):
            size_bytes += len(row)
            yield size_bytes, row
            row = b""


def _entry_id(row: bytes, format: ExportFormat) -> int:
    if format == "jsonl":
        return int(json.loads(row)["entry_id"])
    if format == "cloudevents":
        return int(json.loads(row)["id"])
    [cells] = csv.reader([row.decode()], strict=True)
    return int(cells[0] if format == "csv" else cells[focus.COLUMNS.index("x_EntryId")])
