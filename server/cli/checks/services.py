"""Checks of where the gateway keeps its state: database, object store, Redis, and their clocks."""

import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.cli.checks.check import Finding
from server.cli.units import milliseconds
from server.launch.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from server.database.database import Database

_TIMEOUT_S = 3.0
_MAX_DIFFERENCE_S = 1.0


class _Undone(Exception):
    """Ends a transaction without a commit."""


def sqlite_file(settings: Settings) -> Path | None:
    """The database's file; None for PostgreSQL."""
    from sqlalchemy.engine import make_url

    from server.database.database import DEFAULT_FILE

    if settings.database_url is None:
        return settings.data_dir / DEFAULT_FILE
    url = make_url(settings.database_url)
    return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


def check_database(settings: Settings) -> Finding:
    """Whether the database answers and can be written. Raises DatabaseError, DBAPIError."""
    import sqlalchemy as sa

    file = sqlite_file(settings)
    if file and not file.exists():
        if not (settings.data_dir / "gateway.json").exists():
            return Finding("ok", f"The first start makes {file}.")
        todo = "Put it back, or restore a backup: a start would make an empty ledger."
        return Finding("wrong", f"{file} is gone.", todo)
    with _open(settings) as database:
        facts = database.read_sync(_facts)
        with suppress(_Undone), database.begin() as conn:
            conn.execute(sa.text("CREATE TABLE doctor_probe (x INTEGER)"))
            raise _Undone
        began_s = time.monotonic()
        database.read_sync(lambda conn: conn.scalar(sa.text("SELECT 1")))
        took_s = time.monotonic() - began_s
    if facts.get("synchronous_commit") == "off":
        todo = "Set synchronous_commit = on: without it, holds that were committed can be lost."
        return Finding("wrong", "PostgreSQL commits before it has written.", todo)
    if facts.get("default_transaction_isolation", "read committed") != "read committed":
        todo = "Set default_transaction_isolation = 'read committed', which the server counts on."
        return Finding("warning", "Transactions have another isolation.", todo)
    if facts.get("journal_mode", "wal") != "wal":
        todo = "Move it to a local disk: on this one, SQLite cannot keep a WAL."
        return Finding("wrong", f"{file} has no WAL.", todo)
    name = f"PostgreSQL {facts['server_version']}" if file is None else "SQLite in WAL mode"
    return Finding("ok", f"{name} answers in {milliseconds(took_s)}, and can be written.")


def check_schema(settings: Settings, migrations: Path | None = None) -> Finding:
    """Whether the database has the tables of these migrations, this release's by default.

    Raises DatabaseError, DBAPIError.
    """
    file = sqlite_file(settings)
    if file and not file.exists():
        return Finding("skipped", "There is no database yet.")
    with _open(settings) as database:
        current, head, is_known = database.read_sync(lambda conn: _revisions(conn, migrations))
    if current == head:
        return Finding("ok", f"It has revision {head}, this release's.")
    if current is None:
        return Finding("ok", "It is empty: the first start makes the tables.")
    if is_known:
        todo = "Run `chorale backup FOLDER`, then start this release's `chorale serve`."
        return Finding("warning", f"It has revision {current}; this release has {head}.", todo)
    todo = "Start the newer release again, or `chorale restore` a backup from before the upgrade."
    return Finding("wrong", f"A newer release has migrated it to revision {current}.", todo)


def check_store(settings: Settings) -> Finding:
    """Whether an object can be put, read and deleted. Raises StorageError, NoRoom."""
    from registry.errors import StorageError
    from registry.storage.faults import REMEDIES
    from registry.storage.url import open_storage, parse_storage_url

    place = parse_storage_url(settings.storage_url)
    if isinstance(place, Path) and not place.exists():
        return Finding("ok", f"The first upload makes {place}.")
    store = open_storage(settings.storage_url, attempts=1, read_timeout_s=_TIMEOUT_S)
    key, content = f"doctor/{secrets.token_hex(8)}", secrets.token_bytes(1000)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        began_s = time.monotonic()
        try:
            store.put(key, Path(file.name))
            is_same = b"".join(store.read(key)) == content
            store.delete(key)
        except StorageError as error:
            if error.reason not in REMEDIES:
                raise
            return Finding("wrong", f"The store says {error.reason}.", REMEDIES[error.reason])
    if not is_same:
        todo = "Serve nothing from this store: it does not keep what it is given."
        return Finding("wrong", "An object came back with other bytes.", todo)
    took_s = time.monotonic() - began_s
    return Finding("ok", f"An object was put, read and deleted in {milliseconds(took_s)}.")


def check_redis(settings: Settings) -> Finding:
    """Whether Redis answers in time, runs the limits' script, and is set up as the docs say.

    Raises RedisError.
    """
    from server.limits.calls import Call
    from server.limits.redis_calls import SCRIPT

    if settings.redis_url is None:
        return Finding("ok", "There is none: the gateway counts limits in its own memory.")
    with _redis(settings.redis_url) as client:
        client.ping()
        began_s = time.monotonic()
        client.ping()
        took_s = time.monotonic() - began_s
        call = Call("standings", ())
        client.evalsha(client.script_load(SCRIPT), 1, *call.keys("doctor"), *call.arguments())
        policy = client.info("memory").get("maxmemory_policy")
        is_kept = client.info("persistence").get("aof_enabled")
    if policy != "noeviction":
        todo = "Set maxmemory-policy noeviction: else limits are forgotten one by one."
        return Finding("wrong", f"Its maxmemory-policy is {policy}.", todo)
    if is_kept:
        todo = "Set appendonly no: counts that come back old let requests pass a limit."
        return Finding("warning", "It keeps its data over a restart.", todo)
    if took_s > settings.redis_deadline_s:
        todo = "Bring Redis nearer, or raise redis_deadline_s: slower calls are counted apart."
        return Finding("warning", f"It answers in {milliseconds(took_s)}.", todo)
    return Finding("ok", f"It answers in {milliseconds(took_s)}, and runs the limits' script.")


def check_clocks(settings: Settings, now_s: Callable[[], float] = time.time) -> Finding:
    """Whether the clocks of database, Redis and bucket agree with this machine's.

    A service that does not answer is left out; its own check says why.
    """
    from redis.exceptions import RedisError

    from registry.errors import StorageError
    from server.database.database import DatabaseError

    differences = {}
    for name, ask in (("database", _database_s), ("Redis", _redis_s), ("store", _store_s)):
        before_s = now_s()
        with suppress(DatabaseError, RedisError, StorageError, OSError, KeyError):
            if (asked_s := ask(settings)) is not None:
                # The clock was read at some time between: what that explains is no difference.
                differences[name] = asked_s - min(max(asked_s, before_s), now_s())
    if not differences:
        return Finding("skipped", "No other clock can be asked.")
    name = max(differences, key=lambda name: abs(differences[name]))
    found = f"The clock of the {name} differs by {differences[name]:+.1f} s."
    if abs(differences[name]) <= _MAX_DIFFERENCE_S:
        return Finding("ok", found)
    # A hold outlives its request by this long: two clocks that differ by more may end it early.
    is_wrong = abs(differences[name]) > settings.hold_lifetime_s - settings.request_timeout_s
    todo = "Run an NTP client, such as chrony, on every machine; have it slew, not step."
    return Finding("wrong" if is_wrong else "warning", found, todo)


def _open(settings: Settings) -> "closing[Database]":
    from server.database.config import DatabaseConfig
    from server.database.database import Database

    config = DatabaseConfig(
        busy_timeout_s=_TIMEOUT_S, statement_timeout_s=_TIMEOUT_S, connect_timeout_s=_TIMEOUT_S
    )
    url, data_dir = settings.database_url, settings.data_dir
    return closing(Database(url, data_dir=data_dir, exclusive=False, config=config))


def _facts(conn: "Connection") -> dict[str, str]:
    """How the database keeps what is committed."""
    import sqlalchemy as sa

    ask, *names = ("SHOW", "server_version", "synchronous_commit", "default_transaction_isolation")
    if conn.dialect.name == "sqlite":
        ask, names = "PRAGMA", ["journal_mode"]
    return {name: str(conn.scalar(sa.text(f"{ask} {name}"))) for name in names}


def _revisions(conn: "Connection", migrations: Path | None) -> tuple[str | None, str | None, bool]:
    """The database's revision, this release's, and whether this release knows the database's."""
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    from server.database.config import MIGRATIONS
    from server.database.database import migration_config

    script = ScriptDirectory.from_config(migration_config(conn, migrations or MIGRATIONS))
    current = MigrationContext.configure(conn).get_current_revision()
    is_known = current in {each.revision for each in script.walk_revisions()}
    return current, script.get_current_head(), is_known


def _redis(url: str) -> closing[Any]:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
    return closing(redis.Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), **options))


def _database_s(settings: Settings) -> float | None:
    from server.database.clock import database_now_ms

    if sqlite_file(settings):
        return None
    with _open(settings) as database:
        return database.read_sync(database_now_ms) / 1000


def _redis_s(settings: Settings) -> float | None:
    if settings.redis_url is None:
        return None
    with _redis(settings.redis_url) as client:
        seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)


def _store_s(settings: Settings) -> float | None:
    """The bucket's time, by the header of an answer, which leaves out the fraction of a second."""
    import httpx

    from registry.storage.url import parse_storage_url

    place = parse_storage_url(settings.storage_url)
    if isinstance(place, Path):
        return None
    url = place.endpoint_url or f"https://s3.{place.region or 'us-east-1'}.amazonaws.com"
    try:
        answer = httpx.head(url, timeout=_TIMEOUT_S)
    except httpx.TransportError as error:
        raise OSError from error
    return parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5
