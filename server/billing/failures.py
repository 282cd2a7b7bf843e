"""Notes requests that fail with a server error in the ledger, so that nobody pays for them.

The note is written before the answer leaves.
"""

import asyncio
import logging

from sqlalchemy.engine import Connection

from server.billing import ledger
from server.billing.receipts.receipt import Receipt
from server.billing.receipts.signing import Signer
from server.database.clock import now_ms
from server.database.database import Database, LedgerUnavailable

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
"""Failures that wait for the ledger; when there are more, the oldest is dropped and billed."""
_RETRY_S = 1.0


class Failures:
    """Writes failures to the ledger, and retries those that could not be written.

    A failure that is lost with the process, or beyond MAX_REMEMBERED, is billed as if the client
    had hung up.
    """

    def __init__(self, database: Database, signer: Signer) -> None:
        self._database = database
        self._signer = signer
        self._unwritten: dict[str, None] = {}

    async def note(self, request_id: str) -> None:
        """Note a failure; it is durable on return, unless the ledger is unavailable."""
        try:
            await self._write(request_id)
        except LedgerUnavailable:
            self._unwritten[request_id] = None
            if len(self._unwritten) > MAX_REMEMBERED:
                lost = next(iter(self._unwritten))
                del self._unwritten[lost]
                logger.error("request %s failed and will be billed: the ledger is away", lost)

    async def run(self) -> None:
        """Retry the failures that could not be written, until cancelled."""
        while True:
            await asyncio.sleep(_RETRY_S)
            for request_id in list(self._unwritten):
                try:
                    await self._write(request_id)
                except LedgerUnavailable:
                    break
                self._unwritten.pop(request_id, None)

    async def _write(self, request_id: str) -> None:
        def write(conn: Connection) -> Receipt | None:
            return ledger.mark_failed(conn, self._signer, request_id, now_ms())

        await self._database.write(write)
