"""Errors of the database.

DatabaseError
├── UnsupportedDatabase   the URL names neither a SQLite file nor PostgreSQL
├── DatabaseDamaged       the SQLite file cannot be opened, and will not heal by a restart
├── DatabaseInUse         another gateway serves this SQLite file
├── NewerSchema           a newer release has migrated the schema
├── MigrationLocked       another process migrates the schema, and does not finish in time
└── LedgerUnavailable     the database cannot be read or written now: full queue, lost connection,
                          full disk
"""

import sqlite3
from pathlib import Path

from sqlalchemy import exc
from sqlalchemy.engine import URL


class DatabaseError(Exception):
    """Base of the errors that this room raises itself."""


class UnsupportedDatabase(DatabaseError):
    def __init__(self, url: URL) -> None:
        shown = url.render_as_string(hide_password=True)
        super().__init__(f"{shown} is neither a SQLite file nor PostgreSQL.")


class DatabaseDamaged(DatabaseError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} cannot be read ({reason}): restore your last backup into a new folder with "
            "`chorale restore BACKUP --data-dir NEW`."
        )


class DatabaseInUse(DatabaseError):
    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(
            f"Another gateway ({holder}) serves this database: {path} is locked. "
            "SQLite serves exactly one gateway; several share PostgreSQL."
        )


class NewerSchema(DatabaseError):
    def __init__(self, reason: str) -> None:
        super().__init__(
            f"A newer release has migrated this database ({reason}). Start that release again, or "
            "restore the database from before the upgrade."
        )


class MigrationLocked(DatabaseError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"Another process still migrates this database after {timeout_s:g} s.")


class LedgerUnavailable(DatabaseError):
    """The database cannot answer now, so no request may be served that it has to account for."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The database is unavailable: {reason}.")


def unavailable(error: Exception) -> Exception:
    """LedgerUnavailable for a fault of the database; the error itself for one of the statement."""
    if isinstance(error, exc.DBAPIError):
        # SQLite calls a misspelled statement an operational error, too.
        is_ours = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
        if is_ours or not isinstance(error, exc.OperationalError | exc.InterfaceError):
            return error
    return LedgerUnavailable(str(getattr(error, "orig", None) or error).strip().splitlines()[0])
