"""The file of a SQLite database, and the locks beside it."""

import errno
import fcntl
import logging
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from server.database.errors import DatabaseDamaged

logger = logging.getLogger(__name__)


def make_private(path: Path) -> None:
    """Let nobody else read a database: make its file, or tighten the mode of an existing one.

    SQLite gives the files beside it the same mode, but only when it makes them.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        with suppress(FileNotFoundError):
            if file.stat().st_mode & 0o077:
                try:
                    file.chmod(0o600)
                except PermissionError:
                    logger.warning("%s belongs to another user, and others may read it", file)


def check_readable(path: Path) -> None:
    """Raise DatabaseDamaged if SQLite cannot read the file's header and list of tables.

    Raises PermissionError if it may not open the file.
    """
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path)) as conn:
            conn.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.DatabaseError as error:
        # Any other error, such as a lock, may be gone at the next attempt.
        if error.sqlite_errorcode in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise DatabaseDamaged(path, str(error)) from error
        if error.sqlite_errorcode == sqlite3.SQLITE_CANTOPEN:
            raise PermissionError(errno.EACCES, "SQLite cannot open it", str(path)) from error


def identity_of(path: Path) -> tuple[int, int] | None:
    """The identity of the file that a path names; None without a file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


class FileLock:
    """An exclusive flock; the kernel releases it when the process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
