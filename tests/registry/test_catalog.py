import pytest

from registry.alias_rows import Target
from registry.base_model import BaseModel
from registry.catalog import Catalog
from registry.errors import (
    AdapterNotFound,
    AdapterNotServable,
    InvalidName,
)
from registry.uploads import Uploads
from tests.registry.factories import (
    encode,
    make_adapter,
    make_base,
    make_config,
    make_files,
    upload_adapter,
)

A, B = "tenant-a", "tenant-b"


def seeded(base, seed):
    return make_files(make_config(), encode(make_adapter(base, seed=seed)))


@pytest.fixture
def make_version(uploads, database, tmp_path):
    def make(**options):
        return upload_adapter(uploads, database, tmp_path, **options)

    return make


def test_a_name_means_its_latest_version(catalog, connection, make_version, base):
    make_version()
    second = make_version(files=seeded(base, 2))
    ref = catalog.resolve(connection, A, "pirate")
    assert ref == second.ref
    assert ref.version == 2
    assert ref.object_key == f"tenants/{A}/{ref.digest}"


def test_an_alias_and_a_number_mean_their_version(catalog, connection, make_version, base):
    first = make_version(alias="prod")
    make_version(files=seeded(base, 2))
    assert catalog.resolve(connection, A, "pirate@prod") == first.ref
    assert catalog.resolve(connection, A, "pirate@1") == first.ref
    assert catalog.resolve(connection, A, "pirate@latest").version == 2


@pytest.mark.parametrize(
    "model",
    ["", "x", "pirate@3", "pirate@0", "pirate@01", "pirate@beta", "pirate@", "@1", "pirate@1@1"]
    + ["Pirate", "tenant-a/pirate", "pirate\0", "pirate\n", "pirate@99999999999999999999", "é"],
)
def test_what_is_not_there_is_not_found(catalog, connection, make_version, model):
    make_version()
    with pytest.raises(AdapterNotFound):
        catalog.resolve(connection, A, model)


def test_another_tenants_adapter_and_none_are_the_same_answer(catalog, connection, make_version):
    def answer(tenant_id, model):
        with pytest.raises(AdapterNotFound) as caught:
            catalog.resolve(connection, tenant_id, model)
        return str(caught.value).replace(model, "..."), caught.value.code, type(caught.value)

    make_version()
    assert answer(B, "pirate") == answer(B, "parrot") == answer(A, "parrot")
    assert answer(B, "pirate@1") == answer(B, "parrot@1")


def test_tenants_do_not_see_each_others_adapters(catalog, connection, make_version):
    make_version()
    assert catalog.list_adapters(connection, B) == []
    for ask in (
        lambda: catalog.get_adapter(connection, B, "pirate"),
        lambda: catalog.list_versions(connection, B, "pirate"),
        lambda: catalog.set_alias(connection, B, "pirate", "prod", 1),
        lambda: catalog.delete_adapter(connection, B, "pirate"),
    ):
        with pytest.raises(AdapterNotFound):
            ask()


def test_the_same_name_of_two_tenants_is_two_adapters(connection, make_version):
    mine, theirs = make_version(), make_version(tenant_id=B)
    assert mine.adapter_id != theirs.adapter_id
    assert mine.digest == theirs.digest
    assert mine.object_key != theirs.object_key


def test_a_version_for_another_base_model_is_not_served(
    connection, make_version, storage, clock, tmp_path
):
    make_version()
    newer = Catalog(make_base(tmp_path / "newer", seed=5), clock)
    with pytest.raises(AdapterNotServable) as caught:
        newer.resolve(connection, A, "pirate")
    assert isinstance(caught.value, AdapterNotFound)
    assert newer.list_adapters(connection, A)[0].latest is not None
    with pytest.raises(AdapterNotFound) as caught:
        newer.resolve(connection, B, "pirate")
    assert not isinstance(caught.value, AdapterNotServable)


def test_the_same_bytes_for_another_base_model_are_another_version(
    catalog, uploads, database, make_version, storage, clock, tmp_path
):
    first = make_version()
    base = uploads.catalog.base
    newer = BaseModel(base.model_id, base.path, base.config, base.modules, "f" * 64)
    second = upload_adapter(
        Uploads(Catalog(newer, clock), storage, clock=clock), database, tmp_path
    )
    assert (second.version, second.digest) == (2, first.digest)


def test_adapters_are_listed_by_name_with_latest_and_aliases(catalog, connection, make_version):
    version = make_version(name="b", alias="prod")
    make_version(name="a")
    adapters = catalog.list_adapters(connection, A)
    assert [adapter.name for adapter in adapters] == ["a", "b"]
    assert adapters[1].latest == version
    assert adapters[1].aliases == {"latest": Target(1), "prod": Target(1)}
    assert [a.name for a in catalog.list_adapters(connection, A, after="a")] == ["b"]
    assert [a.name for a in catalog.list_adapters(connection, A, limit=1)] == ["a"]


def test_versions_are_listed_newest_first(catalog, connection, make_version, base):
    for seed in (1, 2, 3):
        make_version(files=seeded(base, seed))
    versions = catalog.list_versions(connection, A, "pirate")
    assert [version.version for version in versions] == [3, 2, 1]
    assert versions[0].passport["rank"] == 4
    assert versions[0].created_by_key == "key-1"
    below = catalog.list_versions(connection, A, "pirate", before=3, limit=1)
    assert [version.version for version in below] == [2]


def test_moving_latest_back_is_a_rollback(catalog, connection, make_version, base):
    first = make_version()
    make_version(files=seeded(base, 2))
    adapter = catalog.set_alias(connection, A, "pirate", "latest", 1)
    assert adapter.latest == first
    assert catalog.resolve(connection, A, "pirate").version == 1


@pytest.mark.parametrize("version", [0, 2, -1, 10**12])
def test_an_alias_cannot_point_at_nothing(catalog, connection, make_version, version):
    make_version()
    with pytest.raises(AdapterNotFound):
        catalog.set_alias(connection, A, "pirate", "prod", version)


@pytest.mark.parametrize("alias", ["", "3", "1st", "Prod", "a" * 65, "a/b", "a\n"])
def test_an_alias_that_is_no_alias_is_refused(catalog, connection, make_version, alias):
    make_version()
    with pytest.raises(InvalidName):
        catalog.set_alias(connection, A, "pirate", alias, 1)


def test_a_deleted_adapter_is_gone_with_its_versions_and_aliases(catalog, connection, make_version):
    make_version(alias="prod")
    catalog.delete_adapter(connection, A, "pirate")
    assert catalog.list_adapters(connection, A) == []
    for model in ("pirate", "pirate@1", "pirate@prod"):
        with pytest.raises(AdapterNotFound):
            catalog.resolve(connection, A, model)
    with pytest.raises(AdapterNotFound):
        catalog.delete_adapter(connection, A, "pirate")


def test_a_deleted_name_comes_back_with_the_next_number(catalog, database, make_version):
    first = make_version()
    with database.begin() as conn:
        catalog.delete_adapter(conn, A, "pirate")
    again = make_version()
    assert (again.adapter_id, again.version) == (first.adapter_id, 2)
    with database.begin() as conn:
        assert catalog.resolve(conn, A, "pirate") == again.ref
        with pytest.raises(AdapterNotFound):
            catalog.resolve(conn, A, "pirate@1")
