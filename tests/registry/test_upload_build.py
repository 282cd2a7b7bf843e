import time
from dataclasses import replace

import numpy as np
import pytest

from registry.errors import ObjectNotFound, StorageError
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE, lora_names
from tests.refusals import refused
from tests.registry.factories import (
    ActingStorage,
    declare,
    encode,
    keys,
    make_adapter,
    make_config,
    make_files,
    make_tensor,
    parse_canonical,
    sha256,
    sound_files,
)

# Other tests run the same statements on PostgreSQL.
pytestmark = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

A = "tenant-a"
A0, _ = lora_names("model.layers.0.self_attn.q_proj")


class FailingStorage:
    """A store whose methods named in `broken` fail."""

    def __init__(self, storage):
        self._storage = storage
        self.broken = set()

    def __getattr__(self, name):
        if name in self.broken:
            raise StorageError(key="any", reason="the store is down")
        return getattr(self._storage, name)


@pytest.fixture
def failing(uploads, storage):
    failing = FailingStorage(storage)
    uploads.storage = failing
    return failing


def files_left(tmp_path):
    folders = (tmp_path / "store", tmp_path / "work")
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


def test_a_complete_upload_is_a_version_whose_digest_is_its_objects(
    uploads, open_upload, storage, base, tmp_path
):
    version = uploads.complete(open_upload())
    assert keys(storage) == [version.object_key]
    assert len(files_left(tmp_path)) == 1, "only the object is left"
    raw = b"".join(storage.read(version.object_key))
    assert version.digest == sha256(raw)
    assert version.size_bytes == len(raw) == version.passport["size_bytes"]
    assert version.base_revision == base.base_revision
    assert version.object_key == f"tenants/{A}/{version.digest}"
    assert parse_canonical(raw).rank == version.rank == 4


def test_missing_bytes_are_named_and_the_upload_stays_open(uploads, base):
    files = sound_files(base)
    upload = uploads.open(files)
    uploads.send(upload, CONFIG_FILE, 0, files[CONFIG_FILE])
    missing = f"{len(files[WEIGHTS_FILE])} bytes of {WEIGHTS_FILE}"
    with refused("upload_not_complete", match=f"the missing {missing}"):
        uploads.build(upload)
    assert uploads.complete(uploads.send_all(upload, files)).version == 1


def test_another_tenant_cannot_complete(uploads, open_upload):
    with refused("upload_not_found"):
        uploads.build(replace(open_upload(), tenant_id="tenant-b"))


def damaged(base, code):
    """Files that are refused for their config, for the header of their weights, or for a value."""
    tensors = make_adapter(base)
    infinite = {A0: make_tensor(np.full((4, 16), np.inf))}
    return {
        "unsupported_feature": make_files(make_config(use_dora=True), encode(tensors)),
        "truncated_file": make_files(make_config(), encode(tensors)[:-1]),
        "not_finite": make_files(make_config(), encode(tensors | infinite)),
    }[code]


@pytest.mark.parametrize("code", ["unsupported_feature", "truncated_file", "not_finite"])
def test_a_hostile_upload_is_refused_by_name_and_leaves_nothing(
    catalog, uploads, connection, open_upload, base, tmp_path, code
):
    files = damaged(base, code)
    upload = open_upload(files)
    for _ in range(2):
        # A failed upload repeats its error when it is completed again.
        with refused(code) as caught:
            uploads.complete(upload)
        assert caught.value.param
    assert files_left(tmp_path) == []
    found = uploads.get(upload)
    assert (found.state, found.error_code) == ("failed", code)
    assert found.error
    assert catalog.list_adapters(connection, A) == []
    with refused("upload_not_open"):
        uploads.send(upload, CONFIG_FILE, 0, files[CONFIG_FILE])


@pytest.mark.parametrize("filename", [CONFIG_FILE, WEIGHTS_FILE])
def test_bytes_other_than_declared_are_refused_and_leave_nothing(uploads, base, tmp_path, filename):
    files = sound_files(base)
    declared = declare(files)
    declared[filename] = replace(declared[filename], sha256="0" * 64)
    upload = uploads.send_all(uploads.open(declared), files)
    with refused("digest_mismatch", param=filename):
        uploads.complete(upload)
    assert files_left(tmp_path) == []


@pytest.mark.parametrize("method", ["read", "put"])
def test_a_store_that_is_down_fails_the_request_and_not_the_upload(
    uploads, open_upload, tmp_path, failing, method
):
    upload = open_upload()
    failing.broken = {method}
    with pytest.raises(StorageError):
        uploads.complete(upload)
    assert list((tmp_path / "work").iterdir()) == []
    failing.broken = set()
    assert uploads.complete(upload).version == 1
    assert len(files_left(tmp_path)) == 1


def test_a_part_that_the_store_damaged_is_the_stores_fault(uploads, open_upload, storage, tmp_path):
    upload = open_upload()
    key = next(iter(keys(storage, "uploads/")))
    (tmp_path / "other").write_bytes(b"other")
    storage.put(key, tmp_path / "other")
    with pytest.raises(StorageError, match=key):
        uploads.complete(upload)


def test_parts_that_could_not_be_discarded_are_swept_later(uploads, open_upload, tmp_path, failing):
    upload = open_upload()
    failing.broken = {"delete"}
    version = uploads.complete(upload)
    assert len(files_left(tmp_path)) > 1
    assert uploads.sweep_uploads() == 0
    failing.broken = set()
    assert uploads.sweep_uploads() == 1
    assert uploads.sweep_uploads() == 0
    assert keys(failing) == [version.object_key]


def test_an_upload_that_expires_while_it_is_checked_leaves_an_orphan_that_is_swept(
    uploads, open_upload, tmp_path, storage, clock
):
    upload = open_upload()

    def expire():
        clock.now_s = time.time() + 25 * 3600
        uploads.sweep_uploads()

    uploads.storage = ActingStorage(storage, after="put", act=expire)
    with refused("upload_not_open"):
        uploads.build(upload)
    assert [key.split("/")[0] for key in keys(storage)] == ["tenants"]
    assert uploads.sweep_objects() == 1
    assert files_left(tmp_path) == []


def test_the_same_upload_completed_twice_at_once_is_one_version(
    uploads, open_upload, storage, catalog, connection
):
    upload = open_upload()
    uploads.storage = ActingStorage(storage, after="put", act=lambda: uploads.complete(upload))
    version = uploads.complete(upload)
    assert catalog.list_versions(connection, A, "pirate") == [version]


def test_the_slower_of_two_completes_gets_what_the_faster_made(uploads, open_upload, storage):
    """The faster gateway completes and discards the parts before the slower one reads them."""
    upload = open_upload()
    uploads.storage = ActingStorage(storage, before="read", act=lambda: uploads.complete(upload))
    assert uploads.complete(upload).version == 1


def test_parts_that_vanish_from_an_open_upload_are_the_stores_fault(uploads, open_upload, storage):
    upload = open_upload()
    for key in keys(storage, "uploads/"):
        storage.delete(key)
    with pytest.raises(ObjectNotFound):
        uploads.complete(upload)


def test_no_transaction_is_open_while_bytes_move(uploads, database, storage, open_upload):
    open_connections = []

    class WatchingStorage:
        def __getattr__(self, name):
            if name in ("put", "read", "list"):
                open_connections.append(database.pool.checkedout())
            return getattr(storage, name)

    uploads.storage = WatchingStorage()
    uploads.complete(open_upload())
    assert len(open_connections) > 4
    assert set(open_connections) == {0}
