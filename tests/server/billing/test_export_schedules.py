"""Scheduled exports put every receipt into one object, in order, whatever fails in between."""

import asyncio
import io
import os
import sys
import time

import pytest

from registry.errors import StorageError
from registry.storage.free_space import FreeSpace, WorkDir
from registry.storage.storage import LocalStorage
from registry.storage.url import open_storage
from registry.uploads.sweep import sweep_objects, sweep_uploads
from server.billing.exports import schedules
from server.billing.exports.formats import FORMATS
from server.billing.exports.reading import read_export
from server.billing.exports.schedules import (
    ScheduledExports,
    delete_schedule,
    list_of,
    put_schedule,
)
from server.database.clock import now_ms
from tests.faulty_s3 import CREDENTIALS, faulty_s3
from tests.registry.fake_disk import FakeDisk
from tests.server.export_ledger import fill, use
from tests.server.factories import NOW_MS

HOUR_MS = 3_600_000


class Killed(Exception):
    """Stands for the end of the process."""


class KilledAfter(LocalStorage):
    """A folder as store whose process is killed after `puts` puts."""

    def __init__(self, root, puts):
        super().__init__(root)
        self.puts = puts

    def put(self, key, path):
        super().put(key, path)
        self.puts -= 1
        if self.puts == 0:
            raise Killed


class Full(LocalStorage):
    def put(self, key, path):
        raise StorageError(key=key, reason="no space left")


@pytest.fixture
def folder(tmp_path):
    return LocalStorage(tmp_path / "store")


@pytest.fixture(scope="module")
def bucket():
    with faulty_s3() as s3, pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        yield open_storage(f"s3://bucket/below?endpoint_url={s3.url}", attempts=1)


@pytest.fixture
def now():
    return [NOW_MS + 10**9]


@pytest.fixture
def run(sqlite_database, tmp_path, now, monkeypatch):
    """A function that runs a turn at the time in `now`, with 10 rows per object and 3 per read."""
    monkeypatch.setattr(schedules, "PAGE_SIZE", 3)

    def run(storage, rows_per_object=10, space=None):
        work = WorkDir(tmp_path / "work", space)
        exports = ScheduledExports(
            sqlite_database, storage, work,
            now_ms=lambda: now[0], rows_per_object=rows_per_object,
        )  # fmt: skip
        try:
            asyncio.run(exports.turn())
        finally:
            assert list(tmp_path.glob("work/*")) == []

    return run


def schedule(database, tenant_id="ten_1", format="jsonl"):
    database.write_sync(lambda c: put_schedule(c, tenant_id, format, 3600, NOW_MS))


def only(database, tenant_id="ten_1"):
    [found] = database.read_sync(lambda c: list_of(c, tenant_id))
    return found


def names(storage, prefix="exports/ten_1/jsonl/"):
    return [found.key.removeprefix(prefix) for found in storage.list(prefix)]


def seqs(storage, prefix="exports/ten_1/jsonl/"):
    """Sequence numbers of the receipts of all objects, in order."""
    found = []
    for each in storage.list(prefix):
        content = io.BytesIO(b"".join(storage.read(each.key)))
        found += [receipt["receipt_seq"] for receipt in read_export(content)]
    return found


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_what_follows_goes_into_the_next_object(database, run, now, kind, request):
    storage = request.getfixturevalue(kind)
    schedule(database)
    use(database, count=7)
    use(database, "ten_2")
    run(storage)
    assert names(storage) == ["000000000001-000000000007.jsonl"]
    assert only(database).next_at_ms == (now[0] // HOUR_MS + 1) * HOUR_MS
    use(database, count=2)
    run(storage)
    assert len(names(storage)) == 1, "the next object is not due yet"
    now[0] += HOUR_MS
    run(storage)
    assert names(storage)[1:] == ["000000000008-000000000009.jsonl"]
    now[0] += HOUR_MS
    run(storage)  # without new receipts no object is written
    assert seqs(storage) == list(range(1, 10))
    assert only(database).exported_seq == 9
    assert names(storage, "exports/ten_2/") == []


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_written_and_an_object_has_so_many_rows_at_most(
    database, run, folder, format
):
    fill(database, 2, 20)
    schedule(database, format=format)
    run(folder)
    last = only(database).exported_seq
    assert last > 12
    found = names(folder, f"exports/ten_1/{format}/")
    assert [name.partition(".")[0] for name in found] == [
        f"{first:012}-{min(first + 9, last):012}" for first in range(1, last + 1, 10)
    ]
    exported = seqs(folder, f"exports/ten_1/{format}/")
    assert exported == [s for s in range(1, last + 1) if s in exported]
    assert len(exported) == last or format == "focus"


@pytest.mark.parametrize("puts", [1, 2])
def test_killed_between_object_and_row_it_goes_on_behind_the_object(
    database, run, folder, tmp_path, puts
):
    """An object that exists stays as it is, even if there are more receipts by then."""
    schedule(database)
    use(database, count=14)
    with pytest.raises(Killed):
        run(KilledAfter(tmp_path / "store", puts))
    before = {name: b"".join(folder.read(f"exports/ten_1/jsonl/{name}")) for name in names(folder)}
    use(database, count=8)
    run(folder)
    assert seqs(folder) == list(range(1, 23))
    for name, content in before.items():
        assert b"".join(folder.read(f"exports/ten_1/jsonl/{name}")) == content
    assert only(database).exported_seq == 22


def test_a_schedule_that_is_made_again_goes_on_behind_its_objects(database, run, folder):
    for count in (3, 2):
        use(database, count=count)
        database.write_sync(lambda c: delete_schedule(c, "ten_1", "jsonl", NOW_MS))
        schedule(database)
        run(folder)
    assert seqs(folder) == [1, 2, 3, 4, 5]


def test_what_fails_is_told_and_tried_again_and_stops_no_other(database, run, folder, tmp_path):
    schedule(database)
    use(database, count=3)
    run(Full(tmp_path / "full"))
    failed = only(database)
    assert "no space left" in failed.error
    assert (failed.exported_seq, failed.next_at_ms) == (0, NOW_MS)
    run(folder)
    assert (only(database).error, seqs(folder)) == (None, [1, 2, 3])


def test_an_export_does_not_take_the_disks_reserve(database, run, folder):
    schedule(database)
    use(database, count=3)
    disk = FakeDisk(free_bytes=1100)
    run(folder, space=FreeSpace(1000, disk))
    assert "no room" in only(database).error
    assert seqs(folder) == []
    disk.free_bytes = 100_000
    run(folder, space=FreeSpace(1000, disk))
    assert (only(database).error, seqs(folder)) == (None, [1, 2, 3])


def test_a_format_that_cannot_be_written_stops_no_other(database, run, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "server.billing.exports.parquet", raising=False)
    for tenant_id, format in (("ten_0", "parquet"), ("ten_1", "jsonl")):
        schedule(database, tenant_id, format)
        use(database, tenant_id)
    run(folder)
    assert "pip install -e '.[parquet]'" in only(database, "ten_0").error
    assert seqs(folder) == [1]


def test_no_sweep_takes_an_export(product, tmp_path):
    gateway, storage = product.gateway, product.gateway.storage
    kept = "exports/ten_1/csv/000000000001-000000000009.csv"
    orphan = f"tenants/ten_1/{'0' * 64}"
    (tmp_path / "object").write_bytes(b"x")
    for key in (kept, orphan):
        storage.put(key, tmp_path / "object")
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name in (orphan[-64:], kept[-29:]):
            os.utime(path, (time.time() - 10**8,) * 2)
    for sweep in (sweep_uploads, sweep_objects):
        sweep(gateway.database.begin, storage, gateway.registry_limits, now_ms())
    assert [found.key for found in storage.list("")] == [kept]


# ---- the API ----


def test_a_tenant_sets_changes_sees_and_ends_its_schedules(product):
    acme, other = product.user("acme"), product.user("other")
    for interval in ("hour", "day"):
        answer = acme.call("PUT", "/v1/usage/exports/focus", {"interval": interval})
        assert answer.status_code == 200
    made = answer.json()
    assert {name: made[name] for name in ("format", "interval", "exported_seq", "prefix")} == {
        "format": "focus", "interval": "day", "exported_seq": 0,
        "prefix": f"exports/{acme.tenant_id}/focus/",
    }  # fmt: skip
    assert acme.call("GET", "/v1/usage/exports").json()["data"] == [made]
    assert other.call("GET", "/v1/usage/exports").json()["data"] == []
    refused = acme.call("PUT", "/v1/usage/exports/csv", {"interval": "minute"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "interval")
    assert acme.call("DELETE", "/v1/usage/exports/focus").json()["deleted"] is True
    assert acme.call("GET", "/v1/usage/exports").json()["data"] == []


def test_the_gateway_writes_what_a_tenant_asked_for(product):
    user = product.user("acme")
    use(product.gateway.database, user.tenant_id)
    assert user.call("PUT", "/v1/usage/exports/csv", {"interval": "day"}).status_code == 200
    objects = product.gateway.settings.data_dir / "objects" / "exports" / user.tenant_id / "csv"

    async def run():
        chores = asyncio.create_task(product.gateway.chores.run())
        while user_has_exported() < 1:
            await asyncio.sleep(0.01)
        chores.cancel()
        await asyncio.gather(chores, return_exceptions=True)

    def user_has_exported():
        found = product.gateway.database.read_sync(lambda c: list_of(c, user.tenant_id))
        return found[0].exported_seq

    asyncio.run(run())
    [written] = objects.iterdir()
    [receipt] = read_export(written)
    assert receipt["tenant_name"] == "acme"
