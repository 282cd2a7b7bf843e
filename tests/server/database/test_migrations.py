import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from registry.tables import metadata
from server.billing.holds import get_hold
from server.billing.prices import DEFAULT_PRICES, add_price, price_for
from server.database.database import Database, DatabaseConfig, MigrationLocked, migration_config
from tests.server.factories import (
    NOW_MS,
    insert_holds,
    make_hold,
    make_price,
)

SERVER = Path(__file__).parents[3] / "server"
# Tables are known once their modules are imported, whichever other tests run.
for path in SERVER.glob("*/tables.py"):
    importlib.import_module(f"server.{path.parent.name}.tables")


@pytest.fixture(params=["sqlite", "postgresql"])
def unmigrated(request, tmp_path):
    """A database without tables."""
    is_sqlite = request.param == "sqlite"
    url = None if is_sqlite else request.getfixturevalue("make_postgres")("template1")
    database = Database(url, data_dir=tmp_path)
    yield database
    database.close()


def test_the_migrations_make_exactly_the_tables_of_the_code(database):
    with database.engine.connect() as conn:
        context = MigrationContext.configure(conn, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_migrating_twice_changes_nothing(database):
    insert_holds(database, make_hold(make_price(database)))
    database.migrate()
    with database.engine.connect() as conn:
        assert conn.scalar(sa.text("SELECT count(*) FROM holds")) == 1


def test_downgrading_leaves_no_table_and_upgrading_brings_them_back(unmigrated):
    database = unmigrated
    database.migrate()
    with database.engine.execution_options(chorale_writes=True).begin() as conn:
        alembic.command.downgrade(migration_config(conn), "base")
        assert sa.inspect(conn).get_table_names() == ["alembic_version"]
    database.migrate()
    with database.engine.connect() as conn:
        assert set(metadata.tables) <= set(sa.inspect(conn).get_table_names())


def test_several_gateways_may_migrate_at_once(make_postgres, tmp_path):
    url = make_postgres("template1")
    databases = [Database(url, data_dir=tmp_path) for _ in range(3)]
    with ThreadPoolExecutor(3) as gateways:
        for migrated in [gateways.submit(database.migrate) for database in databases]:
            migrated.result()
    for database in databases:
        database.close()


def test_a_migration_that_another_process_holds_up_is_an_error_not_a_hang(tmp_path, postgres_url):
    config = DatabaseConfig(migration_timeout_s=0.1)
    first = Database(data_dir=tmp_path, exclusive=False)
    second = Database(data_dir=tmp_path, exclusive=False, config=config)
    with first._migration_lock(), pytest.raises(MigrationLocked):
        second.migrate()
    second.migrate()
    first.close()
    second.close()


def test_without_prices_by_base_model_no_price_becomes_everybodys(unmigrated):
    database = unmigrated
    database.migrate()
    general = make_price(database)
    insert_holds(database, make_hold(general, base_model="small"))
    database.write_sync(
        lambda c: add_price(
            c, DEFAULT_PRICES, base_model="small", effective_at_ms=NOW_MS, now_ms=NOW_MS
        )
    )
    with database.engine.execution_options(chorale_writes=True).begin() as conn:
        alembic.command.downgrade(migration_config(conn), "0013")
        defaults = "SELECT price_version FROM price_versions WHERE scope = 'default'"
        assert conn.execute(sa.text(defaults)).all() == [(general.price_version,)]
    database.migrate()
    found = database.read_sync(lambda c: price_for(c, NOW_MS, base_model="small"))
    assert found.price_version == general.price_version
    assert database.read_sync(lambda c: get_hold(c, "r1")).base_model == ""
