"""The settler: reads the engines' journals and posts them to the ledger, until it is stopped.

A lease makes one gateway settle an engine, among those that reach its socket. A second settler
would only waste work, since positions are locked and events are unique.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from sqlalchemy.engine import Connection

from engine.errors import EngineDeadError
from engine.wire.records import JournalRecords
from server.billing import holds, ledger
from server.billing.incidents import record_incident
from server.billing.ledger import PostResult
from server.billing.receipts.signing import Signer
from server.database.clock import database_now_ms
from server.database.database import Database, LedgerUnavailable
from server.database.leases import Leases
from server.traces.spans import Tracer

logger = logging.getLogger(__name__)

LEASE = "settler/"
"""Prefix of the names of leases, by which other machines know which engines are here."""
SILENT_MS = 300_000
"""Age of a lease at which nobody has the engine. Leases of engines that hang are renewed late."""
_LATE_MS = 30_000
"""Lateness of a search for expired holds from which on the clock may have been set ahead."""

ReadJournal = Callable[[str, int, int], Awaitable[JournalRecords]]

# Errors that may be gone at a later pass, after the engine restarts or the database is back.
_TRANSIENT = (ConnectionError, TimeoutError, EngineDeadError, LedgerUnavailable)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettlerConfig:
    """Sizes and intervals of a settler.

    group_size: records in one transaction.
    poll_s: interval between passes while all is settled and `wake` is not called.
    retry_s: interval between passes while a journal is not settled to its end.
    gather_s: delay after `wake`, so that ends are settled together. One end costs 5 ms of processor
    time when it is settled alone, and 0.3 ms among others.
    interval_s: least time from one pass to the next; it only delays ends that come after others.
    void_interval_s: interval between searches for expired holds of an engine.
    max_skipped: most passes in a row that leave an engine out after failures.
    """

    group_size: int = 256
    poll_s: float = 2.0
    retry_s: float = 0.2
    gather_s: float = 0.02
    interval_s: float = 0.5
    read_timeout_s: float = 5.0
    void_interval_s: float = 5.0
    max_skipped: int = 16


@dataclass(slots=True)
class EngineLag:
    """How far a settler has settled one engine's journal; metrics tell of it.

    complete_at_ms: when all of the journal was last settled.
    num_failures: passes that failed since the last that succeeded.
    num_skipped: passes to come that leave the engine out.
    voided_at_ms: last search for expired holds.
    is_lost: whether the journal is another one than was settled so far.
    """

    settled_seq: int = 0
    last_seq: int = 0
    complete_at_ms: int | None = None
    num_failures: int = 0
    num_skipped: int = 0
    voided_at_ms: int = 0
    is_lost: bool = False


class Settler:
    """Posts end records within `poll_s`, or `gather_s` after `wake`.

    read_journal: called with (engine_id, settled_seq, limit). It must ask that engine and no other,
    since an engine deletes the records of its journal that are settled.
    engine_ids: returns the engines whose journals can be read now.
    tracer: exports the settlement of traced requests; None where there are no traces.
    lags: of every current engine, by engine id.
    """

    def __init__(
        self,
        database: Database,
        signer: Signer,
        leases: Leases,
        read_journal: ReadJournal,
        *,
        engine_ids: Callable[[], Iterable[str]],
        now_ms: Callable[[Connection], int] = database_now_ms,
        config: SettlerConfig | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._database = database
        self._signer = signer
        self._leases = leases
        self._read_journal = read_journal
        self._engine_ids = engine_ids
        self._now_ms = now_ms
        self._config = config or SettlerConfig()
        self._tracer = tracer
        self.lags: dict[str, EngineLag] = {}
        self._woken = asyncio.Event()
        self._settled_once = asyncio.Event()
        self._passing = asyncio.Lock()
        self._stopping = asyncio.Event()

    def wake(self) -> None:
        """Make `run` settle soon, since there are new end records, not at the next poll."""
        self._woken.set()

    async def run(self) -> None:
        """Settle until `stop` or `drain`; cancelling it is safe at any point."""
        while not self._stopping.is_set():
            # Cleared before the pass, so that a request that ends during it causes another pass.
            self._woken.clear()
            clock = asyncio.get_running_loop().time
            next_at = clock() + self._config.interval_s
            is_settled = await self.settle()
            if self._stopping.is_set():
                return
            wait_s = self._config.poll_s if is_settled else self._config.retry_s
            if await _happens(self._woken, wait_s):
                await _happens(self._stopping, max(self._config.gather_s, next_at - clock()))

    async def wait_settled(self, timeout_s: float) -> bool:
        """Wait for the first pass that settles every journal. False if there was none in time."""
        return await _happens(self._settled_once, timeout_s)

    def stop(self) -> None:
        """Make `run` return after its current pass."""
        self._stopping.set()
        self._woken.set()

    async def drain(self, timeout_s: float) -> bool:
        """Stop `run`, and post the records that can still be read. False if some could not be."""
        self.stop()
        try:
            async with asyncio.timeout(timeout_s):
                return await self.settle(patient=False)
        except TimeoutError:
            return False

    async def settle(self, *, patient: bool = True) -> bool:
        """Make one pass over all engines. Returns whether every journal is settled to its end.

        patient: leave an engine that failed lately out of some passes.
        """
        async with self._passing:
            there = dict.fromkeys(self._engine_ids())
            self.lags = {id: lag for id, lag in self.lags.items() if id in there}
            settled = [self._settle_engine(id, patient) for id in there]
            is_settled = all(await asyncio.gather(*settled))
        if settled and is_settled:
            self._settled_once.set()
        return is_settled

    async def _settle_engine(self, engine_id: str, patient: bool) -> bool:
        lag = self.lags.setdefault(engine_id, EngineLag())
        if patient and lag.num_skipped > 0:
            lag.num_skipped -= 1
            return False
        try:
            if not await self._leases.hold(LEASE + engine_id):
                self.lags[engine_id] = EngineLag()  # what another settler does is not known here
                return True
            while not await self._settle_group(engine_id, lag):
                pass
        except _TRANSIENT as error:
            lag.num_skipped = min(2**lag.num_failures, self._config.max_skipped)
            lag.num_failures += 1
            if lag.num_failures == 1:
                logger.warning("journal of %s cannot be settled: %s", engine_id, error)
            return False
        lag.num_failures = 0
        return not lag.is_lost

    async def _settle_group(self, engine_id: str, lag: EngineLag) -> bool:
        """Read and post one group. Returns True when there is nothing more to post for now."""

        def look(conn: Connection) -> tuple[int, int]:
            return ledger.settled_seq(conn, engine_id), self._now_ms(conn)

        # The time is taken before the read, as `void_expired` requires: a request whose hold was
        # expired then, and that the journal read afterwards lacks, never gets into the journal.
        position, as_of_ms = await self._database.read(look)
        found = await asyncio.wait_for(
            self._read_journal(engine_id, position, self._config.group_size),
            self._config.read_timeout_s,
        )
        if found.engine_id != engine_id or found.last_seq < position:
            await self._note_lost(engine_id, lag, found, position)
            return True
        lag.is_lost = False
        lag.settled_seq, lag.last_seq = position, found.last_seq
        if found.records:
            result = await self._post(found)
            lag.settled_seq = result.settled_seq
        if found.complete:
            lag.complete_at_ms = as_of_ms
            await self._void_expired(engine_id, lag, found, as_of_ms)
        return found.complete or not found.records

    async def _post(self, found: JournalRecords) -> PostResult:
        def post(conn: Connection) -> PostResult:
            now_ms = self._now_ms(conn)
            return ledger.post(conn, self._signer, found.engine_id, found.records, now_ms)

        began_at = time.monotonic()
        result = await self._database.write_apart(post)
        if self._tracer and result.traceparents:
            export = self._tracer.export_late
            await asyncio.to_thread(export, "settle", result.traceparents, began_at)
        if result.incidents:
            logger.error("%d incidents in the journal of %s", result.incidents, found.engine_id)
        return result

    async def _void_expired(
        self, engine_id: str, lag: EngineLag, found: JournalRecords, as_of_ms: int
    ) -> None:
        due_at_ms = lag.voided_at_ms + self._config.void_interval_s * 1000
        # A clock that was set back must not delay the next search by as much.
        if lag.voided_at_ms <= as_of_ms < due_at_ms:
            return
        was_set_ahead = as_of_ms > due_at_ms + _LATE_MS
        lag.voided_at_ms = as_of_ms

        def void(conn: Connection) -> list[str]:
            holds.renew(conn, engine_id, found.open_request_ids, as_of_ms)
            if was_set_ahead:  # requests on their way to the engine get there by the next search
                return []
            return holds.void_expired(
                conn,
                engine_id,
                as_of_ms=as_of_ms,
                still_open=frozenset(found.open_request_ids),
                now_ms=self._now_ms(conn),
            )

        if voided := await self._database.write(void):
            logger.info("voided %d holds that %s never used", len(voided), engine_id)

    async def _note_lost(
        self, engine_id: str, lag: EngineLag, found: JournalRecords, position: int
    ) -> None:
        """Record that the journal is not the one settled so far; nothing is posted or voided."""
        if lag.is_lost:
            return
        detail = f"settled to {position}; {found.engine_id} answers with {found.last_seq} records"
        logger.error("journal of %s is lost: %s", engine_id, detail)

        def note(conn: Connection) -> None:
            lost = {"engine_id": engine_id, "detail": detail}
            record_incident(conn, at_ms=self._now_ms(conn), kind="journal_lost", **lost)

        await self._database.write(note)
        lag.is_lost = True


async def _happens(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event, and return whether it came in time."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()
