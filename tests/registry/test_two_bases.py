"""One registry for two base models: an upload becomes a version for one of them."""

from dataclasses import replace

import pytest

from registry.base_models import BaseModels
from registry.catalog import Catalog
from registry.errors import (
    AdapterNotServable,
    AlreadyProved,
    InvalidAdapter,
    InvalidName,
    InvalidUpload,
    UnknownBaseModel,
)
from registry.upload_build import build_upload
from registry.upload_proof import prove_again
from registry.upload_rows import FAILED
from tests.registry.factories import (
    declare,
    encode,
    make_adapter,
    make_base,
    make_config,
    make_files,
    send_all,
    upload_adapter,
)

# Other tests run the same statements on PostgreSQL.
pytestmark = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

A = "tenant-a"


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A base model of the same shapes as `base`."""
    return make_base(tmp_path_factory.mktemp("other") / "other-model", "tiny-other", seed=5)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A base model with more layers."""
    return make_base(tmp_path_factory.mktemp("deep") / "deep-model", "tiny-deep", num_layers=3)


@pytest.fixture
def catalog(base, other, clock):
    return Catalog(BaseModels(base, other), clock)


def files_for(base, **config):
    return make_files(make_config(**config), encode(make_adapter(base)))


def create(uploads, database, files, folder, **options):
    with database.begin() as conn:
        upload = uploads.create_upload(conn, A, "key-1", "pirate", declare(files), **options)
        send_all(uploads, conn, upload, files, folder)
    return upload


def test_the_configs_name_decides_between_equal_shapes(uploads, database, base, other, tmp_path):
    for served in (base, other):
        files = files_for(served, base_model_name_or_path=f"org/{served.model_id}")
        version = upload_adapter(uploads, database, tmp_path, files=files, name=served.model_id[5:])
        assert version.base_revision == served.base_revision
        with database.begin() as conn:
            assert uploads.catalog.resolve(conn, A, served.model_id[5:]) == version.ref


def test_an_upload_of_unclear_base_fails_and_says_what_to_name(uploads, database, base, tmp_path):
    upload = create(uploads, database, files_for(base), tmp_path)
    with pytest.raises(InvalidAdapter, match="tiny-llama, tiny-other"):
        build_upload(uploads, database.begin, A, upload.upload_id)
    with database.begin() as conn:
        ended = uploads.get_upload(conn, A, upload.upload_id)
    assert (ended.state, ended.error_code) == (FAILED, "base_model_unclear")
    assert ended.error_param == "base_model"


def test_the_same_files_for_two_bases_are_two_versions_of_one_name(
    uploads, database, base, other, tmp_path
):
    versions = [
        upload_adapter(
            uploads, database, tmp_path, files=files_for(base), base_model=served.model_id
        )
        for served in (base, other)
    ]
    assert [version.version for version in versions] == [1, 2]
    assert len({version.digest for version in versions}) == 1
    assert [v.base_revision for v in versions] == [base.base_revision, other.base_revision]
    specs = declare(files_for(base))
    with database.begin() as conn:
        for version, served in zip(versions, (base, other), strict=True):
            name = served.model_id
            known = uploads.find_known(conn, A, "pirate", specs, base_model=name)
            assert known == version
            assert uploads.catalog.resolve(conn, A, f"pirate@{version.version}") == version.ref
            again = uploads.create_upload(
                conn, A, "key-1", "pirate", specs, base_model=name, known=known
            )
            assert (again.state, again.version, again.base_model) == (
                "complete", version.version, name,
            )  # fmt: skip
        assert uploads.find_known(conn, A, "pirate", specs) == versions[1], "the newest"


def test_a_base_model_that_is_not_served_cannot_be_named(uploads, database, base, tmp_path):
    files = declare(files_for(base))
    with database.begin() as conn:
        for begin in (
            lambda: uploads.create_upload(conn, A, "key", "pirate", files, base_model="gone"),
            lambda: uploads.create_dry_run(conn, A, "key", files, base_model="gone"),
            lambda: uploads.find_known(conn, A, "pirate", files, base_model="gone"),
        ):
            with pytest.raises(UnknownBaseModel, match="tiny-llama, tiny-other") as caught:
                begin()
            assert caught.value.param == "base_model"


def test_an_upload_whose_named_base_goes_meanwhile_fails(uploads, database, base, other, tmp_path):
    upload = create(uploads, database, files_for(base), tmp_path, base_model="tiny-other")
    uploads.catalog.bases.replace(base)
    with pytest.raises(UnknownBaseModel):
        build_upload(uploads, database.begin, A, upload.upload_id)
    with database.begin() as conn:
        assert uploads.get_upload(conn, A, upload.upload_id).error_code == "unknown_base_model"


def test_a_dry_run_is_checked_against_the_base_that_it_names(
    uploads, database, base, deep, tmp_path
):
    uploads.catalog.bases.replace(base, deep)
    files = files_for(base)
    with database.begin() as conn:
        upload = uploads.create_dry_run(conn, A, "key", declare(files), base_model="tiny-deep")
        send_all(uploads, conn, upload, files, tmp_path)
    with pytest.raises(InvalidAdapter) as caught:
        build_upload(uploads, database.begin, A, upload.upload_id)
    assert caught.value.code == "target_mismatch", "it has no tensors for the third layer"


def test_a_version_whose_base_is_not_served_is_refused_with_those_that_are(
    uploads, database, base, other, deep, tmp_path
):
    upload_adapter(uploads, database, tmp_path, files=files_for(base), base_model="tiny-other")
    with database.begin() as conn:
        uploads.catalog.bases.replace(base, deep)
        with pytest.raises(AdapterNotServable, match="tiny-llama, tiny-deep"):
            uploads.catalog.resolve(conn, A, "pirate")
        uploads.catalog.bases.replace(base, deep, other)
        assert uploads.catalog.resolve(conn, A, "pirate").version == 1


def test_no_adapter_gets_the_name_of_any_base_model(uploads, database, base):
    with database.begin() as conn:
        for name in ("tiny-llama", "tiny-other"):
            with pytest.raises(InvalidName):
                uploads.create_upload(conn, A, "key", name, declare(files_for(base)))


def test_equal_weights_with_another_template_are_another_base(uploads, database, base, tmp_path):
    twin = replace(base, model_id="twin", served_as="another template")
    uploads.catalog.bases.replace(base, twin)
    for number, served in enumerate((twin, base), 1):
        version = upload_adapter(
            uploads, database, tmp_path, files=files_for(base), base_model=served.model_id
        )
        assert (version.version, version.base_model) == (number, served.model_id)
        assert version.base_revision == base.base_revision
        assert uploads.catalog.bases.serving(version.base) is served
    specs = declare(files_for(base))
    with database.begin() as conn:
        for number, served in enumerate((twin, base), 1):
            known = uploads.find_known(conn, A, "pirate", specs, base_model=served.model_id)
            assert known.version == number
        uploads.catalog.bases.replace(base)
        with pytest.raises(AdapterNotServable, match="Its weights are served as tiny-llama, with"):
            uploads.catalog.resolve(conn, A, "pirate@1")
        proving = prove_again(uploads, conn, A, "key", "pirate", 1)
        assert proving.built["base_model"] == "tiny-llama"
        assert proving.built["base_variant"] == base.variant
        with pytest.raises(AlreadyProved):
            prove_again(uploads, conn, A, "key", "pirate", 2)
        uploads.catalog.bases.replace(replace(twin, model_id="renamed"))
        assert uploads.catalog.resolve(conn, A, "pirate@1").version == 1
        with pytest.raises(AdapterNotServable):
            uploads.catalog.resolve(conn, A, "pirate@2")


def test_a_version_is_proved_on_the_other_base_or_on_the_named_one(
    uploads, database, base, other, deep, tmp_path
):
    upload_adapter(uploads, database, tmp_path, files=files_for(base), base_model="tiny-llama")
    with database.begin() as conn:
        proving = prove_again(uploads, conn, A, "key", "pirate", 1)
        assert proving.built["base_revision"] == other.base_revision
        with pytest.raises(AlreadyProved):
            prove_again(uploads, conn, A, "key", "pirate", 1, base_model="tiny-llama")
        with pytest.raises(UnknownBaseModel):
            prove_again(uploads, conn, A, "key", "pirate", 1, base_model="tiny-deep")
        uploads.catalog.bases.replace(base, other, deep)
        with pytest.raises(InvalidUpload, match="tiny-other, tiny-deep") as caught:
            prove_again(uploads, conn, A, "key", "pirate", 1)
        assert (caught.value.code, caught.value.param) == ("base_model_unclear", "base_model")
        proving = prove_again(uploads, conn, A, "key", "pirate", 1, base_model="tiny-deep")
        assert proving.built["base_revision"] == deep.base_revision
        assert proving.base_model == "tiny-deep"
