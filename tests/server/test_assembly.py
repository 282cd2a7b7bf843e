"""Parts of a gateway that depend on its settings."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora.log_lines import trace_of
from server.__main__ import main
from server.accounts.admin_key import AdminKey
from server.api.app import create_app
from server.assembly import assemble
from server.database.database import DEFAULT_FILE, Database, LedgerUnavailable
from server.inference import limit_refusals
from server.launch.settings import Settings
from server.limits.memory import MemoryLimiter
from tests.server.bases import change_base, demo_entries
from tests.server.in_process import DEMO, InProcess


@pytest.mark.parametrize("has_pool_dir", [False, True])
def test_what_is_to_be_proved_lies_where_engines_can_read_it(
    tmp_path: Path, has_pool_dir: bool
) -> None:
    data_dir, pool_dir = tmp_path / "data", tmp_path / "pool"
    data_dir.mkdir()
    settings = Settings(
        model=str(DEMO), data_dir=data_dir, pool_dir=pool_dir if has_pool_dir else None
    )
    for _ in range(2):  # the second removes files that the first left behind
        gateway = assemble(settings, demo_entries(settings), AdminKey("admin"))
        proof_dir = gateway.prover.work.path
        assert proof_dir.is_relative_to(pool_dir if has_pool_dir else data_dir)
        assert list(proof_dir.iterdir()) == []
        (proof_dir / "left").touch()
        asyncio.run(gateway.bases.default.engines.close())
        gateway.database.close()


def test_a_gateway_whose_database_lost_its_header_says_what_helps_and_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DEFAULT_FILE).write_bytes(b"lost" * 1024)
    settings = Settings(model=str(DEMO), data_dir=tmp_path).model_dump(mode="json")
    config = tmp_path / "gateway.json"
    config.write_text(json.dumps({"settings": settings}))
    monkeypatch.setattr(sys, "argv", ["server", str(config)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == os.EX_CONFIG, "the supervisor takes this for an end"
    assert "`chorale restore BACKUP --data-dir NEW`" in caplog.text


@pytest.mark.parametrize(
    ("given", "told", "exit_code"),
    [
        ({"database_url": "postgresql://here/x"}, "pip install -e '.[postgres]'", os.EX_CONFIG),
        ({"storage": "s3://bucket"}, "pip install -e '.[s3]'", os.EX_CONFIG),
        ({"database_url": "mysql://here/x"}, "neither a SQLite file", os.EX_CONFIG),
        ({"database_url": "sqlite:////proc/self/mem/x"}, "/proc/self/mem", os.EX_DATAERR),
    ],
)
def test_a_gateway_that_can_never_start_says_why_and_is_not_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, str],
    told: str,
    exit_code: int,
) -> None:
    for package in ("boto3", "psycopg"):
        monkeypatch.setitem(sys.modules, package, None)
    settings = Settings(model=str(DEMO), data_dir=tmp_path, **given).model_dump(mode="json")
    config = tmp_path / "gateway.json"
    config.write_text(json.dumps({"settings": settings}))
    monkeypatch.setattr(sys, "argv", ["server", str(config)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == exit_code
    assert told in caplog.text


def test_a_spools_folder_is_shared_with_others_whose_files_stay(tmp_path: Path) -> None:
    spool_dir = tmp_path / "spool"
    spool_dir.mkdir()
    (spool_dir / "another").touch()
    settings = Settings(model=str(DEMO), data_dir=tmp_path / "data", spool_dir=spool_dir)
    gateway = assemble(settings, demo_entries(settings), AdminKey("admin"))
    gateway.database.migrate()

    async def folder_of_part() -> Path:
        async with gateway.spool.place("ten_1", 1) as place:
            return place.path.parent.parent

    own = asyncio.run(folder_of_part())
    assert own.parent == spool_dir
    assert own.stat().st_mode & 0o077 == 0
    assert (spool_dir / "another").exists()
    asyncio.run(gateway.bases.default.engines.close())
    gateway.database.close()


def test_whether_limits_are_degraded_is_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(model=str(DEMO), data_dir=tmp_path)
    gateway = assemble(settings, demo_entries(settings), AdminKey("admin"))
    assert b"\nchorale_limiter_degraded 0.0\n" in gateway.metrics.render()
    monkeypatch.setattr(MemoryLimiter, "is_degraded", True)
    assert b"\nchorale_limiter_degraded 1.0\n" in gateway.metrics.render()
    asyncio.run(gateway.bases.default.engines.close())
    gateway.database.close()


def live_until(migrated_sqlite: Path, folder: Path, is_enough: Callable[[], bool], **parts: Any):
    """Run a gateway that has these parts."""
    shutil.copy(migrated_sqlite, folder / DEFAULT_FILE)
    product = InProcess.build(folder, f"sqlite:///{folder / DEFAULT_FILE}")
    app = create_app(replace(product.gateway, **parts))

    async def run() -> None:
        async with app.router.lifespan_context(app), asyncio.timeout(20):
            while not is_enough():
                await asyncio.sleep(0)

    asyncio.run(run())


def test_work_goes_on_after_a_turn_for_which_the_database_was_away(
    migrated_sqlite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = []

    class Away:
        async def tell(self) -> None:
            turns.append(1)
            raise LedgerUnavailable("gone")

    monkeypatch.setattr(limit_refusals, "INTERVAL_S", 0.0)
    live_until(migrated_sqlite, tmp_path, lambda: len(turns) > 1, limit_refusals=Away())


def test_background_work_that_fails_is_in_the_log_with_its_trace(
    migrated_sqlite: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        async def run(self) -> None:
            raise KeyError("insides")

    def is_told() -> bool:
        return any(record.name == "server.api.app" for record in caplog.records)

    live_until(migrated_sqlite, tmp_path, is_told, failures=Broken())
    (record,) = [record for record in caplog.records if record.name == "server.api.app"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)
    assert trace_of(record.exc_info[1])[-1].endswith(" run")


def test_a_gateway_that_does_not_start_lets_go_of_what_it_had(tmp_path: Path) -> None:
    class Unreachable:
        is_closed = False
        is_ready = False

        async def start(self) -> None:
            raise OSError("no such pool")

        async def close(self) -> None:
            self.is_closed = True

    engines = Unreachable()
    settings = Settings(model=str(DEMO), data_dir=tmp_path)
    gateway = assemble(settings, demo_entries(settings), AdminKey("admin"))
    change_base(gateway, engines=engines)
    gateway.database.migrate()
    app = create_app(gateway)

    async def run() -> None:
        with pytest.raises(OSError, match="no such pool"):
            async with app.router.lifespan_context(app):
                pass

    asyncio.run(run())
    assert engines.is_closed
    # The database's lock is free, so that the next gateway starts at once.
    Database(settings.database_url, data_dir=tmp_path).close()


@pytest.fixture(scope="module")
def refused_start(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A gateway's process that was assembled, and ended at a database of a newer release."""
    data_dir = tmp_path_factory.mktemp("newer")
    with closing(Database(data_dir=data_dir)) as database, database.begin() as conn:
        conn.exec_driver_sql("CREATE TABLE alembic_version AS SELECT '9999' AS version_num")
    settings = Settings(model=str(DEMO), data_dir=data_dir).model_dump(mode="json")
    config = data_dir / "gateway.json"
    config.write_text(json.dumps({"settings": settings}))
    command = [sys.executable, "-X", "importtime", "-m", "server", str(config)]
    env = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}  # is no setting
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_a_gateway_on_a_database_of_a_newer_release_says_so_and_is_not_restarted(
    refused_start: subprocess.CompletedProcess[str],
) -> None:
    assert "A newer release has migrated this database" in refused_start.stderr
    assert "Traceback" not in refused_start.stderr
    assert refused_start.returncode == os.EX_CONFIG, "with which `chorale serve` ends, too"


def test_a_gateway_without_redis_and_traces_imports_the_library_of_neither(
    refused_start: subprocess.CompletedProcess[str],
) -> None:
    lines = refused_start.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if "|" in line}
    assert {"server.assembly", "server.traces.spans"} <= imported
    # FastAPI imports the package opentelemetry.trace, which does nothing by itself.
    for name in ("redis", "opentelemetry.sdk", "opentelemetry.exporter", "server.traces.otlp"):
        assert name not in imported
