from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import inspect

from registry.errors import Invalid, Limited, QuotaExceeded, TooLarge
from registry.formats.own_tokenizer import CHAT_TEMPLATE, TOKENIZER_FILES
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE
from registry.tables import metadata
from registry.uploads.opening import has_object
from registry.uploads.rows import UploadFile, get_upload
from tests.refusals import refused
from tests.registry.factories import ActingStorage, keys, make_config, sound_files

A, B = "tenant-a", "tenant-b"


@pytest.fixture
def upload(uploads, base):
    return uploads.open(sound_files(base))


# Declarations


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "a/b", "a@b", "a" * 65, "a\n", "é"])
def test_a_name_that_is_no_name_is_refused(uploads, base, name):
    with refused("invalid_name"):
        uploads.open(sound_files(base), name=name)


@pytest.mark.parametrize(
    "names",
    [
        [],
        [CONFIG_FILE],
        [CONFIG_FILE, "adapter_model.bin"],
        [CONFIG_FILE, *TOKENIZER_FILES],
        [CONFIG_FILE, WEIGHTS_FILE, "model.py"],
        [CONFIG_FILE, "../adapter_model.safetensors"],
    ],
)
def test_only_the_files_of_peft_and_of_a_tokenizer_are_taken(uploads, names):
    with refused("invalid_files"):
        uploads.open({name: UploadFile(name, 10, "0" * 64) for name in names})


@pytest.mark.parametrize(
    "spec",
    [UploadFile("a", 0, "0" * 64), UploadFile("a", 1, "0" * 63), UploadFile("a", 1, "G" * 64)],
)
def test_a_declaration_needs_a_size_and_a_sha256(uploads, spec):
    with pytest.raises(Invalid):
        uploads.open({CONFIG_FILE: spec, WEIGHTS_FILE: UploadFile("a", 1, "0" * 64)})


@pytest.mark.parametrize(
    ("name", "limit_bytes"),
    [(CONFIG_FILE, 65_536), (WEIGHTS_FILE, 2 << 30), *TOKENIZER_FILES.items()],
)
def test_a_declared_size_over_the_limit_is_too_large(uploads, name, limit_bytes):
    names = CONFIG_FILE, WEIGHTS_FILE, *TOKENIZER_FILES
    files = {each: UploadFile(each, 1, "0" * 64) for each in names}
    files[name] = UploadFile(name, limit_bytes, "0" * 64)
    assert uploads.open(files).files.keys() == files.keys()
    files[name] = UploadFile(name, limit_bytes + 1, "0" * 64)
    with pytest.raises(TooLarge, match=name):
        uploads.open(files)


def test_adapters_are_limited_and_open_uploads_count(uploads, base, publish_upload):
    files, limits = sound_files(base), replace(uploads.limits, max_adapters=2)
    publish_upload(name="one")
    uploads.open(files, name="two", limits=limits)
    with pytest.raises(QuotaExceeded, match="max_adapters"):
        uploads.open(files, name="three", limits=limits)
    uploads.open(files, name="one", limits=limits)


def test_bytes_are_limited_and_equal_objects_count_once(uploads, base, publish_upload):
    version = publish_upload(name="one")
    publish_upload(name="two")
    files = sound_files(base)
    new_bytes = sum(len(data) for data in files.values())
    limits = replace(uploads.limits, max_adapter_bytes_total=version.size_bytes + new_bytes)
    uploads.open(files, name="three", limits=limits)
    with pytest.raises(QuotaExceeded, match="max_adapter_bytes_total"):
        uploads.open(files, name="three", limits=limits)


def test_versions_of_an_adapter_are_limited_and_open_uploads_count(uploads, base, publish_upload):
    uploads.limits = replace(uploads.limits, max_versions=2)
    publish_upload(seed=1)
    files = sound_files(base, seed=2)
    uploads.open(files)
    with pytest.raises(QuotaExceeded, match="max_versions"):
        uploads.open(files)
    uploads.open(files, name="other")


def test_uploads_are_limited_in_any_hour_and_the_answer_says_how_long_to_wait(uploads, base, clock):
    files = sound_files(base)
    uploads.limits = replace(uploads.limits, max_uploads_per_hour=2, max_open_uploads=100)
    for _ in range(2):
        uploads.open(files)
        clock.now_s += 600
    with pytest.raises(Limited, match="max_uploads_per_hour") as caught:
        uploads.open(files)
    assert caught.value.retry_after_s == 2400
    with pytest.raises(Limited):
        uploads.open(files, name=None)
    clock.now_s += 2400
    uploads.open(files)
    with pytest.raises(Limited) as caught:
        uploads.open(files)
    assert caught.value.retry_after_s == 600


def test_a_dry_run_counts_as_an_open_upload_and_not_as_an_adapter(uploads, base):
    files = sound_files(base)
    for _ in range(2):
        uploads.open(files, name=None)
    total = sum(map(len, files.values()))
    limits = replace(uploads.limits, max_adapters=1, max_adapter_bytes_total=total)
    uploads.open(files, limits=limits)
    with pytest.raises(QuotaExceeded, match="max_open_uploads"):
        uploads.open(files, name=None)


def test_presigned_parts_are_refused_where_the_store_takes_none(uploads, base):
    with refused("presigned_not_supported", param="transfer"):
        uploads.open(sound_files(base), transfer="presigned")


# Files that were uploaded before


def test_files_of_a_live_version_need_no_bytes_and_latest_means_it(
    uploads, catalog, connection, base, publish_upload
):
    first = publish_upload(seed=1)
    publish_upload(seed=2)
    upload = uploads.open_known(sound_files(base), alias="prod")
    assert (upload.state, uploads.version_of(upload)) == ("complete", first)
    assert uploads.get(upload) == upload
    assert {f.received_bytes - f.size_bytes for f in upload.files.values()} == {0}
    assert catalog.resolve(connection, A, "pirate") == first
    assert catalog.resolve(connection, A, "pirate@prod") == first


@pytest.mark.parametrize("other", ["tenant", "name", "file", "base"])
def test_files_of_anything_else_are_asked_for(uploads, base, publish_upload, other):
    publish_upload()
    files = sound_files(base)
    if other == "file":
        files[CONFIG_FILE] += b" "
    if other == "base":
        uploads.catalog.bases.replace(replace(base, base_revision="0" * 64))
    tenant_id, name = B if other == "tenant" else A, "new" if other == "name" else "pirate"
    assert uploads.open_known(files, tenant_id=tenant_id, name=name).state == "open"


def test_the_same_bytes_with_another_tokenizer_are_another_version(
    uploads, catalog, connection, base, publish_upload
):
    files = [sound_files(base), *(sound_files(base) | {CHAT_TEMPLATE: it} for it in (b"x", b"y"))]
    made = [publish_upload(each) for each in files]
    assert [version.tokenizer for version in made] == [None, "x", "y"]
    assert [version.version for version in made] == [1, 2, 3]
    assert len({version.digest for version in made}) == 1
    for each, version in zip(files, made, strict=True):
        upload = uploads.open_known(each)
        assert (upload.state, uploads.version_of(upload)) == ("complete", version)
        with uploads.begin() as conn:
            assert catalog.resolve(conn, A, "pirate", "") == version


def test_files_of_a_version_that_is_deleted_meanwhile_are_asked_for(uploads, base, publish_upload):
    publish_upload()
    files = sound_files(base)
    with uploads.begin() as conn:
        known = uploads.find_known(conn, files)
        uploads.catalog.delete_adapter(conn, A, "pirate")
        assert known is not None
        assert uploads.find_known(conn, files) is None
        assert uploads.open(files, conn, known=known).state == "open"


def test_a_version_whose_object_is_lost_is_brought_back_by_its_files(publish_upload, storage):
    version = publish_upload()
    assert has_object(storage, version)
    storage.delete(version.object_key)
    assert not has_object(storage, version)
    assert publish_upload() == version
    assert has_object(storage, version)


def test_known_files_and_dry_runs_need_no_room(uploads, base, publish_upload):
    publish_upload()
    full = replace(uploads.limits, max_adapters=1, max_adapter_bytes_total=1)
    assert uploads.open_known(sound_files(base), limits=full).state == "complete"
    assert uploads.open(sound_files(base), name=None, limits=full).state == "open"


def test_a_part_of_known_files_is_answered_and_dropped(uploads, base, publish_upload, storage):
    publish_upload()
    before = keys(storage)
    upload = uploads.open_known(sound_files(base))
    size = upload.files[CONFIG_FILE].size_bytes
    assert uploads.send(upload, CONFIG_FILE, 0, make_config()) == size
    assert keys(storage) == before


# Parts


@pytest.mark.parametrize(("start", "byte"), [(1500, b"b"), (0, b"b"), (500, b"a")])
def test_a_part_at_another_place_or_with_other_bytes_is_a_conflict(
    uploads, upload, storage, start, byte
):
    uploads.send(upload, WEIGHTS_FILE, 0, b"a" * 1000)
    with refused("upload_offset_mismatch") as caught:
        uploads.send(upload, WEIGHTS_FILE, start, byte * 1000)
    assert caught.value.details == {"received_bytes": 1000}
    (key,) = keys(storage, "uploads/")
    assert b"".join(storage.read(key)) == b"a" * 1000


@pytest.mark.parametrize("size", [0, 1, 999, 1001])
def test_a_part_that_is_not_the_last_has_the_full_size(uploads, upload, storage, size):
    with pytest.raises((Invalid, TooLarge)):
        uploads.send(upload, WEIGHTS_FILE, 0, b"x" * size)
    assert keys(storage) == []


@pytest.mark.parametrize(
    ("filename", "size", "total", "code"),
    [
        (CONFIG_FILE, 1000, None, "too_large"),
        (WEIGHTS_FILE, 1000, 7000, "size_mismatch"),
        *((name, 1, 1, "unknown_file") for name in ("adapter_model.bin", "../../x", "")),
    ],
)
def test_what_was_not_declared_is_refused(uploads, upload, storage, filename, size, total, code):
    with refused(code):
        uploads.send(upload, filename, 0, b"x" * size, total=total)
    assert keys(storage) == []


def test_another_tenants_upload_is_not_found(uploads, upload):
    with refused("upload_not_found"):
        uploads.get(replace(upload, tenant_id=B))


@pytest.mark.parametrize("upload_id", ["", "up_", "up_\0", "up_" + "0" * 32, "x" * 1000])
def test_an_upload_that_is_not_there_is_not_found(connection, upload_id):
    with refused("upload_not_found"):
        get_upload(connection, A, upload_id, 0)


def test_a_part_that_arrives_as_the_upload_ends_is_taken_back(uploads, upload, clock, storage):
    def expire():
        """Another gateway expires the upload while this one's part is on its way to the store."""
        clock.now_s += 24 * 3600
        uploads.sweep_uploads()

    uploads.storage = ActingStorage(storage, after="put", act=expire)
    with refused("upload_not_open"):
        uploads.send(upload, CONFIG_FILE, 0, make_config())
    assert keys(storage) == []


def test_two_senders_of_one_part_are_both_right(uploads, upload, storage):
    def send():
        return uploads.send(upload, CONFIG_FILE, 0, make_config())

    # Another gateway takes the same part while this one's is on its way to the store.
    uploads.storage = ActingStorage(storage, after="put", act=send)
    assert send() == len(make_config())


def test_concurrent_uploads_of_one_name_get_numbers_of_their_own(publish_upload):
    with ThreadPoolExecutor(3) as pool:
        versions = list(pool.map(lambda seed: publish_upload(seed=seed), range(3)))
    assert sorted(version.version for version in versions) == [1, 2, 3]


# Tables


def test_every_row_of_a_tenant_names_the_tenant(database):
    for table in metadata.sorted_tables:
        if table.name.startswith(("adapter", "upload")):
            assert not table.c.tenant_id.nullable


def test_every_constraint_and_index_has_a_name(database):
    for table in inspect(database).get_table_names():
        names = [index["name"] for index in inspect(database).get_indexes(table)]
        names += [key["name"] for key in inspect(database).get_foreign_keys(table)]
        assert None not in names
