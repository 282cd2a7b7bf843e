"""Usage events as files, CSV and JSONL, streamed a page at a time and never whole in memory."""

import csv
import io
import json
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from sqlalchemy.engine import Connection, RowMapping

from server.database import Database
from server.rating import format_usd
from server.usage import Cursor, cursor_of, newest_event_id, page_events

ExportFormat = Literal["csv", "jsonl"]
FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
MEDIA_TYPES: dict[ExportFormat, str] = {
    "csv": "text/csv; charset=utf-8",
    "jsonl": "application/jsonl; charset=utf-8",
}

PAGE_SIZE = 1000

# The order is part of the format: new columns go to the end.
COLUMNS = (
    "event_id",
    "request_id",
    "tenant_id",
    "key_id",
    "model",
    "adapter_id",
    "adapter_version",
    "adapter_digest",
    "base_revision",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "finish_reason",
    "stop_cause",
    "output_sha256",
    "price_version",
    "amount_nanousd",
    "amount_usd",
    "started_at",
    "first_token_at",
    "ended_at",
    "posted_at",
    "engine_id",
    "journal_seq",
)

# A spreadsheet runs a cell that begins with one of these.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


async def stream(
    database: Database,
    format: ExportFormat,
    tenant_id: str | None,
    start_ms: int,
    end_ms: int,
    *,
    page_size: int = PAGE_SIZE,
) -> AsyncIterator[bytes]:
    """The file in chunks, a short read each: a slow client holds no transaction open.

    Events that are posted while it streams are not in it. tenant_id None is the operator's export.
    """
    through = await database.read(newest_event_id)
    if format == "csv":
        yield csv_header()
    after: Cursor | None = None
    while True:

        def read_page(conn: Connection, after: Cursor | None = after) -> list[RowMapping]:
            return page_events(
                conn,
                tenant_id,
                start_ms,
                end_ms,
                after=after,
                through_event_id=through,
                limit=page_size,
            )

        page = await database.read(read_page)
        if page:
            yield encode(format, page)
            after = cursor_of(page[-1])
        if len(page) < page_size:
            return


def csv_header() -> bytes:
    return _csv_lines([list(COLUMNS)])


def encode(format: ExportFormat, events: Iterable[RowMapping]) -> bytes:
    """Lines of the file for these events."""
    rows = [_row(event) for event in events]
    if format == "csv":
        return _csv_lines([[_cell(row[name]) for name in COLUMNS] for row in rows])
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


def _row(event: RowMapping) -> dict[str, Any]:
    values = dict(event)
    values["amount_usd"] = format_usd(values["amount_nanousd"])
    for name in ("started_at", "first_token_at", "ended_at", "posted_at"):
        values[name] = _rfc3339(values[f"{name}_ms"])
    return {name: values[name] for name in COLUMNS}


def _rfc3339(at_ms: int | None) -> str | None:
    if at_ms is None:
        return None
    seconds, ms = divmod(at_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z"


def _cell(value: str | int | None) -> str:
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return "'" + value
    return "" if value is None else str(value)


def _csv_lines(rows: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
