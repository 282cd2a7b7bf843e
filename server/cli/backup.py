"""`chorale backup` and `chorale restore`: all that a machine needs to serve and bill as before.

A backup is right if its journals begin where its ledger is settled, or before (otherwise ends are
lost), and reach that far (otherwise the engine gives new ends the places of settled ones, and they
are never billed). Neither order alone does this, since engines delete what is settled. So journals
are opened first, which keeps what is deleted later; then the ledger is copied, and then the
journals are read to their ends. What the copied ledger has settled is not posted again, by its
position; the rest is. Objects come last, as they are stored before their rows. Those of a folder
are copied; those of a bucket, which should have versions, are only listed.
"""

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from server.cli.beside import DatabaseUrl, ServerDir, gateway_settings, open_beside
from server.cli.connection import DEFAULT_DATA_DIR
from server.cli.terminal import CommandFailed, show
from server.text.json_object import JsonObject
from server.version import VERSION

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from server.database.database import Database

FORMAT = 1
_MANIFEST, _DUMP, _SQLITE = "manifest.json", "postgresql.dump", "chorale.db"
# Folders of engines: of the first base model, and of the others.
_ENGINES = ("engine*", "bases/*/engine*")
_SMALL = (
    *("admin.key", "secrets/[!.]*", "models.json", "bases.json"),
    *(f"{e}/{name}" for e in _ENGINES for name in ("identity", "meter", "settled")),
)
_Folder = Annotated[Path, typer.Argument(help="Folder of the backup.")]


def backup(
    folder: _Folder, data_dir: ServerDir = DEFAULT_DATA_DIR, database_url: DatabaseUrl = None
) -> None:
    """Copy ledger, journals, secrets and adapters to a new folder; a server may run meanwhile."""
    from engine.journal.lines import JournalCorrupt

    try:
        with open_beside(data_dir, database_url) as database:
            back_up(database, data_dir, folder)
    except sqlite3.Error as error:
        raise CommandFailed(f"There is no backup: {error}") from error
    except JournalCorrupt as error:
        raise CommandFailed(f"There is no backup: {error}. It may be better now.") from error
    show(f"{folder} holds secrets: keep it where only you can read it.")


def restore(
    folder: _Folder, data_dir: ServerDir = DEFAULT_DATA_DIR, database_url: DatabaseUrl = None
) -> None:
    """Make a data directory of a backup; it and a PostgreSQL database must be empty."""
    from sqlalchemy.engine import make_url

    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        files = manifest["files"]
        damaged = [name for name in files if _sha256(folder / name) != files[name]]
    except (OSError, ValueError, KeyError) as error:
        raise CommandFailed(f"{folder} is no whole backup: {error}") from error
    if damaged or manifest["format"] != FORMAT:
        raise CommandFailed(f"{folder} is damaged, or of another release: {', '.join(damaged)}")
    if data_dir.exists() and any(data_dir.iterdir()):
        raise CommandFailed(f"{data_dir} is not empty; give another --data-dir.")
    if (database_url is None) == (_DUMP in files):
        raise CommandFailed("Give --database-url for a backup of PostgreSQL, and only for one.")
    if database_url is not None:
        options = ("--no-owner", "--exit-on-error", "--single-transaction", str(folder / _DUMP))
        _run(make_url(database_url), "pg_restore", *options)
    for name in files.keys() - {_DUMP}:
        _copy(folder / name, data_dir / name)
    also = " --database-url URL" if database_url else ""
    show(f"Run before the first start: chorale audit --data-dir {data_dir}{also}")


def copy_ledger(url: "URL", folder: Path) -> None:
    """Copy a database as it is at one moment, while others write to it."""
    if url.get_backend_name() != "sqlite":
        _run(url, "pg_dump", "--format=custom", f"--file={folder / _DUMP}")
        return
    source, target = str(url.database), folder / _SQLITE
    with closing(sqlite3.connect(source)) as ledger, closing(sqlite3.connect(target)) as copy:
        ledger.backup(copy)


def back_up(
    database: "Database",
    data_dir: Path,
    folder: Path,
    copy_ledger: "Callable[[URL, Path], None]" = copy_ledger,
) -> None:
    """Make the backup in a new folder. Raises JournalCorrupt also if a segment was missed."""
    from engine.journal.lines import read_records

    folder.mkdir(mode=0o700, parents=True)
    began_at = datetime.now(UTC).isoformat()
    segments: dict[Path, BinaryIO] = {}
    with ExitStack() as opened:

        def open_segments() -> None:
            found = {path for e in _ENGINES for path in data_dir.glob(f"{e}/journal/*.*")}
            for path in found - segments.keys():
                with suppress(FileNotFoundError):
                    segments[path] = opened.enter_context(path.open("rb"))

        open_segments()
        copy_ledger(database.url, folder)
        open_segments()
        for path, file in segments.items():
            _write(file, folder / path.relative_to(data_dir))
    for path in (path for pattern in _SMALL for path in data_dir.glob(pattern)):
        _copy(path, folder / path.relative_to(data_dir))
    for journal in (path for e in _ENGINES for path in folder.glob(f"{e}/journal")):
        any(record is None for record in read_records(journal))
    manifest: JsonObject = {"format": FORMAT, "release": VERSION, "began_at": began_at}
    manifest["objects"] = _copy_objects(database, data_dir, folder / "objects")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest["files"] = {str(path.relative_to(folder)): _sha256(path) for path in files}
    manifest["ended_at"] = datetime.now(UTC).isoformat()
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    os.sync()


def _copy_objects(database: "Database", data_dir: Path, folder: Path) -> list[JsonObject]:
    """Copy the objects that the catalog names, if they are in a folder; return what it names."""
    import sqlalchemy as sa

    from registry.storage.url import parse_storage_url
    from registry.tables import adapter_versions

    url = gateway_settings(data_dir).get("storage")
    store = parse_storage_url(url) if url else data_dir / "objects"
    of = adapter_versions.c
    query = sa.select(of.object_key, of.digest, of.size_bytes).where(of.state != "purged")
    rows = database.read_sync(lambda conn: conn.execute(query.distinct()).mappings().all())
    for row in rows:
        if isinstance(store, Path):
            with suppress(FileNotFoundError):  # It was purged meanwhile; the list still names it.
                _copy(store / row["object_key"], folder / row["object_key"])
    return [dict(row) for row in rows]


def _run(url: "URL", program: str, *arguments: str) -> None:
    """Run a program of PostgreSQL. Raises CommandFailed."""
    plain = url.set(drivername="postgresql", password=None).render_as_string()
    # A password among the arguments would be in the list of processes.
    secret = {"PGPASSWORD": url.password} if url.password else {}
    command, environment = [program, f"--dbname={plain}", *arguments], {**os.environ, **secret}
    try:
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise CommandFailed(
            f"There is no {program}: install PostgreSQL's client programs, of the server's version."
        ) from None
    except subprocess.CalledProcessError as error:
        raise CommandFailed(error.stderr.strip()) from error


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as file:
        _write(file, target)


def _write(source: BinaryIO, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        shutil.copyfileobj(source, file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
