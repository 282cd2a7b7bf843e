"""Streams one export of a data directory: python -m tests.server.export_child DATA_DIR FORMAT

The process prints the number of receipts, its memory peak in MB at the first 100,000 of them, and
its peak at the end.
"""

import asyncio
import re
import sys
from pathlib import Path

from server.billing.exports.formats import open_encoder
from server.billing.exports.pages import Range
from server.billing.exports.stream import stream
from server.database.database import Database


class Counting:
    """An encoder that counts receipts, and notes the memory peak at the first 100,000."""

    def __init__(self, format):
        self.encoder = open_encoder(format)
        self.begin, self.end = self.encoder.begin, self.encoder.end
        self.rows = 0
        self.begun_mb = 0.0

    def add(self, receipts):
        self.rows += len(receipts)
        if self.rows <= 100_000:
            self.begun_mb = peak_mb()
        return self.encoder.add(receipts)


def peak_mb():
    # VmHWM, since ru_maxrss includes the peak of the process that forked this one.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


async def main(data_dir, format):
    database = Database(data_dir=Path(data_dir))
    encoder = Counting(format)
    async for _ in stream(database, encoder, Range.clamped(None, 0, 2**62, 2**62)):
        pass
    database.close()
    sys.stdout.write(f"{encoder.rows} {encoder.begun_mb} {peak_mb()}\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
