"""Speed of reading the whole ledger: exports in every format, the auditor, receipts' verification.

The ledger is on SQLite. The bound of all of them is Python, which takes a row at a time.
"""

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from bench.billing.settles import SIGNER, grouped, post_group
from bench.billing.traffic import Traffic
from bench.measurement import Measurement
from bench.report import rate, rounded
from server.billing.audit.run import audit
from server.billing.exports.formats import FORMATS, ExportFormat, open_encoder
from server.billing.exports.pages import Range, last_entry_id
from server.billing.exports.reading import read_export
from server.billing.exports.stream import stream
from server.billing.holds import Hold
from server.billing.prices import ensure_price
from server.billing.receipts.check import ReceiptCheck
from server.billing.receipts.signing_keys import record_key
from server.billing.tables import holds
from server.database.database import Database

_ROWS_AT_ONCE = 1000
_DAY_MS = 86_400_000
_VERIFIED: ExportFormat = "jsonl"


@dataclass(frozen=True, kw_only=True)
class Reading(Measurement):
    """The speed of reading the whole ledger.

    entries: number of usage entries in the ledger; they are a day old.
    """

    entries: int = 100_000
    tenants: int = 20

    def measure(self, folder: Path) -> dict[str, Any]:
        database = Database(data_dir=folder)
        try:
            database.migrate()
            self.fill(database, int(time.time() * 1000) - _DAY_MS)
            files = {name: folder / f"export.{name}" for name in FORMATS}
            exports = {name: self._export(database, name, files[name]) for name in FORMATS}
            audit_s = self._audit(database)
        finally:
            database.close()
        return {
            "exports": exports,
            "audit_s_per_million": rounded(audit_s * 1e6 / self.entries),
            "audited": self.entries,
            "verified_receipts_per_s": self._verify(files[_VERIFIED]),
        }

    def fill(self, database: Database, start_ms: int) -> None:
        """Post the entries, the first request from `start_ms` on."""
        price = database.write_sync(lambda conn: ensure_price(conn, start_ms))
        database.write_sync(lambda conn: record_key(conn, SIGNER.public, start_ms))
        traffic = Traffic(self.entries, self.tenants, price, start_ms)
        made = list(traffic.holds())
        ends = list(traffic.ends(made))
        for some_holds, some_ends in zip(
            grouped(made, _ROWS_AT_ONCE), grouped(ends, _ROWS_AT_ONCE), strict=True
        ):
            database.write_sync(partial(_insert_holds, some=some_holds))
            database.write_sync(partial(post_group, records=some_ends, now_ms=start_ms))

    def _export(self, database: Database, name: ExportFormat, path: Path) -> dict[str, Any]:
        async def run() -> None:
            through = await database.read(lambda conn: last_entry_id(conn, None))
            within = Range(tenant_id=None, start_ms=0, end_ms=2**62, through=through)
            with path.open("wb") as file:
                async for chunk in stream(database, open_encoder(name), within):
                    file.write(chunk)

        start = time.perf_counter()
        asyncio.run(run())
        seconds = time.perf_counter() - start
        size_bytes = path.stat().st_size
        return {
            "rows_per_s": rate(self.entries, seconds),
            "bytes_per_row": rounded(size_bytes / self.entries),
        }

    def _audit(self, database: Database) -> float:
        start = time.perf_counter()
        report = database.read_sync(lambda conn: audit(conn))
        seconds = time.perf_counter() - start
        assert not report.num_findings, report.findings[:3]
        return seconds

    def _verify(self, path: Path) -> float | None:
        check = ReceiptCheck({SIGNER.key_id: SIGNER.public}, is_complete=True)
        start = time.perf_counter()
        for number, receipt in enumerate(read_export(path), start=1):
            check.add(number, receipt)
        check.finish()
        seconds = time.perf_counter() - start
        assert (check.num_receipts, check.num_findings) == (self.entries, 0), check.findings[:3]
        return rate(self.entries, seconds)


def _insert_holds(conn: Connection, some: list[Hold]) -> None:
    names = [column.name for column in holds.c]
    conn.execute(sa.insert(holds), [{n: getattr(hold, n) for n in names} for hold in some])
