"""Notes requests in the ledger that break by a fault of ours, so that nobody pays for them.

What a client cannot have received, because one of our processes failed or died, costs nothing. A
failure that the gateway answers is noted before the answer leaves; the requests that a gateway left
unanswered when it was killed are noted when it starts again, but for those whose answer a repeat
gets.
"""

import asyncio
import functools
import logging
from collections.abc import Callable

from sqlalchemy.engine import Connection

from server.billing import ledger
from server.billing.receipts.signing import Signer
from server.billing.unanswered import Unanswered
from server.database.clock import now_ms
from server.database.database import Database, LedgerUnavailable

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
"""Failures that wait for the ledger; when there are more, the oldest is dropped and billed."""
_RETRY_S = 1.0


class Failures:
    """Writes failures to the ledger, and retries those that could not be written.

    Beyond MAX_REMEMBERED a failure is billed as if the client had hung up.

    take_over_key: frees the Idempotency-Key of a request that is noted late, unless a repeat gets
    its answer, and returns whether it does.
    """

    def __init__(
        self,
        database: Database,
        signer: Signer,
        unanswered: Unanswered,
        take_over_key: Callable[[Connection, str], bool],
    ) -> None:
        self._database = database
        self._signer = signer
        self._unanswered = unanswered
        self._take_over_key = take_over_key
        self._unwritten: dict[str, None] = dict.fromkeys(unanswered.left)

    def expect(self, request_id: str) -> None:
        """Remember that a request is sent to an engine: if this process dies, it costs nothing."""
        self._unanswered.add(request_id)

    def note_answered(self, request_id: str) -> None:
        """Note that the answer is complete, or that its client left: the request is paid for,
        unless it has failed.
        """
        if request_id not in self._unwritten:
            self._unanswered.remove(request_id)

    async def note(self, request_id: str) -> None:
        """Note a failure; it is durable on return, unless the ledger is unavailable."""
        try:
            await self._database.write(lambda conn: self._mark(conn, request_id))
        except LedgerUnavailable:
            self._unwritten[request_id] = None
            if len(self._unwritten) > MAX_REMEMBERED:
                lost = next(iter(self._unwritten))
                self._forget(lost)
                logger.error("request %s failed and will be billed: the ledger is away", lost)

    async def run(self) -> None:
        """Write what was left, and what could not be written, until cancelled."""
        while True:
            for request_id in list(self._unwritten):
                try:
                    await self._database.write(functools.partial(self._mark_late, request_id))
                except LedgerUnavailable:
                    break
                self._forget(request_id)
            await asyncio.sleep(_RETRY_S)

    def _forget(self, request_id: str) -> None:
        self._unwritten.pop(request_id, None)
        self._unanswered.remove(request_id)

    def _mark_late(self, request_id: str, conn: Connection) -> None:
        if not self._take_over_key(conn, request_id):
            self._mark(conn, request_id)

    def _mark(self, conn: Connection, request_id: str) -> None:
        ledger.mark_failed(conn, self._signer, request_id, now_ms())
