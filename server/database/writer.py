"""Writes in groups: the writes that are queued while one group is committed are the next group.

There is one thread, one connection at a time and one commit for a group: a hundred holds cost one
fsync.
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import exc
from sqlalchemy.engine import Connection, Engine

from server.database.config import DatabaseConfig
from server.database.errors import LedgerUnavailable, unavailable

T = TypeVar("T")

# serialization_failure and deadlock_detected: a group that failed so succeeds when run again.
_RETRIED_SQLSTATES = {"40001", "40P01"}


@dataclass(slots=True)
class _Write(Generic[T]):
    fn: Callable[[Connection], T]
    future: "Future[T]"
    order: str
    until_s: float
    outcome: Callable[[], None] | None = None


class GroupWriter:
    """Runs functions on connections of `engine`, and commits them in groups. name: its thread's."""

    def __init__(
        self, engine: Engine, config: DatabaseConfig, clock: Callable[[], float], name: str
    ) -> None:
        self._engine = engine
        self._config = config
        self._clock = clock
        self._queue: queue.Queue[_Write[Any] | None] = queue.Queue(config.max_queued_writes)
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run_writer, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[[Connection], T], order: str) -> "Future[T]":
        """Queue a write; a group runs sorted by `order`. Raises LedgerUnavailable at once."""
        write = _Write(fn, Future(), order, self._clock() + self._config.queue_timeout_s)
        with self._closing:
            if self._closed:
                raise LedgerUnavailable("it is closed")
            try:
                self._queue.put_nowait(write)
            except queue.Full as error:
                waiting = self._config.max_queued_writes
                raise LedgerUnavailable(f"{waiting} writes wait already") from error
        return write.future

    def close(self) -> None:
        """Finish the queued writes and stop."""
        with self._closing:
            self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _run_writer(self) -> None:
        while (first := self._queue.get()) is not None:
            group = [first]
            while len(group) < self._config.max_group:
                try:
                    write = self._queue.get_nowait()
                except queue.Empty:
                    break
                if write is None:
                    self._queue.put(None)
                    break
                group.append(write)
            group.sort(key=lambda write: write.order)
            self._write_group([write for write in group if self._is_in_time(write)])

    def _is_in_time(self, write: _Write[Any]) -> bool:
        """Whether to run a write. One whose caller waited too long is answered instead."""
        if not write.future.set_running_or_notify_cancel():
            return False
        if self._clock() <= write.until_s:
            return True
        late = LedgerUnavailable(f"a write waited for {self._config.queue_timeout_s:g} s")
        write.future.set_exception(late)
        return False

    def _write_group(self, group: list[_Write[Any]]) -> None:
        if not group:
            return
        try:
            try:
                self._commit_with_retries(group, _run)
            except _WriteFailed:
                # Savepoints find the write that raised, so that only that write is undone.
                self._commit_with_retries(group, _run_in_savepoint)
        # Every error goes to the callers, which wait on the futures.
        except Exception as error:
            for write in group:
                write.future.set_exception(error)
            return
        for write in group:
            assert write.outcome is not None
            write.outcome()

    def _commit_with_retries(
        self, group: list[_Write[Any]], run: Callable[[Connection, _Write[Any]], None]
    ) -> None:
        for attempt in range(1, self._config.write_attempts + 1):
            committing = False
            try:
                with self._engine.connect() as conn, conn.begin() as transaction:
                    for write in group:
                        run(conn, write)
                    committing = True
                    transaction.commit()
                return
            except (exc.DBAPIError, exc.TimeoutError, exc.PendingRollbackError) as error:
                # A commit that was cut off may have succeeded, and would then be repeated.
                if attempt == self._config.write_attempts or not _retries(error, committing):
                    raise unavailable(error) from error
            time.sleep(0.01 * 2**attempt * random.random())


class _WriteFailed(Exception):
    """A write raised, so its group is rolled back."""


def _run(conn: Connection, write: _Write[Any]) -> None:
    """Run one write without a savepoint: a hold takes 150 us of a CPU with one, 50 us without.

    Raises _WriteFailed.
    """
    try:
        value = write.fn(conn)
    except Exception as error:
        raise _WriteFailed from error
    write.outcome = lambda: write.future.set_result(value)


def _run_in_savepoint(conn: Connection, write: _Write[Any]) -> None:
    """Run one write, and keep its answer or its exception for after the commit.

    Raises only errors that fail the whole group: the connection or its transaction is gone.
    """
    savepoint = conn.begin_nested()
    try:
        value = write.fn(conn)
        savepoint.commit()
    # The write's exception is raised where the write was asked for, not here.
    except Exception as error:
        if isinstance(error, exc.DBAPIError) and (
            error.connection_invalidated or _sqlstate(error) in _RETRIED_SQLSTATES
        ):
            raise
        try:
            savepoint.rollback()
        except exc.DBAPIError:
            # A full disk has rolled back everything; its error is raised, not the savepoint's.
            raise error from None
        raised = unavailable(error) if isinstance(error, exc.OperationalError) else error
        write.outcome = lambda: write.future.set_exception(raised)
    else:
        write.outcome = lambda: write.future.set_result(value)


def _retries(error: exc.SQLAlchemyError, committing: bool) -> bool:
    if not isinstance(error, exc.DBAPIError):
        return False
    if _sqlstate(error) in _RETRIED_SQLSTATES:
        return True
    return error.connection_invalidated and not committing


def _sqlstate(error: exc.DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)
