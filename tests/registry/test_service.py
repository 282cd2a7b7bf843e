import pytest
from sqlalchemy import inspect

from registry.base_model import BaseModel
from registry.errors import (
    AdapterNotFound,
    AdapterNotServable,
    InvalidName,
    InvalidUpload,
    QuotaExceeded,
    TooLarge,
    UploadNotFound,
    UploadNotOpen,
    UploadOffsetMismatch,
)
from registry.peft_config import CONFIG_FILE
from registry.peft_format import WEIGHTS_FILE
from registry.service import Registry
from registry.tables import metadata
from registry.upload_rows import FileSpec
from tests.registry.factories import (
    declare,
    encode,
    make_adapter,
    make_base,
    make_config,
    make_files,
    send_part,
    sha256,
    upload_adapter,
)

A, B = "tenant-a", "tenant-b"


def make_upload_files(base, **changes):
    return make_files(make_config(), encode(make_adapter(base, **changes)))


def seeded(base, seed):
    return make_upload_files(base, seed=seed)


@pytest.fixture
def make_version(registry, database, tmp_path):
    def make(**options):
        return upload_adapter(registry, database, tmp_path, **options)

    return make


@pytest.fixture
def upload(registry, connection, base):
    return registry.create_upload(
        connection, A, "key-1", "pirate", declare(make_upload_files(base))
    )


# Names


def test_a_name_means_its_latest_version(registry, connection, make_version, base):
    make_version()
    second = make_version(files=seeded(base, 2))
    ref = registry.resolve(connection, A, "pirate")
    assert ref == second.ref
    assert ref.version == 2
    assert ref.object_key == f"tenants/{A}/{ref.digest}"


def test_an_alias_and_a_number_mean_their_version(registry, connection, make_version, base):
    first = make_version(alias="prod")
    make_version(files=seeded(base, 2))
    assert registry.resolve(connection, A, "pirate@prod") == first.ref
    assert registry.resolve(connection, A, "pirate@1") == first.ref
    assert registry.resolve(connection, A, "pirate@latest").version == 2


@pytest.mark.parametrize(
    "model",
    ["", "x", "pirate@3", "pirate@0", "pirate@01", "pirate@beta", "pirate@", "@1", "pirate@1@1"]
    + ["Pirate", "tenant-a/pirate", "pirate\0", "pirate\n", "pirate@99999999999999999999", "é"],
)
def test_what_is_not_there_is_not_found(registry, connection, make_version, model):
    make_version()
    with pytest.raises(AdapterNotFound):
        registry.resolve(connection, A, model)


def test_another_tenants_adapter_and_none_are_the_same_answer(registry, connection, make_version):
    def answer(tenant_id, model):
        with pytest.raises(AdapterNotFound) as caught:
            registry.resolve(connection, tenant_id, model)
        return str(caught.value).replace(model, "..."), caught.value.code, type(caught.value)

    make_version()
    assert answer(B, "pirate") == answer(B, "parrot") == answer(A, "parrot")
    assert answer(B, "pirate@1") == answer(B, "parrot@1")


def test_tenants_do_not_see_each_others_adapters(registry, connection, make_version):
    make_version()
    assert registry.list_adapters(connection, B) == []
    for ask in (
        lambda: registry.get_adapter(connection, B, "pirate"),
        lambda: registry.list_versions(connection, B, "pirate"),
        lambda: registry.set_alias(connection, B, "pirate", "prod", 1),
        lambda: registry.delete_adapter(connection, B, "pirate"),
    ):
        with pytest.raises(AdapterNotFound):
            ask()


def test_the_same_name_of_two_tenants_is_two_adapters(registry, connection, make_version):
    mine, theirs = make_version(), make_version(tenant_id=B)
    assert mine.adapter_id != theirs.adapter_id
    assert mine.digest == theirs.digest
    assert mine.object_key != theirs.object_key


def test_a_version_for_another_base_model_is_not_served(
    registry, connection, make_version, storage, clock, tmp_path
):
    make_version()
    newer = Registry(make_base(tmp_path / "newer", seed=5), storage, clock=clock)
    with pytest.raises(AdapterNotServable) as caught:
        newer.resolve(connection, A, "pirate")
    assert isinstance(caught.value, AdapterNotFound)
    assert newer.list_adapters(connection, A)[0].latest is not None
    with pytest.raises(AdapterNotFound) as caught:
        newer.resolve(connection, B, "pirate")
    assert not isinstance(caught.value, AdapterNotServable)


def test_the_same_bytes_for_another_base_model_are_another_version(
    registry, database, make_version, storage, clock, tmp_path
):
    first = make_version()
    base = registry.base
    newer = BaseModel(base.model_id, base.path, base.config, base.modules, "f" * 64)
    second = upload_adapter(Registry(newer, storage, clock=clock), database, tmp_path)
    assert (second.version, second.digest) == (2, first.digest)


def test_adapters_are_listed_by_name_with_latest_and_aliases(registry, connection, make_version):
    version = make_version(name="b", alias="prod")
    make_version(name="a")
    adapters = registry.list_adapters(connection, A)
    assert [adapter.name for adapter in adapters] == ["a", "b"]
    assert adapters[1].latest == version
    assert adapters[1].aliases == {"latest": 1, "prod": 1}
    assert [a.name for a in registry.list_adapters(connection, A, after="a")] == ["b"]
    assert [a.name for a in registry.list_adapters(connection, A, limit=1)] == ["a"]


def test_versions_are_listed_newest_first(registry, connection, make_version, base):
    for seed in (1, 2, 3):
        make_version(files=seeded(base, seed))
    versions = registry.list_versions(connection, A, "pirate")
    assert [version.version for version in versions] == [3, 2, 1]
    assert versions[0].passport["rank"] == 4
    assert versions[0].created_by_key == "key-1"
    below = registry.list_versions(connection, A, "pirate", before=3, limit=1)
    assert [version.version for version in below] == [2]


def test_moving_latest_back_is_a_rollback(registry, connection, make_version, base):
    first = make_version()
    make_version(files=seeded(base, 2))
    adapter = registry.set_alias(connection, A, "pirate", "latest", 1)
    assert adapter.latest == first
    assert registry.resolve(connection, A, "pirate").version == 1


@pytest.mark.parametrize("version", [0, 2, -1, 10**12])
def test_an_alias_cannot_point_at_nothing(registry, connection, make_version, version):
    make_version()
    with pytest.raises(AdapterNotFound):
        registry.set_alias(connection, A, "pirate", "prod", version)


@pytest.mark.parametrize("alias", ["", "3", "1st", "Prod", "a" * 65, "a/b", "a\n"])
def test_an_alias_that_is_no_alias_is_refused(registry, connection, make_version, alias):
    make_version()
    with pytest.raises(InvalidName):
        registry.set_alias(connection, A, "pirate", alias, 1)


def test_a_deleted_adapter_is_gone_with_its_versions_and_aliases(
    registry, connection, make_version
):
    make_version(alias="prod")
    registry.delete_adapter(connection, A, "pirate")
    assert registry.list_adapters(connection, A) == []
    for model in ("pirate", "pirate@1", "pirate@prod"):
        with pytest.raises(AdapterNotFound):
            registry.resolve(connection, A, model)
    with pytest.raises(AdapterNotFound):
        registry.delete_adapter(connection, A, "pirate")


def test_a_deleted_name_comes_back_with_the_next_number(registry, database, make_version):
    first = make_version()
    with database.begin() as conn:
        registry.delete_adapter(conn, A, "pirate")
    again = make_version()
    assert (again.adapter_id, again.version) == (first.adapter_id, 2)
    with database.begin() as conn:
        assert registry.resolve(conn, A, "pirate") == again.ref
        with pytest.raises(AdapterNotFound):
            registry.resolve(conn, A, "pirate@1")


# Declarations


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "a/b", "a@b", "a" * 65, "a\n", "é"])
def test_a_name_that_is_no_name_is_refused(registry, connection, base, name):
    with pytest.raises(InvalidName):
        registry.create_upload(connection, A, "key", name, declare(make_upload_files(base)))


def test_the_base_models_name_is_taken(registry, connection, base):
    with pytest.raises(InvalidName):
        registry.create_upload(
            connection, A, "key", base.model_id, declare(make_upload_files(base))
        )


@pytest.mark.parametrize(
    "names",
    [
        [],
        [CONFIG_FILE],
        [CONFIG_FILE, "adapter_model.bin"],
        [CONFIG_FILE, WEIGHTS_FILE, "model.py"],
        [CONFIG_FILE, "../adapter_model.safetensors"],
    ],
)
def test_only_the_two_files_of_peft_are_taken(registry, connection, names):
    with pytest.raises(InvalidUpload) as caught:
        registry.create_upload(
            connection, A, "key", "pirate", {name: FileSpec(10, "0" * 64) for name in names}
        )
    assert caught.value.code == "invalid_files"


@pytest.mark.parametrize(
    "spec", [FileSpec(0, "0" * 64), FileSpec(1, "0" * 63), FileSpec(1, "G" * 64)]
)
def test_a_declaration_needs_a_size_and_a_sha256(registry, connection, spec):
    files = {CONFIG_FILE: spec, WEIGHTS_FILE: FileSpec(1, "0" * 64)}
    with pytest.raises(InvalidUpload):
        registry.create_upload(connection, A, "key", "pirate", files)


@pytest.mark.parametrize(("config", "weights"), [(65_537, 1), (1, (2 << 30) + 1)])
def test_a_declared_size_over_the_limit_is_too_large(registry, connection, config, weights):
    files = {CONFIG_FILE: FileSpec(config, "0" * 64), WEIGHTS_FILE: FileSpec(weights, "0" * 64)}
    with pytest.raises(TooLarge):
        registry.create_upload(connection, A, "key", "pirate", files)


def create(registry, connection, name, base, **quotas):
    files = declare(make_upload_files(base))
    return registry.create_upload(connection, A, "key", name, files, **quotas)


def test_open_uploads_are_limited_until_they_expire(registry, connection, base, clock):
    for _ in range(3):
        create(registry, connection, "pirate", base)
    with pytest.raises(QuotaExceeded) as caught:
        create(registry, connection, "pirate", base)
    assert (caught.value.code, caught.value.quota) == ("quota_exceeded", "max_open_uploads")
    clock.now_s += 24 * 3600
    create(registry, connection, "pirate", base)


def test_adapters_are_limited_and_open_uploads_count(registry, connection, base, make_version):
    make_version(name="one")
    create(registry, connection, "two", base, max_adapters=2)
    with pytest.raises(QuotaExceeded) as caught:
        create(registry, connection, "three", base, max_adapters=2)
    assert caught.value.quota == "max_adapters"
    create(registry, connection, "one", base, max_adapters=2)


def test_bytes_are_limited_and_equal_objects_count_once(registry, connection, base, make_version):
    version = make_version(name="one")
    make_version(name="two")
    new_bytes = sum(len(data) for data in make_upload_files(base).values())
    limit = version.size_bytes + new_bytes
    create(registry, connection, "three", base, max_adapter_bytes_total=limit)
    with pytest.raises(QuotaExceeded) as caught:
        create(registry, connection, "three", base, max_adapter_bytes_total=limit)
    assert caught.value.quota == "max_adapter_bytes_total"


# Parts


def test_parts_are_counted_in_order(registry, connection, upload, tmp_path, base):
    data = make_upload_files(base)[WEIGHTS_FILE]
    for start in range(0, len(data), 1000):
        part = data[start : start + 1000]
        received = send_part(registry, connection, upload, WEIGHTS_FILE, start, part, tmp_path)
        assert received == start + len(part)
    found = registry.get_upload(connection, A, upload.upload_id)
    assert found.files[WEIGHTS_FILE].received_bytes == len(data)
    assert found.files[WEIGHTS_FILE].sha256 == sha256(data)


def test_the_same_part_again_changes_nothing(registry, connection, upload, tmp_path):
    for _ in range(2):
        part = b"a" * 1000
        assert send_part(registry, connection, upload, WEIGHTS_FILE, 0, part, tmp_path) == 1000
    send_part(registry, connection, upload, WEIGHTS_FILE, 1000, b"b" * 1000, tmp_path)
    assert send_part(registry, connection, upload, WEIGHTS_FILE, 0, b"a" * 1000, tmp_path) == 2000


@pytest.mark.parametrize(("start", "byte"), [(1500, b"b"), (0, b"b"), (500, b"a")])
def test_a_part_at_another_place_or_with_other_bytes_is_a_conflict(
    registry, connection, upload, tmp_path, storage, start, byte
):
    send_part(registry, connection, upload, WEIGHTS_FILE, 0, b"a" * 1000, tmp_path)
    with pytest.raises(UploadOffsetMismatch) as caught:
        send_part(registry, connection, upload, WEIGHTS_FILE, start, byte * 1000, tmp_path)
    assert caught.value.code == "upload_offset_mismatch"
    assert caught.value.received_bytes == 1000
    (key,) = storage.list("uploads/")
    assert b"".join(storage.read(key)) == b"a" * 1000


def test_more_bytes_than_declared_are_too_large(registry, connection, upload, tmp_path, storage):
    size = upload.files[CONFIG_FILE].size_bytes
    with pytest.raises(TooLarge):
        send_part(registry, connection, upload, CONFIG_FILE, 0, b"x" * (size + 1), tmp_path)
    assert list(storage.list("")) == []


@pytest.mark.parametrize("size", [0, 1, 999, 1001])
def test_a_part_that_is_not_the_last_has_the_full_size(
    registry, connection, upload, tmp_path, storage, size
):
    with pytest.raises((InvalidUpload, TooLarge)):
        send_part(registry, connection, upload, WEIGHTS_FILE, 0, b"x" * size, tmp_path)
    assert list(storage.list("")) == []


def test_a_total_other_than_declared_is_refused(registry, connection, upload, tmp_path):
    with pytest.raises(InvalidUpload) as caught:
        send_part(registry, connection, upload, WEIGHTS_FILE, 0, b"x" * 1000, tmp_path, total=7000)
    assert caught.value.code == "size_mismatch"


@pytest.mark.parametrize("filename", ["adapter_model.bin", "../../x", ""])
def test_a_file_that_was_not_declared_is_refused(
    registry, connection, upload, tmp_path, storage, filename
):
    with pytest.raises(InvalidUpload) as caught:
        send_part(registry, connection, upload, filename, 0, b"x", tmp_path, total=1)
    assert caught.value.code == "unknown_file"
    assert list(storage.list("")) == []


def test_another_tenants_upload_is_not_found(registry, connection, upload):
    with pytest.raises(UploadNotFound):
        registry.get_upload(connection, B, upload.upload_id)


@pytest.mark.parametrize("upload_id", ["", "up_", "up_\0", "up_" + "0" * 32, "x" * 1000])
def test_an_upload_that_is_not_there_is_not_found(registry, connection, upload_id):
    with pytest.raises(UploadNotFound):
        registry.get_upload(connection, A, upload_id)


def test_an_expired_upload_takes_no_parts(registry, connection, upload, tmp_path, clock, storage):
    clock.now_s += 24 * 3600
    assert registry.get_upload(connection, A, upload.upload_id).state == "expired"
    with pytest.raises(UploadNotOpen):
        send_part(registry, connection, upload, WEIGHTS_FILE, 0, b"a" * 1000, tmp_path)
    assert list(storage.list("")) == []


def test_a_part_that_arrives_as_the_upload_ends_is_taken_back(
    base, database, clock, tmp_path, storage
):
    class EndingStorage:
        """Another gateway expires the upload while our part is on its way to the store."""

        def __getattr__(self, name):
            return getattr(storage, name)

        def put(self, key, path):
            storage.put(key, path)
            clock.now_s += 24 * 3600
            with database.begin() as conn:
                registry.expire_uploads(conn)

    registry = Registry(base, EndingStorage(), clock=clock)
    with database.begin() as conn:
        upload = create(registry, conn, "pirate", base)
    config = make_config()
    with database.connect() as conn, pytest.raises(UploadNotOpen):
        send_part(registry, conn, upload, CONFIG_FILE, 0, config, tmp_path)
    assert list(storage.list("")) == []


def test_two_senders_of_one_part_are_both_right(base, database, clock, tmp_path, storage):
    class RacingStorage:
        """Another gateway takes the same part while ours is on its way to the store."""

        def __getattr__(self, name):
            return getattr(storage, name)

        def put(self, key, path):
            storage.put(key, path)
            with database.begin() as conn:
                send_part(
                    faster, conn, upload, CONFIG_FILE, 0, make_config(), path.parent / "other"
                )

    faster = Registry(base, storage, clock=clock)
    (tmp_path / "other").mkdir()
    with database.begin() as conn:
        upload = create(faster, conn, "pirate", base)
    with database.connect() as conn:
        slower = Registry(base, RacingStorage(), clock=clock)
        received = send_part(slower, conn, upload, CONFIG_FILE, 0, make_config(), tmp_path)
    assert received == len(make_config())


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
