"""Presigned uploads, whose bytes never pass the gateway: the offered parts, and completion."""

import pytest

from registry.errors import StorageError
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE
from registry.uploads.presigned import offer_files
from tests.refusals import refused
from tests.registry.factories import PresignedFolder, keys, make_config, sound_files


@pytest.fixture
def store(uploads, tmp_path):
    store = PresignedFolder(tmp_path / "store")
    uploads.storage = store
    return store


@pytest.fixture
def files(base):
    return sound_files(base)


@pytest.fixture
def upload(uploads, store, files):
    return uploads.open(files, transfer="presigned")


def offer(uploads, upload):
    return offer_files(uploads.begin, uploads.storage, uploads.get(upload), uploads.limits)


def send(uploads, store, upload, files, *, leave_out=()):
    for name, missing in offer(uploads, upload)[1].items():
        for part in missing:
            if (name, part.number) not in leave_out:
                store.put_url(part.url, files[name][part.start : part.start + part.size_bytes])


def test_what_is_missing_is_offered_part_by_part_until_nothing_is(uploads, store, upload, files):
    missing = offer(uploads, upload)[1][WEIGHTS_FILE]
    size = len(files[WEIGHTS_FILE])
    starts = [(part.number, part.start, part.size_bytes) for part in missing]
    assert starts == [
        (i + 1, start, min(1000, size - start)) for i, start in enumerate(range(0, size, 1000))
    ]
    send(uploads, store, upload, files, leave_out=[(WEIGHTS_FILE, 2)])
    # A store that does not hold a URL to its size has not got the part.
    store.put_url(missing[1].url.rpartition("&")[0] + "&5", b"short")
    offered, missing = offer(uploads, upload)
    assert [part.number for part in missing[WEIGHTS_FILE]] == [2]
    assert offered.files[WEIGHTS_FILE].received_bytes == size - 1000
    assert missing[CONFIG_FILE] == ()
    assert offered.files[CONFIG_FILE].received_bytes == len(files[CONFIG_FILE])


def test_a_file_has_one_multipart_upload_however_often_it_is_offered(uploads, store, upload):
    first, again = (offer(uploads, upload) for _ in range(2))
    assert first == again
    assert len(store.multiparts) == 2
    # `upload` is a copy read before its multipart uploads were begun.
    offer_files(uploads.begin, store, upload, uploads.limits)
    assert len(store.multiparts) == 2


def test_it_becomes_a_version_like_any_other_and_leaves_only_its_object(
    uploads, store, upload, files
):
    send(uploads, store, upload, files)
    version = uploads.complete(upload)
    assert version.version == 1
    uploads.sweep_uploads()
    assert keys(store) == [version.object_key]
    assert store.multiparts == {}


@pytest.mark.parametrize("is_begun", [True, False])
def test_missing_bytes_are_named_and_the_upload_stays_open(uploads, store, upload, files, is_begun):
    missing = {name: len(data) for name, data in files.items()}
    if is_begun:
        send(uploads, store, upload, files, leave_out=[(WEIGHTS_FILE, 1)])
        missing = {WEIGHTS_FILE: 1000}
    with refused("upload_not_complete") as caught:
        uploads.build(upload)
    for name, count in missing.items():
        assert f"{count} bytes of {name}" in str(caught.value)
    send(uploads, store, upload, files)
    assert uploads.complete(upload).version == 1


def test_bytes_other_than_declared_are_the_senders_fault_and_leave_nothing(
    uploads, store, upload, files
):
    send(uploads, store, upload, {name: bytes(len(d)) for name, d in files.items()})
    with refused("digest_mismatch"):
        uploads.build(upload)
    assert keys(store) == []


def test_a_completion_that_the_store_broke_off_goes_on_where_it_stood(
    uploads, store, upload, files, monkeypatch
):
    """The store fails when one file is an object already and the other is still in parts."""
    send(uploads, store, upload, files)
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
            uploads.build(upload)
    offered, _ = offer(uploads, upload)
    assert {name: file.received_bytes for name, file in offered.files.items()} == {
        name: len(data) for name, data in files.items()
    }
    assert uploads.complete(upload).version == 1


def test_the_gateway_takes_no_part_of_it(uploads, upload, store):
    with refused("upload_is_presigned") as caught:
        uploads.send(upload, CONFIG_FILE, 0, make_config())
    assert f"GET /v1/uploads/{upload.upload_id}" in str(caught.value)
    assert keys(store) == []


def test_an_abandoned_one_leaves_no_multipart_upload(uploads, store, upload, files, clock):
    send(uploads, store, upload, files, leave_out=[(WEIGHTS_FILE, 1)])
    clock.now_s += 24 * 3600
    assert uploads.sweep_uploads() == 1
    assert (store.multiparts, keys(store)) == ({}, [])


def test_one_that_ends_while_it_is_begun_leaves_no_multipart_upload(
    uploads, store, upload, clock, monkeypatch
):
    begun = PresignedFolder.begin_multipart

    def begin_late(self, key):
        multipart_id = begun(self, key)
        clock.now_s += 24 * 3600
        uploads.sweep_uploads()
        return multipart_id

    monkeypatch.setattr(PresignedFolder, "begin_multipart", begin_late)
    with refused("upload_not_open"):
        offer_files(uploads.begin, store, upload, uploads.limits)
    assert store.multiparts == {}
