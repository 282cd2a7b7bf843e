"""Presigned uploads, whose bytes never pass the gateway: the offered parts, and completion."""

import pytest

from registry.errors import (
    InvalidAdapter,
    StorageError,
    UploadIsPresigned,
    UploadNotComplete,
    UploadNotOpen,
)
from registry.peft_config import CONFIG_FILE
from registry.peft_format import WEIGHTS_FILE
from registry.sweep import sweep_uploads
from registry.upload_build import build_upload
from tests.registry.factories import (
    PresignedFolder,
    complete_and_prove,
    declare,
    keys,
    make_config,
    send_part,
    sound_files,
)

A = "tenant-a"


@pytest.fixture
def store(uploads, tmp_path):
    store = PresignedFolder(tmp_path / "store")
    uploads.storage = store
    return store


@pytest.fixture
def files(base):
    return sound_files(base)


@pytest.fixture
def upload(uploads, database, store, files):
    with database.begin() as conn:
        return uploads.create_upload(
            conn, A, "key-1", "pirate", declare(files), transfer="presigned"
        )


def offer(uploads, database, upload):
    with database.begin() as conn:
        upload = uploads.get_upload(conn, A, upload.upload_id)
    return uploads.offer_files(database.begin, upload)


def send(uploads, database, store, upload, files, *, leave_out=()):
    for name, offered in offer(uploads, database, upload).items():
        for part in offered.missing:
            if (name, part.number) not in leave_out:
                store.put_url(part.url, files[name][part.start : part.start + part.size_bytes])


def test_what_is_missing_is_offered_part_by_part_until_nothing_is(
    uploads, database, store, upload, files
):
    offered = offer(uploads, database, upload)[WEIGHTS_FILE]
    size = len(files[WEIGHTS_FILE])
    starts = [(part.number, part.start, part.size_bytes) for part in offered.missing]
    assert starts == [
        (i + 1, start, min(1000, size - start)) for i, start in enumerate(range(0, size, 1000))
    ]
    send(uploads, database, store, upload, files, leave_out=[(WEIGHTS_FILE, 2)])
    # A store that does not hold a URL to its size has not got the part.
    store.put_url(offered.missing[1].url.rpartition("&")[0] + "&5", b"short")
    offered = offer(uploads, database, upload)
    assert [part.number for part in offered[WEIGHTS_FILE].missing] == [2]
    assert offered[WEIGHTS_FILE].received_bytes == size - 1000
    assert (offered[CONFIG_FILE].missing, offered[CONFIG_FILE].received_bytes) == (
        (),
        len(files[CONFIG_FILE]),
    )


def test_a_file_has_one_multipart_upload_however_often_it_is_offered(
    uploads, database, store, upload
):
    first, again = (offer(uploads, database, upload) for _ in range(2))
    assert first == again
    assert len(store.multiparts) == 2
    # `upload` is a copy read before its multipart uploads were begun.
    uploads.offer_files(database.begin, upload)
    assert len(store.multiparts) == 2


def test_it_becomes_a_version_like_any_other_and_leaves_only_its_object(
    uploads, database, store, upload, files
):
    send(uploads, database, store, upload, files)
    version = complete_and_prove(uploads, database, upload)
    assert version.version == 1
    sweep_uploads(uploads, database.begin)
    assert keys(store) == [version.object_key]
    assert store.multiparts == {}


@pytest.mark.parametrize("is_begun", [True, False])
def test_missing_bytes_are_named_and_the_upload_stays_open(
    uploads, database, store, upload, files, is_begun
):
    missing = {name: len(data) for name, data in files.items()}
    if is_begun:
        send(uploads, database, store, upload, files, leave_out=[(WEIGHTS_FILE, 1)])
        missing = {WEIGHTS_FILE: 1000}
    with pytest.raises(UploadNotComplete) as caught:
        build_upload(uploads, database.begin, A, upload.upload_id)
    assert caught.value.missing_bytes == missing
    send(uploads, database, store, upload, files)
    assert complete_and_prove(uploads, database, upload).version == 1


def test_bytes_other_than_declared_are_the_senders_fault_and_leave_nothing(
    uploads, database, store, upload, files
):
    send(uploads, database, store, upload, {name: bytes(len(d)) for name, d in files.items()})
    with pytest.raises(InvalidAdapter) as caught:
        build_upload(uploads, database.begin, A, upload.upload_id)
    assert caught.value.code == "digest_mismatch"
    assert keys(store) == []


def test_a_completion_that_the_store_broke_off_goes_on_where_it_stood(
    uploads, database, store, upload, files, monkeypatch
):
    """The store fails when one file is an object already and the other is still in parts."""
    send(uploads, database, store, upload, files)
    completed = []
    whole = PresignedFolder.complete_multipart

    def complete_one(self, key, multipart_id):
        if completed:
            raise StorageError(key=key, reason="the store is down")
        completed.append(key)
        whole(self, key, multipart_id)

    with monkeypatch.context() as patch:
        patch.setattr(PresignedFolder, "complete_multipart", complete_one)
        with pytest.raises(StorageError):
            build_upload(uploads, database.begin, A, upload.upload_id)
    offered = offer(uploads, database, upload)
    assert {name: file.received_bytes for name, file in offered.items()} == {
        name: len(data) for name, data in files.items()
    }
    assert complete_and_prove(uploads, database, upload).version == 1


def test_the_gateway_takes_no_part_of_it(uploads, connection, upload, tmp_path, store):
    with pytest.raises(UploadIsPresigned) as caught:
        send_part(uploads, connection, upload, CONFIG_FILE, 0, make_config(), tmp_path)
    assert f"GET /v1/uploads/{upload.upload_id}" in str(caught.value)
    assert keys(store) == []


def test_an_abandoned_one_leaves_no_multipart_upload(
    uploads, database, store, upload, files, clock
):
    send(uploads, database, store, upload, files, leave_out=[(WEIGHTS_FILE, 1)])
    clock.now_s += 24 * 3600
    assert sweep_uploads(uploads, database.begin) == 1
    assert (store.multiparts, keys(store)) == ({}, [])


def test_one_that_ends_while_it_is_begun_leaves_no_multipart_upload(
    uploads, database, store, upload, clock, monkeypatch
):
    begun = PresignedFolder.begin_multipart

    def begin_late(self, key):
        multipart_id = begun(self, key)
        clock.now_s += 24 * 3600
        sweep_uploads(uploads, database.begin)
        return multipart_id

    monkeypatch.setattr(PresignedFolder, "begin_multipart", begin_late)
    with pytest.raises(UploadNotOpen):
        uploads.offer_files(database.begin, upload)
    assert store.multiparts == {}
