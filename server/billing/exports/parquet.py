"""Receipts as Parquet: typed columns, and row groups of a bounded size, written when full."""

import io
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

# Arrow reads this at its import: its own pool would keep 30 MB of memory after an export.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

import pyarrow as pa
import pyarrow.parquet as pq

from server.billing.receipts.receipt import COLUMNS, TYPES, Receipt

ROW_GROUP_ROWS = 10_000
"""Rows in a row group. A full group is 5 MB; each adds 7 KB to the footer, held until the end."""
_BATCH_ROWS = 500

_ARROW = {int: pa.int64(), str: pa.string(), bool: pa.bool_()}
SCHEMA = pa.schema([pa.field(name, _ARROW[type]) for name, type in TYPES.items()])


class ParquetEncoder:
    """Writes one Parquet file; a `formats.Encoder`."""

    def __init__(self) -> None:
        self._sink = _Sink()
        # Every page gets a checksum, so that a reader finds changes.
        self._writer = pq.ParquetWriter(self._sink, SCHEMA, write_page_checksum=True)
        self._batches: list[pa.RecordBatch] = []
        self._num_rows = 0

    def begin(self) -> bytes:
        return self._sink.take()

    def add(self, receipts: Sequence[Receipt]) -> bytes:
        columns = [[receipt[name] for receipt in receipts] for name in COLUMNS]
        arrays = [
            pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)
        ]
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
        self._num_rows += len(receipts)
        if self._num_rows >= ROW_GROUP_ROWS:
            self._write_group()
        return self._sink.take()

    def end(self) -> bytes:
        if self._num_rows:
            self._write_group()
        self._writer.close()
        return self._sink.take()

    def _write_group(self) -> None:
        self._writer.write_table(pa.Table.from_batches(self._batches), ROW_GROUP_ROWS * 2)
        self._batches, self._num_rows = [], 0
        # After every group, since an export that nobody reads on has no end.
        pa.default_memory_pool().release_unused()


class _Sink(io.BytesIO):
    """An append-only file in memory, whose bytes are taken out as they are written."""

    _num_taken = 0

    def tell(self) -> int:
        return self._num_taken + super().tell()

    def take(self) -> bytes:
        taken = self.getvalue()
        self._num_taken += len(taken)
        self.seek(0)
        self.truncate()
        return taken


def read(file: BinaryIO) -> Iterator[dict[str, object]]:
    """Yield a file's rows as {column: value}. Raises pyarrow.ArrowException, OSError."""
    parquet = pq.ParquetFile(file, page_checksum_verification=True)
    for batch in parquet.iter_batches(batch_size=_BATCH_ROWS):
        yield from batch.to_pylist()
