import importlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from registry.tables import metadata
from server.database.config import MIGRATIONS, DatabaseConfig
from server.database.database import Database, MigrationLocked, NewerSchema
from tests.server.factories import insert_holds, make_hold, make_price
from tests.server.next_migration import make_next_release

SERVER = Path(__file__).parents[3] / "server"
# Tables are known once their modules are imported, whichever other tests run.
for path in SERVER.glob("*/tables.py"):
    importlib.import_module(f"server.{path.parent.name}.tables")


@pytest.fixture(params=["sqlite", "postgresql"])
def own_database(request, tmp_path):
    """A database that no other test meets."""
    is_sqlite = request.param == "sqlite"
    url = None if is_sqlite else request.getfixturevalue("make_postgres")("template1")
    database = Database(url, data_dir=tmp_path, exclusive=False)
    database.migrate()
    yield database
    database.close()


def test_the_migrations_make_exactly_the_tables_of_the_code(each_database):
    with each_database.engine.connect() as conn:
        context = MigrationContext.configure(conn, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_a_release_has_its_tables_written_out():
    """Tables that a released migration takes from the code would change with the code."""
    is_released = re.search(
        r"^## \[?\d", (SERVER.parent / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    first = (MIGRATIONS / "versions" / "0001_tables.py").read_text()
    assert not (is_released and "create_all" in first)


def test_the_next_release_adds_its_migration_and_keeps_the_rows(own_database, tmp_path):
    insert_holds(own_database, make_hold(make_price(own_database)))
    upgraded = next_release(own_database, make_next_release(tmp_path / "next"))
    upgraded.migrate()
    with upgraded.engine.connect() as conn:
        assert conn.scalar(sa.text("SELECT count(*) FROM holds")) == 1
        names = {column["name"] for column in sa.inspect(conn).get_columns("tenants")}
        assert ("nickname" in names, sa.inspect(conn).has_table("nicknames")) == (True, True)
    upgraded.close()
    with pytest.raises(NewerSchema, match="9999"):
        own_database.migrate()


def test_a_migration_that_fails_leaves_the_database_as_it_was(own_database, tmp_path):
    folder = make_next_release(tmp_path / "next", then="raise ZeroDivisionError")
    upgraded = next_release(own_database, folder)
    with pytest.raises(ZeroDivisionError):
        upgraded.migrate()
    upgraded.close()
    with own_database.engine.connect() as conn:
        assert not sa.inspect(conn).has_table("nicknames")
    own_database.migrate()


def test_several_gateways_may_migrate_at_once(make_postgres, tmp_path):
    url = make_postgres("template1")
    databases = [Database(url, data_dir=tmp_path) for _ in range(3)]
    with ThreadPoolExecutor(3) as gateways:
        for migrated in [gateways.submit(database.migrate) for database in databases]:
            migrated.result()
    for database in databases:
        with database.engine.connect() as conn:
            assert set(metadata.tables) <= set(sa.inspect(conn).get_table_names())
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


def next_release(database: Database, folder: Path) -> Database:
    """The same database, opened by a release with the migrations of a folder."""
    url = database.url.render_as_string(hide_password=False)
    config = DatabaseConfig(migrations=folder)
    return Database(url, data_dir=folder, exclusive=False, config=config)
