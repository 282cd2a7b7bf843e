"""The five formats of exports, and the interface of their encoders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from registry.extras import require
from server.billing.exports import cloud_events, csv_rows, focus, json_lines
from server.billing.receipts.receipt import Receipt

ExportFormat = Literal["csv", "jsonl", "parquet", "focus", "cloudevents"]
FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)


class Encoder(Protocol):
    """Writes one file, which consists of the bytes that `begin`, each `add` and `end` return."""

    def begin(self) -> bytes: ...

    def add(self, receipts: Sequence[Receipt]) -> bytes: ...

    def end(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Rows:
    """Encoder of a format with independent rows: a file can be cut after a row and continued."""

    header: bytes
    encode: Callable[[Sequence[Receipt]], bytes]

    def begin(self) -> bytes:
        return self.header

    def add(self, receipts: Sequence[Receipt]) -> bytes:
        return self.encode(receipts)

    def end(self) -> bytes:
        return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatInfo:
    """Properties of a format.

    extension: end of a file's name, without the first dot.   is_resumable: see `resuming`.
    """

    media_type: str
    extension: str
    is_resumable: bool = True


_CSV, _JSONL = "text/csv; charset=utf-8; header=present", "application/jsonl; charset=utf-8"

INFO: dict[ExportFormat, FormatInfo] = {
    "csv": FormatInfo(media_type=_CSV, extension="csv"),
    "jsonl": FormatInfo(media_type=_JSONL, extension="jsonl"),
    "parquet": FormatInfo(
        media_type="application/vnd.apache.parquet", extension="parquet", is_resumable=False
    ),
    "focus": FormatInfo(media_type=_CSV, extension="focus.csv"),
    "cloudevents": FormatInfo(media_type=_JSONL, extension="cloudevents.jsonl"),
}


def open_encoder(format: ExportFormat) -> Encoder:
    """Return an encoder for a new file. Raises ExtraMissing."""
    if format == "csv":
        return _Rows(csv_rows.header(), csv_rows.encode)
    if format == "focus":
        return _Rows(focus.header(), focus.encode)
    if format == "jsonl":
        return _Rows(b"", json_lines.encode)
    if format == "cloudevents":
        return _Rows(b"", cloud_events.encode)
    require("The format parquet", "pyarrow")
    # Imported on demand: pyarrow takes 30 MB of memory, most of it its libraries.
    from server.billing.exports.parquet import ParquetEncoder

    return ParquetEncoder()
