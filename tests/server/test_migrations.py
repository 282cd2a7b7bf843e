import multiprocessing
from pathlib import Path

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from server.database import Database, DatabaseConfig, MigrationLocked, migration_config
from server.ledger_tables import metadata
from tests.server.factories import insert_holds, make_hold, make_price


def test_the_migrations_make_exactly_the_tables_of_the_code(database):
    with database.engine.connect() as conn:
        context = MigrationContext.configure(conn, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_migrating_twice_changes_nothing(database):
    insert_holds(database, make_hold(make_price(database)))
    database.migrate()
    with database.engine.connect() as conn:
        assert conn.scalar(sa.text("SELECT count(*) FROM holds")) == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_downgrading_leaves_no_table_and_upgrading_brings_them_back(kind, make_postgres, tmp_path):
    url = None if kind == "sqlite" else make_postgres("template1")
    database = Database(url, data_dir=tmp_path)
    database.migrate()
    with database.engine.execution_options(chorale_writes=True).begin() as conn:
        alembic.command.downgrade(migration_config(conn), "base")
        assert sa.inspect(conn).get_table_names() == ["alembic_version"]
    database.migrate()
    with database.engine.connect() as conn:
        assert set(metadata.tables) <= set(sa.inspect(conn).get_table_names())
    database.close()


def test_several_gateways_may_migrate_at_once(make_postgres, tmp_path):
    url = make_postgres("template1")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_migrate, args=(url, tmp_path)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_a_migration_that_another_process_holds_up_is_an_error_not_a_hang(tmp_path, postgres_url):
    config = DatabaseConfig(migration_timeout_s=0.1)
    first = Database(data_dir=tmp_path, exclusive=False)
    second = Database(data_dir=tmp_path, exclusive=False, config=config)
    with first._migration_lock(), pytest.raises(MigrationLocked):
        second.migrate()
    second.migrate()
    first.close()
    second.close()


def _migrate(url: str, folder: Path) -> None:
    database = Database(url, data_dir=folder)
    database.migrate()
    database.close()
