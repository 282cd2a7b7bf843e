"""Time of one commit on the databases and the disk of the run."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bench.billing.disk import Disk
from bench.billing.measurement import Measurement
from bench.databases import DATABASES
from bench.report import percentiles_ms


@dataclass(frozen=True, kw_only=True)
class Commits(Measurement):
    """Times of inserting and committing a row, per database, and of fdatasync of 4 KiB."""

    commits: int = 200

    def measure(self, folder: Path) -> dict[str, Any]:
        result: dict[str, Any] = Disk(writes=self.commits).measure(folder)
        for name, opened in DATABASES.items():
            with opened(folder / name) as url:
                result[f"{name}_insert_commit_ms"] = percentiles_ms(self._commit(url))
        return result

    def _commit(self, url: str) -> list[float]:
        engine = sa.create_engine(url)
        rows = sa.Table("rows", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
        seconds = []
        with engine.connect() as conn:
            rows.create(conn)
            conn.commit()
            for number in range(self.commits):
                start = time.perf_counter()
                conn.execute(sa.insert(rows).values(id=number))
                conn.commit()
                seconds.append(time.perf_counter() - start)
        engine.dispose()
        return seconds
