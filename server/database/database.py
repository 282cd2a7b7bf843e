"""The SQL database, off the event loop: reads on a small pool, writes in groups on one thread."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import URL, Connection, Engine, make_url

from registry.extras import require
from server.database.config import DatabaseConfig
from server.database.errors import DatabaseDamaged as DatabaseDamaged
from server.database.errors import DatabaseError as DatabaseError
from server.database.errors import DatabaseInUse as DatabaseInUse
from server.database.errors import LedgerUnavailable as LedgerUnavailable
from server.database.errors import MigrationLocked as MigrationLocked
from server.database.errors import NewerSchema as NewerSchema
from server.database.errors import UnsupportedDatabase as UnsupportedDatabase
from server.database.errors import unavailable
from server.database.file import FileLock, check_readable, identity_of, make_private
from server.database.writer import GroupWriter

if TYPE_CHECKING:
    import alembic.config

T = TypeVar("T")

DEFAULT_FILE = "chorale.db"

# Key of the lock that two gateways starting at once compete for; any constant that never changes.
_MIGRATION_LOCK_KEY = 0x43_48_4F_52_41_4C_45


class Database:
    """One SQL database: `read` on a bounded pool, `write` in group commits on one thread.

    url: `sqlite:///file` or `postgresql://...`; None: `chorale.db` in data_dir.   exclusive: True
    for the gateway, whose SQLite file is locked against a second gateway; command-line tools pass
    False. A function that is passed in may run twice (after a serialization failure or another
    write's exception), so it must touch only its connection.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        data_dir: Path,
        exclusive: bool = True,
        config: DatabaseConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config or DatabaseConfig()
        self._clock = clock
        self.url = _normalize(url or f"sqlite:///{data_dir / DEFAULT_FILE}")
        self._lock: FileLock | None = None
        if self.is_sqlite:
            folder = Path(str(self.url.database)).parent
            folder.mkdir(parents=True, exist_ok=True)
            check_readable(Path(str(self.url.database)))
            if exclusive:
                # The lock is beside the file, since two data directories may name one database.
                self._lock = _lock_gateway(folder / "gateway.lock")
                make_private(Path(str(self.url.database)))
        self.engine = _create_engine(self.url, self._config)
        self._writing = self.engine.execution_options(chorale_writes=True)
        self._reading = self.engine.execution_options(
            **({} if self.is_sqlite else {"postgresql_readonly": True})
        )
        self._readers = ThreadPoolExecutor(self._config.read_threads, "chorale-db-read")
        self._read_slots = threading.BoundedSemaphore(self._config.max_queued_reads)
        self._closing = threading.Lock()
        self._closed = False
        make_writer = partial(GroupWriter, self._writing, self._config, self._clock)
        self._writer = make_writer("chorale-db-write")
        # SQLite allows only one writer at a time, so a second thread would gain nothing.
        self._settling = self._writer if self.is_sqlite else make_writer("chorale-db-settle")

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    def migrate(self) -> None:
        """Bring the schema to this release's, one process at a time and all or nothing.

        Raises MigrationLocked, NewerSchema.
        """
        with self._migration_lock(), self._migrating() as conn:
            if _has_newest_schema(conn, self._config.migrations):
                return
            # Most starts find the schema as it should be, and alembic's import takes 0.2 s.
            import alembic.command
            from alembic.util import CommandError

            try:
                alembic.command.upgrade(migration_config(conn, self._config.migrations), "head")
            except CommandError as error:
                raise NewerSchema(str(error)) from error

    async def read(self, fn: Callable[[Connection], T]) -> T:
        """fn's result in a read-only transaction. Raises LedgerUnavailable, or fn's exception."""
        if not self._read_slots.acquire(blocking=False):
            raise LedgerUnavailable(f"{self._config.max_queued_reads} reads wait already")
        until = self._clock() + self._config.queue_timeout_s

        def read() -> T:
            if self._clock() > until:
                raise LedgerUnavailable(f"a read waited for {self._config.queue_timeout_s:g} s")
            return self.read_sync(fn)

        try:
            future = self._readers.submit(read)
        except RuntimeError as error:
            self._read_slots.release()
            raise LedgerUnavailable("it is closed") from error
        future.add_done_callback(lambda _: self._read_slots.release())
        return await asyncio.wrap_future(future)

    def read_sync(self, fn: Callable[[Connection], T]) -> T:
        is_again = False
        while True:
            try:
                with self._reading.connect() as conn:
                    return fn(conn)
            except (exc.DBAPIError, exc.TimeoutError) as error:
                # If the server dropped an idle connection, the pool has discarded the others, too.
                if is_again or not getattr(error, "connection_invalidated", False):
                    raise unavailable(error) from error
            is_again = True

    async def write(self, fn: Callable[[Connection], T], *, order: str = "") -> T:
        """fn's result once its write is durable, committed in one group with other writes.

        order: the writes of a group run sorted by it, "" first; a write that locks a tenant passes
        the tenant's id, so that two gateways lock in one order. An exception of fn undoes fn alone.
        Raises LedgerUnavailable; after a commit whose answer was lost the write may still be there,
        so it must be safe to write again.
        """
        return await asyncio.wrap_future(self.submit(fn, order=order))

    async def write_apart(self, fn: Callable[[Connection], T]) -> T:
        """Does `write` for a long fn, on PostgreSQL in another thread, so that no hold waits."""
        return await asyncio.wrap_future(self._settling.submit(fn, ""))

    def write_sync(self, fn: Callable[[Connection], T], *, order: str = "") -> T:
        """Does `write` for threads and command-line tools; must not be called on an event loop."""
        return self.submit(fn, order=order).result()

    def submit(self, fn: Callable[[Connection], T], *, order: str = "") -> "Future[T]":
        """Does `write`; any thread may wait for the future. Raises LedgerUnavailable at once."""
        return self._writer.submit(fn, order)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A write transaction in the calling worker thread, beside the writer; keep it short.

        It is for work that has several transactions with long steps between them. Raises
        LedgerUnavailable.
        """
        try:
            with self._writing.begin() as conn:
                yield conn
        except (exc.DBAPIError, exc.TimeoutError) as error:
            raise unavailable(error) from error

    def close(self) -> None:
        """Finish the queued writes and reads, then release the database and its lock."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._writer.close()
        if self._settling is not self._writer:
            self._settling.close()
        self._readers.shutdown()
        self.engine.dispose()
        if self._lock is not None:
            self._lock.release()

    @contextmanager
    def _migration_lock(self) -> Iterator[None]:
        if not self.is_sqlite:
            yield
            return
        lock = FileLock(Path(str(self.url.database)).with_name("migrate.lock"))
        deadline = time.monotonic() + self._config.migration_timeout_s
        while not lock.acquire():
            if time.monotonic() > deadline:
                raise MigrationLocked(self._config.migration_timeout_s)
            time.sleep(0.05)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _migrating(self) -> Iterator[Connection]:
        """A transaction for migrations, whose statements may take migration_timeout_s."""
        if self.is_sqlite:
            with self._writing.begin() as conn:
                yield conn
            return
        timeout_s = self._config.migration_timeout_s
        engine = _create_engine(self.url, replace(self._config, statement_timeout_s=timeout_s))
        try:
            with engine.begin() as conn:
                self._lock_migrations(conn)
                yield conn
        finally:
            engine.dispose()

    def _lock_migrations(self, conn: Connection) -> None:
        try:
            conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK_KEY)))
        except exc.OperationalError as error:
            raise MigrationLocked(self._config.migration_timeout_s) from error


def _has_newest_schema(conn: Connection, folder: Path) -> bool:
    """Whether the last of the migrations, whose files' names begin with their numbers, has run."""
    newest = max(path.name for path in (folder / "versions").glob("*.py")).partition("_")[0]
    if not sa.inspect(conn).has_table("alembic_version"):
        return False
    return list(conn.scalars(sa.text("SELECT version_num FROM alembic_version"))) == [newest]


def migration_config(conn: Connection, folder: Path) -> "alembic.config.Config":
    """Alembic's configuration, made in code, for commands that run the folder's migrations."""
    import alembic.config

    config = alembic.config.Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = conn
    return config


def _normalize(text: str) -> URL:
    url = make_url(text)
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        require("A PostgreSQL database", "psycopg")
        return url.set(drivername="postgresql+psycopg")
    in_memory = url.database in (None, "", ":memory:")
    if url.drivername in ("sqlite", "sqlite+pysqlite") and not in_memory:
        return url.set(drivername="sqlite+pysqlite")
    raise UnsupportedDatabase(url)


def _create_engine(url: URL, config: DatabaseConfig) -> Engine:
    pool: dict[str, Any] = {
        "pool_size": config.read_threads + 2,
        "max_overflow": 4,
        "pool_timeout": config.connect_timeout_s,
    }
    if url.get_backend_name() != "sqlite":
        timeout_ms = int(config.statement_timeout_s * 1000)
        arguments = {
            "connect_timeout": max(1, int(config.connect_timeout_s)),
            "options": f"-c statement_timeout={timeout_ms} -c lock_timeout={timeout_ms}",
        }
        # The driver comes with an extra, which a gateway on SQLite need not have.
        from server.database.postgres import bound_answers

        engine = sa.create_engine(url, connect_args=arguments, **pool)
        bound_answers(engine, config.statement_timeout_s + config.answer_margin_s)
        return engine
    engine = sa.create_engine(url, connect_args={"timeout": config.busy_timeout_s}, **pool)
    _set_up_sqlite(engine, Path(str(url.database)))
    return engine


def _set_up_sqlite(engine: Engine, path: Path) -> None:
    # SQLite goes on writing to a file that was deleted or replaced, and reports durable writes. So
    # the path has to lead to the file that was opened first.
    opened: list[tuple[int, int] | None] = []

    def check_file(*_: object) -> None:
        if opened and identity_of(path) != opened[0]:
            raise LedgerUnavailable("its file was moved or replaced; restart with the right one")

    def set_up(connection: Any, _record: object) -> None:
        # `begin` begins the transactions; the driver would do so late, and never with IMMEDIATE.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").close()
        if not opened:
            opened.append(identity_of(path))

    def begin(conn: Connection) -> None:
        # A write begins with IMMEDIATE, since one that begins as a read cannot wait for its turn:
        # it fails when it upgrades.
        if conn.get_execution_options().get("chorale_writes"):
            check_file()
            conn.exec_driver_sql("PRAGMA query_only=OFF")
            conn.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            conn.exec_driver_sql("PRAGMA query_only=ON")
            conn.exec_driver_sql("BEGIN")

    sa.event.listen(engine, "do_connect", check_file)
    sa.event.listen(engine, "connect", set_up)
    sa.event.listen(engine, "begin", begin)


def _lock_gateway(path: Path) -> "FileLock":
    lock = FileLock(path)
    if not lock.acquire():
        raise DatabaseInUse(path, path.read_text().strip() or "unknown")
    lock.path.write_text(f"process {os.getpid()}")
    return lock
