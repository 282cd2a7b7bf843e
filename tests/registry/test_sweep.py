"""The sweep deletes orphaned objects, but none that a row means or comes to mean meanwhile."""

import itertools
import time
from dataclasses import replace

import pytest

from registry.catalog.catalog import RETENTION_S
from registry.errors import StorageError
from registry.uploads.proof import Proof
from tests.registry.factories import keys

A = "tenant-a"


@pytest.fixture
def clock(clock):
    """A clock two hours ahead of the files' times: every object is past its grace period."""
    clock.now_s = time.time() + 2 * 3600
    return clock


def put(storage, tmp_path, key):
    (tmp_path / "orphan").write_bytes(b"orphan")
    storage.put(key, tmp_path / "orphan")
    return key


def orphan(storage, tmp_path, mark="0"):
    return put(storage, tmp_path, f"tenants/{A}/{mark * 64}")


def test_an_old_object_without_a_row_is_swept_and_a_young_one_is_not(
    uploads, storage, tmp_path, clock
):
    orphan(storage, tmp_path)
    clock.now_s = time.time() + 3500
    assert uploads.sweep_objects() == 0
    clock.now_s = time.time() + 3700
    assert uploads.sweep_objects() == 1
    assert keys(storage) == []


def test_what_was_deleted_is_swept_when_it_can_no_longer_be_restored(
    uploads, catalog, database, storage, publish_upload, clock
):
    publish_upload()
    with database.begin() as conn:
        catalog.delete_adapter(conn, A, "pirate")
    clock.now_s += RETENTION_S - 1
    uploads.purge()
    assert uploads.sweep_objects() == 0
    clock.now_s += 2
    uploads.purge()
    assert uploads.sweep_objects() == 1
    assert keys(storage) == []


def test_another_tenants_row_keeps_nothing_of_ours(uploads, publish_upload, storage, tmp_path):
    version = publish_upload(tenant_id="tenant-b")
    put(storage, tmp_path, f"tenants/{A}/{version.digest}")
    assert uploads.sweep_objects() == 1
    assert keys(storage) == [version.object_key]


def acting_before(database, turn, act):
    """A `begin` that calls `act` before it opens the transaction number `turn`, counted from 0."""
    turns = itertools.count()

    def begin():
        if next(turns) == turn:
            act()
        return database.begin()

    return begin


def test_an_object_that_a_row_comes_to_mean_after_it_was_listed_is_kept(
    uploads, database, storage, open_upload
):
    """Order: the sweep lists objects and reads rows ── put, row ── it reads rows again, locked."""
    failed = uploads.finish(uploads.build(open_upload()), Proof(verdict="mismatch"))
    upload, versions = open_upload(), []
    completing = replace(uploads)
    uploads.begin = acting_before(database, 1, lambda: versions.append(completing.complete(upload)))
    assert uploads.sweep_objects() == 0
    assert versions[0].object_key == failed.built.object_key, "the orphan was the same object"
    assert storage.size(versions[0].object_key)


def test_an_object_that_is_swept_before_a_row_means_it_is_missed_and_put_again(
    uploads, catalog, database, storage, open_upload
):
    """Order: put ── the sweep lists, reads rows, deletes under the lock ── the upload checks."""
    upload, swept = open_upload(), []
    other = replace(uploads)
    uploads.begin = acting_before(database, 1, lambda: swept.append(other.sweep_objects()))
    with pytest.raises(StorageError):
        uploads.build(upload)
    assert swept == [1]
    assert uploads.get(upload).state == "open"
    with database.begin() as conn:
        assert catalog.list_adapters(conn, A) == []
    version = uploads.complete(upload)
    assert storage.size(version.object_key)


def test_one_sweep_deletes_no_more_than_it_may_and_the_next_goes_on(uploads, storage, tmp_path):
    uploads.limits = replace(uploads.limits, max_orphans_per_sweep=2)
    for mark in "01234":
        orphan(storage, tmp_path, mark)
    assert [uploads.sweep_objects() for _ in range(4)] == [2, 2, 1, 0]


def test_parts_that_came_after_their_upload_was_discarded_are_swept(
    uploads, storage, tmp_path, clock
):
    part = put(storage, tmp_path, f"uploads/up_{'0' * 32}/adapter_config.json/{0:016d}")
    clock.now_s = time.time() + 24 * 3600
    assert uploads.sweep_objects() == 0
    clock.now_s += 3700
    assert uploads.sweep_objects() == 1
    assert part not in keys(storage)


def test_what_we_did_not_name_is_left_alone(uploads, storage, tmp_path):
    others = [f"tenants/{A}/notes", f"tenants/{A}/x/{'0' * 64}", "backup/" + "0" * 64]
    for key in others:
        put(storage, tmp_path, key)
    assert uploads.sweep_objects() == 0
    assert keys(storage) == sorted(others)
