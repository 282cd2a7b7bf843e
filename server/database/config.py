"""Limits and timeouts of a database."""

from dataclasses import dataclass
from pathlib import Path

import migrations

MIGRATIONS = Path(str(migrations.__file__)).parent
"""The folder of the migrations: env.py and versions/."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseConfig:
    """Limits and timeouts of a database.

    max_group: most writes in one commit.   write_attempts: attempts at one group before it fails.
    queue_timeout_s: how long a read or a write may wait for its turn.   answer_margin_s: time after
    statement_timeout_s until PostgreSQL is given up, which should have ended the statement itself.
    migrations: the folder of migrations, with env.py and versions/.
    """

    read_threads: int = 4
    max_queued_reads: int = 256
    max_queued_writes: int = 1024
    max_group: int = 128
    write_attempts: int = 3
    queue_timeout_s: float = 5.0
    busy_timeout_s: float = 5.0
    statement_timeout_s: float = 5.0
    answer_margin_s: float = 1.0
    connect_timeout_s: float = 5.0
    migration_timeout_s: float = 60.0
    migrations: Path = MIGRATIONS
