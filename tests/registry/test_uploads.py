from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import inspect

from registry.base_models import BaseModels
from registry.catalog import Catalog
from registry.errors import (
    InvalidName,
    InvalidUpload,
    QuotaExceeded,
    TooLarge,
    UploadNotFound,
    UploadNotOpen,
    UploadOffsetMismatch,
)
from registry.own_tokenizer import CHAT_TEMPLATE, TOKENIZER_FILES
from registry.peft_config import CONFIG_FILE
from registry.peft_format import WEIGHTS_FILE
from registry.sweep import sweep_uploads
from registry.tables import metadata
from registry.upload_rows import FileSpec
from registry.uploads import Uploads
from tests.registry.factories import (
    ActingStorage,
    declare,
    keys,
    make_config,
    send_part,
    sound_files,
    upload_adapter,
)

A, B = "tenant-a", "tenant-b"


def seeded(base, seed):
    return sound_files(base, seed=seed)


@pytest.fixture
def make_version(uploads, database, tmp_path):
    def make(**options):
        return upload_adapter(uploads, database, tmp_path, **options)

    return make


@pytest.fixture
def upload(uploads, connection, base):
    return uploads.create_upload(connection, A, "key-1", "pirate", declare(sound_files(base)))


# Declarations


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "a/b", "a@b", "a" * 65, "a\n", "é"])
def test_a_name_that_is_no_name_is_refused(uploads, connection, base, name):
    with pytest.raises(InvalidName):
        uploads.create_upload(connection, A, "key", name, declare(sound_files(base)))


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
def test_only_the_files_of_peft_and_of_a_tokenizer_are_taken(uploads, connection, names):
    with pytest.raises(InvalidUpload) as caught:
        uploads.create_upload(
            connection, A, "key", "pirate", {name: FileSpec(10, "0" * 64) for name in names}
        )
    assert caught.value.code == "invalid_files"


@pytest.mark.parametrize(
    "spec", [FileSpec(0, "0" * 64), FileSpec(1, "0" * 63), FileSpec(1, "G" * 64)]
)
def test_a_declaration_needs_a_size_and_a_sha256(uploads, connection, spec):
    files = {CONFIG_FILE: spec, WEIGHTS_FILE: FileSpec(1, "0" * 64)}
    with pytest.raises(InvalidUpload):
        uploads.create_upload(connection, A, "key", "pirate", files)


@pytest.mark.parametrize(
    ("name", "limit_bytes"),
    [(CONFIG_FILE, 65_536), (WEIGHTS_FILE, 2 << 30), *TOKENIZER_FILES.items()],
)
def test_a_declared_size_over_the_limit_is_too_large(uploads, connection, name, limit_bytes):
    files = dict.fromkeys((CONFIG_FILE, WEIGHTS_FILE, *TOKENIZER_FILES), FileSpec(1, "0" * 64))
    files[name] = FileSpec(limit_bytes, "0" * 64)
    assert uploads.create_upload(connection, A, "key", "pirate", files).files.keys() == files.keys()
    files[name] = FileSpec(limit_bytes + 1, "0" * 64)
    with pytest.raises(TooLarge, match=name):
        uploads.create_upload(connection, A, "key", "pirate", files)


def create(uploads, connection, name, base, **quotas):
    files = declare(sound_files(base))
    return uploads.create_upload(connection, A, "key", name, files, **quotas)


def test_adapters_are_limited_and_open_uploads_count(uploads, connection, base, make_version):
    make_version(name="one")
    create(uploads, connection, "two", base, limits=uploads.limits.of_tenant(2, None))
    with pytest.raises(QuotaExceeded) as caught:
        create(uploads, connection, "three", base, limits=uploads.limits.of_tenant(2, None))
    assert caught.value.quota == "max_adapters"
    create(uploads, connection, "one", base, limits=uploads.limits.of_tenant(2, None))


def test_bytes_are_limited_and_equal_objects_count_once(uploads, connection, base, make_version):
    version = make_version(name="one")
    make_version(name="two")
    new_bytes = sum(len(data) for data in sound_files(base).values())
    limit = version.size_bytes + new_bytes
    create(uploads, connection, "three", base, limits=uploads.limits.of_tenant(None, limit))
    with pytest.raises(QuotaExceeded) as caught:
        create(uploads, connection, "three", base, limits=uploads.limits.of_tenant(None, limit))
    assert caught.value.quota == "max_adapter_bytes_total"


def test_versions_of_an_adapter_are_limited_and_open_uploads_count(
    uploads, connection, base, make_version
):
    uploads.limits = replace(uploads.limits, max_versions=2)
    make_version(files=seeded(base, 1))
    files = declare(seeded(base, 2))
    uploads.create_upload(connection, A, "key", "pirate", files)
    with pytest.raises(QuotaExceeded) as caught:
        uploads.create_upload(connection, A, "key", "pirate", files)
    assert caught.value.quota == "max_versions"
    uploads.create_upload(connection, A, "key", "other", files)


def test_uploads_are_limited_in_any_hour_and_the_answer_says_how_long_to_wait(
    uploads, connection, base, clock
):
    uploads.limits = replace(uploads.limits, max_uploads_per_hour=2, max_open_uploads=100)
    for _ in range(2):
        create(uploads, connection, "pirate", base)
        clock.now_s += 600
    with pytest.raises(QuotaExceeded) as caught:
        create(uploads, connection, "pirate", base)
    assert (caught.value.quota, caught.value.retry_after_s) == ("max_uploads_per_hour", 2400)
    with pytest.raises(QuotaExceeded):
        uploads.create_dry_run(connection, A, "key", declare(sound_files(base)))
    clock.now_s += 2400
    create(uploads, connection, "pirate", base)
    with pytest.raises(QuotaExceeded) as caught:
        create(uploads, connection, "pirate", base)
    assert caught.value.retry_after_s == 600


def test_a_dry_run_counts_as_an_open_upload_and_not_as_an_adapter(uploads, connection, base):
    files = declare(sound_files(base))
    for _ in range(2):
        uploads.create_dry_run(connection, A, "key", files)
    limits = uploads.limits.of_tenant(1, sum(file.size_bytes for file in files.values()))
    create(uploads, connection, "pirate", base, limits=limits)
    with pytest.raises(QuotaExceeded) as caught:
        uploads.create_dry_run(connection, A, "key", files)
    assert caught.value.quota == "max_open_uploads"


def test_a_dry_run_needs_no_room(uploads, connection, base, make_version):
    make_version()
    uploads.limits = replace(uploads.limits, max_adapters=1, max_adapter_bytes_total=1)
    files = declare(sound_files(base))
    assert uploads.create_dry_run(connection, A, "key", files).state == "open"


def test_presigned_parts_are_refused_where_the_store_takes_none(uploads, connection, base):
    files = declare(sound_files(base))
    with pytest.raises(InvalidUpload) as caught:
        uploads.create_upload(connection, A, "key", "pirate", files, transfer="presigned")
    assert (caught.value.code, caught.value.param) == ("presigned_not_supported", "transfer")


# Files that were uploaded before


def create_known(uploads, conn, files, tenant_id=A, name="pirate", alias=None, **quotas):
    """Create an upload with the files that are known already, as the gateway does."""
    specs = declare(files)
    known = uploads.find_known(conn, tenant_id, name, specs)
    return uploads.create_upload(conn, tenant_id, "key", name, specs, alias, known=known, **quotas)


def test_files_of_a_live_version_need_no_bytes_and_latest_means_it(
    uploads, catalog, database, base, make_version
):
    first = make_version(files=seeded(base, 1))
    make_version(files=seeded(base, 2))
    with database.begin() as conn:
        upload = create_known(uploads, conn, seeded(base, 1), alias="prod")
        assert (upload.state, uploads.get_version(conn, upload)) == ("complete", first)
        assert {f.received_bytes - f.size_bytes for f in upload.files.values()} == {0}
        assert catalog.resolve(conn, A, "pirate") == first.ref
        assert catalog.resolve(conn, A, "pirate@prod") == first.ref


@pytest.mark.parametrize("other", ["tenant", "name", "file", "base"])
def test_files_of_anything_else_are_asked_for(uploads, database, base, make_version, other):
    make_version(files=seeded(base, 1))
    files = seeded(base, 1)
    if other == "file":
        files[CONFIG_FILE] += b" "
    if other == "base":
        uploads.catalog.bases.replace(replace(base, base_revision="0" * 64))
    tenant_id, name = B if other == "tenant" else A, "new" if other == "name" else "pirate"
    with database.begin() as conn:
        assert create_known(uploads, conn, files, tenant_id, name).state == "open"


def test_the_same_bytes_with_another_tokenizer_are_another_version(
    uploads, catalog, database, base, make_version
):
    files = [seeded(base, 1), *(seeded(base, 1) | {CHAT_TEMPLATE: text} for text in (b"x", b"y"))]
    made = [make_version(files=each) for each in files]
    assert [version.tokenizer for version in made] == [None, "x", "y"]
    assert [version.version for version in made] == [1, 2, 3]
    assert len({version.digest for version in made}) == 1
    for each, version in zip(files, made, strict=True):
        with database.begin() as conn:
            upload = create_known(uploads, conn, each)
            assert (upload.state, uploads.get_version(conn, upload)) == ("complete", version)
            assert catalog.resolve_version(conn, A, "pirate", "") == version


def test_files_of_a_version_that_is_deleted_meanwhile_are_asked_for(
    uploads, database, base, make_version
):
    make_version()
    files = declare(sound_files(base))
    with database.begin() as conn:
        known = uploads.find_known(conn, A, "pirate", files)
        uploads.catalog.delete_adapter(conn, A, "pirate")
        assert known is not None
        assert uploads.find_known(conn, A, "pirate", files) is None
        upload = uploads.create_upload(conn, A, "key", "pirate", files, known=known)
        assert upload.state == "open"


def test_a_version_whose_object_is_lost_is_brought_back_by_its_files(
    uploads, database, base, make_version, storage
):
    version = make_version()
    assert uploads.has_object(version)
    storage.delete(version.object_key)
    assert not uploads.has_object(version)
    assert make_version() == version
    assert uploads.has_object(version)


def test_known_files_need_no_room(uploads, database, base, make_version):
    make_version()
    full = uploads.limits.of_tenant(1, 1)
    with database.begin() as conn:
        known = create_known(uploads, conn, sound_files(base), limits=full)
    assert known.state == "complete"


def test_a_part_of_known_files_is_answered_and_dropped(
    uploads, database, base, make_version, tmp_path, storage
):
    make_version()
    before = keys(storage)
    with database.begin() as conn:
        upload = create_known(uploads, conn, sound_files(base))
        size = upload.files[CONFIG_FILE].size_bytes
        received = send_part(uploads, conn, upload, CONFIG_FILE, 0, make_config(), tmp_path)
    assert (received, keys(storage)) == (size, before)


# Parts


@pytest.mark.parametrize(("start", "byte"), [(1500, b"b"), (0, b"b"), (500, b"a")])
def test_a_part_at_another_place_or_with_other_bytes_is_a_conflict(
    uploads, connection, upload, tmp_path, storage, start, byte
):
    send_part(uploads, connection, upload, WEIGHTS_FILE, 0, b"a" * 1000, tmp_path)
    with pytest.raises(UploadOffsetMismatch) as caught:
        send_part(uploads, connection, upload, WEIGHTS_FILE, start, byte * 1000, tmp_path)
    assert caught.value.code == "upload_offset_mismatch"
    assert caught.value.received_bytes == 1000
    (key,) = keys(storage, "uploads/")
    assert b"".join(storage.read(key)) == b"a" * 1000


def test_more_bytes_than_declared_are_too_large(uploads, connection, upload, tmp_path, storage):
    size = upload.files[CONFIG_FILE].size_bytes
    with pytest.raises(TooLarge):
        send_part(uploads, connection, upload, CONFIG_FILE, 0, b"x" * (size + 1), tmp_path)
    assert keys(storage) == []


@pytest.mark.parametrize("size", [0, 1, 999, 1001])
def test_a_part_that_is_not_the_last_has_the_full_size(
    uploads, connection, upload, tmp_path, storage, size
):
    with pytest.raises((InvalidUpload, TooLarge)):
        send_part(uploads, connection, upload, WEIGHTS_FILE, 0, b"x" * size, tmp_path)
    assert keys(storage) == []


def test_a_total_other_than_declared_is_refused(uploads, connection, upload, tmp_path):
    with pytest.raises(InvalidUpload) as caught:
        send_part(uploads, connection, upload, WEIGHTS_FILE, 0, b"x" * 1000, tmp_path, total=7000)
    assert caught.value.code == "size_mismatch"


@pytest.mark.parametrize("filename", ["adapter_model.bin", "../../x", ""])
def test_a_file_that_was_not_declared_is_refused(
    uploads, connection, upload, tmp_path, storage, filename
):
    with pytest.raises(InvalidUpload) as caught:
        send_part(uploads, connection, upload, filename, 0, b"x", tmp_path, total=1)
    assert caught.value.code == "unknown_file"
    assert keys(storage) == []


def test_another_tenants_upload_is_not_found(uploads, connection, upload):
    with pytest.raises(UploadNotFound):
        uploads.get_upload(connection, B, upload.upload_id)


@pytest.mark.parametrize("upload_id", ["", "up_", "up_\0", "up_" + "0" * 32, "x" * 1000])
def test_an_upload_that_is_not_there_is_not_found(uploads, connection, upload_id):
    with pytest.raises(UploadNotFound):
        uploads.get_upload(connection, A, upload_id)


def test_a_part_that_arrives_as_the_upload_ends_is_taken_back(
    base, database, clock, tmp_path, storage
):
    def expire():
        """Another gateway expires the upload while this one's part is on its way to the store."""
        clock.now_s += 24 * 3600
        sweep_uploads(uploads, database.begin)

    ending = ActingStorage(storage, after="put", act=expire)
    uploads = Uploads(Catalog(BaseModels(base), clock), ending, clock=clock)
    with database.begin() as conn:
        upload = create(uploads, conn, "pirate", base)
    config = make_config()
    with database.connect() as conn, pytest.raises(UploadNotOpen):
        send_part(uploads, conn, upload, CONFIG_FILE, 0, config, tmp_path)
    assert keys(storage) == []


def test_two_senders_of_one_part_are_both_right(base, database, clock, tmp_path, storage):
    def race():
        """Another gateway takes the same part while this one's is on its way to the store."""
        with database.begin() as conn:
            send_part(faster, conn, upload, CONFIG_FILE, 0, make_config(), tmp_path / "other")

    racing = ActingStorage(storage, after="put", act=race)
    faster = Uploads(Catalog(BaseModels(base), clock), storage, clock=clock)
    (tmp_path / "other").mkdir()
    with database.begin() as conn:
        upload = create(faster, conn, "pirate", base)
    with database.connect() as conn:
        slower = Uploads(Catalog(BaseModels(base), clock), racing, clock=clock)
        received = send_part(slower, conn, upload, CONFIG_FILE, 0, make_config(), tmp_path)
    assert received == len(make_config())


def test_concurrent_uploads_of_one_name_get_numbers_of_their_own(uploads, database, base, tmp_path):
    def push(seed):
        folder = tmp_path / str(seed)
        folder.mkdir()
        return upload_adapter(uploads, database, folder, files=seeded(base, seed))

    with ThreadPoolExecutor(3) as pool:
        versions = list(pool.map(push, range(3)))
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
