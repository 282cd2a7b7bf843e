"""Faults of database, store, Redis and clocks; real ones, but for a bucket's refusals."""

import time

import httpx
import pytest
import sqlalchemy as sa

from registry.errors import StorageError
from server.cli.checks.check import Check
from server.cli.checks.services import (
    check_clocks,
    check_database,
    check_redis,
    check_schema,
    check_store,
)
from server.database.database import Database, DatabaseDamaged
from server.launch.settings import Settings
from tests.server.in_process import DEMO
from tests.server.next_migration import make_next_release


def make(data_dir, **changes):
    return Settings(model=str(DEMO), data_dir=data_dir, **changes)


def test_a_database_of_this_release_is_well_and_left_as_it_is(each_database, tmp_path):
    tables = each_database.read_sync(lambda conn: sa.inspect(conn).get_table_names())
    settings = make(tmp_path, database_url=each_database.url.render_as_string(hide_password=False))
    assert check_database(settings).verdict == "ok"
    assert check_schema(settings).verdict == "ok"
    assert each_database.read_sync(lambda conn: sa.inspect(conn).get_table_names()) == tables


def test_before_the_first_start_there_is_no_database_and_none_is_made(tmp_path):
    assert check_database(make(tmp_path)).verdict == "ok"
    assert check_schema(make(tmp_path)).verdict == "skipped"
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_gone_after_the_first_start_is_wrong(tmp_path):
    (tmp_path / "gateway.json").touch()
    finding = check_database(make(tmp_path))
    assert (finding.verdict, "is gone" in finding.found) == ("wrong", True)


def test_a_file_without_its_header_says_which_command_restores_it(tmp_path):
    (tmp_path / "chorale.db").write_bytes(bytes(4096))
    with pytest.raises(DatabaseDamaged, match="chorale restore"):
        check_database(make(tmp_path))


def test_a_schema_that_is_behind_or_ahead_of_the_release_says_what_to_run(tmp_path):
    database = Database(data_dir=tmp_path)
    database.migrate()
    finding = check_schema(make(tmp_path), make_next_release(tmp_path / "next"))
    assert (finding.verdict, "this release has 9999" in finding.found) == ("warning", True)
    assert "chorale backup" in finding.todo
    newer = sa.text("UPDATE alembic_version SET version_num = '9999'")
    database.write_sync(lambda conn: conn.execute(newer))
    finding = check_schema(make(tmp_path))
    assert (finding.verdict, "revision 9999" in finding.found) == ("wrong", True)
    database.close()


def test_a_database_that_is_not_there_is_wrong_and_its_password_is_not_told(tmp_path):
    settings = make(tmp_path, database_url="postgresql://chorale:hunter2@127.0.0.1:1/chorale")
    (finding,) = Check("database", lambda: check_database(settings), "Start it.").run()
    assert (finding.verdict, finding.todo) == ("wrong", "Start it.")
    assert "127.0.0.1" in finding.found
    assert "hunter2" not in finding.found


def test_a_store_is_tried_with_an_object_that_is_deleted(tmp_path):
    (tmp_path / "objects").mkdir()
    assert check_store(make(tmp_path)).verdict == "ok"
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def test_a_store_that_takes_no_object_is_wrong(tmp_path):
    (tmp_path / "objects").touch()
    with pytest.raises(StorageError):
        check_store(make(tmp_path))


@pytest.fixture
def bucket(make_api, monkeypatch):
    """A function of a refusal, which returns the URL of a bucket that refuses everything so."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")

    def refusing(status, code):
        body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        url = make_api(lambda _: httpx.Response(status, content=body)).url
        return f"s3://bucket?endpoint_url={url}&region=eu-west-1"

    return refusing


@pytest.mark.parametrize(
    ("status", "code", "todo"),
    [
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (400, "AuthorizationHeaderMalformed", "region"),
    ],
)
def test_a_buckets_refusal_is_told_by_its_name_with_what_to_do(
    bucket, tmp_path, status, code, todo
):
    finding = check_store(make(tmp_path, storage=bucket(status, code)))
    assert (finding.verdict, code in finding.found) == ("wrong", True)
    assert todo in finding.todo


def test_a_clock_that_differs_is_a_warning_and_past_the_slack_of_holds_it_is_wrong(
    bucket, tmp_path
):
    settings = make(tmp_path, storage=bucket(403, "AccessDenied"))
    assert check_clocks(make(tmp_path)).verdict == "skipped"
    assert check_clocks(settings).verdict == "ok"
    assert check_clocks(settings, lambda: time.time() + 10).verdict == "warning"
    finding = check_clocks(settings, lambda: time.time() - 100)
    assert finding.verdict == "wrong"
    assert "The clock of the store differs by +" in finding.found


def test_redis_is_well_unless_it_forgets_single_limits(redis_server, tmp_path):
    redis_server.wipe()
    settings = make(tmp_path, redis_url=redis_server.url, redis_deadline_s=10)
    assert "runs the limits' script" in check_redis(settings).found
    assert not redis_server.client.keys()
    assert check_clocks(settings, lambda: time.time() + 10).verdict == "warning"
    redis_server.client.config_set("maxmemory-policy", "allkeys-lru")
    finding = check_redis(settings)
    redis_server.client.config_set("maxmemory-policy", "noeviction")
    assert (finding.verdict, "noeviction" in finding.todo) == ("wrong", True)
