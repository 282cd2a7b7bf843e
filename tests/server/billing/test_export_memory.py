"""An export is never whole in memory: ten times as many receipts need no more memory."""

import asyncio
import gc
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from server.billing.exports.formats import FORMATS, open_encoder
from server.billing.exports.pages import Range
from server.billing.exports.stream import stream
from server.database.database import DEFAULT_FILE, Database
from tests.server.export_ledger import use
from tests.server.factories import NOW_MS

MB = 1 << 20
ROOT = Path(__file__).parents[3]
FOREVER = Range.clamped(None, 0, 2**62, 2**62)


def multiply(path: Path, count: int) -> None:
    """Copy the first entry and event until there are `count`; posting them would take minutes."""
    with sqlite3.connect(path) as conn:
        for table, key, others in (
            (
                "usage_events",
                "event_id",
                {"journal_seq": "n", "number": "n", "request_id": "'r'||n"},
            ),
            ("entries", "entry_id", {"receipt_seq": "n", "at_ms": f"{NOW_MS} + n"}),
        ):
            names = [row[1] for row in conn.execute(f"PRAGMA table_info({table})")]
            values = [{key: "n", **others}.get(name, name) for name in names]
            conn.execute(
                f"WITH RECURSIVE numbers(n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM numbers "
                f"WHERE n < {count}) INSERT INTO {table} ({', '.join(names)}) "
                f"SELECT {', '.join(values)} FROM {table}, numbers WHERE {key} = 1"
            )
        conn.execute(f"UPDATE ledger_head SET last_entry_id = {count}")
        conn.execute(f"UPDATE tenant_accounts SET receipt_seq = {count}")
    conn.close()


def make(folder: Path, migrated: Path, count: int) -> Path:
    folder.mkdir()
    shutil.copy(migrated, folder / DEFAULT_FILE)
    database = Database(data_dir=folder)
    use(database)
    database.close()
    multiply(folder / DEFAULT_FILE, count)
    return folder


async def count_bytes(database: Database, format: str, page_size: int) -> int:
    total = 0
    async for chunk in stream(database, open_encoder(format), FOREVER, page_size=page_size):
        total += len(chunk)
    return total


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_ten_times_as_many_receipts_take_no_more_memory(migrated_sqlite, tmp_path, format):
    """Row formats are all streamed as JSON lines are; arrow's memory for Parquet is not traced."""
    peaks = []
    for count in (100, 1000):
        database = Database(data_dir=make(tmp_path / str(count), migrated_sqlite, count))
        try:
            gc.collect()
            tracemalloc.start()
            size_bytes = asyncio.run(count_bytes(database, format, page_size=25))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
            database.close()
        assert size_bytes > count * 20
    # A whole export in memory would add 1.2 MB.
    assert peaks[1] < peaks[0] + MB / 2, [peak / MB for peak in peaks]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("format", FORMATS)
def test_a_million_events_are_exported_in_constant_memory(a_million, format):
    """A separate process reports its memory peak, and the peak at its first 100,000 receipts."""
    command = [sys.executable, "-m", "tests.server.export_child", a_million, format]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    rows, begun_mb, peak_mb = (float(word) for word in run.stdout.split())
    print(f"{format}: {begun_mb:.0f} MB at 100,000 receipts, {peak_mb:.0f} MB at the end")  # noqa: T201
    assert rows == 1_000_000
    assert peak_mb < begun_mb + 40


@pytest.fixture(scope="module")
def a_million(migrated_sqlite, tmp_path_factory):
    return make(tmp_path_factory.mktemp("million") / "data", migrated_sqlite, 1_000_000)
