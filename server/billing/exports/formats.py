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


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatInfo:
    """Properties of a format.

    extension: end of a file's name, without the first dot.
    encode: makes the rows of receipts. In a format that has it rows are independent, so that a file
    can be cut after a row and continued, see `resuming`.   header: comes before the rows.
    """

    media_type: str
    extension: str
    encode: Callable[[Sequence[Receipt]], bytes] | None = None
    header: bytes = b""


_CSV, _JSONL = "text/csv; charset=utf-8; header=present", "application/jsonl; charset=utf-8"

INFO: dict[ExportFormat, FormatInfo] = {
    "csv": FormatInfo(
        media_type=_CSV, extension="csv", encode=csv_rows.encode, header=csv_rows.HEADER
    ),
    "jsonl": FormatInfo(media_type=_JSONL, extension="jsonl", encode=json_lines.encode),
    "parquet": FormatInfo(media_type="application/vnd.apache.parquet", extension="parquet"),
    "focus": FormatInfo(
        media_type=_CSV, extension="focus.csv", encode=focus.encode, header=focus.HEADER
    ),
    "cloudevents": FormatInfo(
        media_type=_JSONL, extension="cloudevents.jsonl", encode=cloud_events.encode
    ),
}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Encoder of a format with independent rows."""

    info: FormatInfo

    def begin(self) -> bytes:
        return self.info.header

    def add(self, receipts: Sequence[Receipt]) -> bytes:
        assert self.info.encode is not None
        return self.info.encode(receipts)

    def end(self) -> bytes:
        return b""


def open_encoder(format: ExportFormat) -> Encoder:
    """Return an encoder for a new file. Raises ExtraMissing."""
    if INFO[format].encode:
        return _Rows(INFO[format])
    require("The format parquet", "pyarrow")
    # Imported on demand: pyarrow takes 30 MB of memory, most of it its libraries.
    from server.billing.exports.parquet import ParquetEncoder

    return ParquetEncoder()
