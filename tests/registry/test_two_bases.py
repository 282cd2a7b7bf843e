"""One registry for two base models: an upload becomes a version for one of them."""

from dataclasses import replace

import pytest

from registry.base.base_models import BaseModels
from registry.catalog.catalog import Catalog
from registry.errors import InvalidAdapter
from registry.uploads.rows import FAILED
from tests.refusals import refused
from tests.registry.factories import (
    encode,
    make_adapter,
    make_base,
    make_config,
    make_files,
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


def test_the_configs_name_decides_between_equal_shapes(
    uploads, database, base, other, publish_upload
):
    for served in (base, other):
        files = files_for(served, base_model_name_or_path=f"org/{served.model_id}")
        version = publish_upload(files, name=served.model_id[5:])
        assert version.base_revision == served.base_revision
        with database.begin() as conn:
            assert uploads.catalog.resolve(conn, A, served.model_id[5:]) == version


def test_an_upload_of_unclear_base_fails_and_says_what_to_name(uploads, base, open_upload):
    upload = open_upload(files_for(base))
    with pytest.raises(InvalidAdapter, match="tiny-llama, tiny-other"):
        uploads.build(upload)
    ended = uploads.get(upload)
    assert (ended.state, ended.error_code) == (FAILED, "base_model_unclear")
    assert ended.error_param == "base_model"


def test_the_same_files_for_two_bases_are_two_versions_of_one_name(
    uploads, database, base, other, publish_upload
):
    versions = [
        publish_upload(files_for(base), base_model=served.model_id) for served in (base, other)
    ]
    assert [version.version for version in versions] == [1, 2]
    assert len({version.digest for version in versions}) == 1
    assert [v.base_revision for v in versions] == [base.base_revision, other.base_revision]
    files = files_for(base)
    with database.begin() as conn:
        for version, served in zip(versions, (base, other), strict=True):
            name = served.model_id
            known = uploads.find_known(conn, files, base_model=name)
            assert known == version
            assert uploads.catalog.resolve(conn, A, f"pirate@{version.version}") == version
            again = uploads.open(files, conn, base_model=name, known=known)
            assert (again.state, again.version, again.base_model) == (
                "complete", version.version, name,
            )  # fmt: skip
        assert uploads.find_known(conn, files) == versions[1], "the newest"


def test_a_base_model_that_is_not_served_cannot_be_named(uploads, database, base):
    files = files_for(base)
    with database.begin() as conn:
        for begin in (
            lambda: uploads.open(files, conn, base_model="gone"),
            lambda: uploads.open(files, conn, name=None, base_model="gone"),
            lambda: uploads.find_known(conn, files, base_model="gone"),
        ):
            with refused("unknown_base_model", match="tiny-llama, tiny-other") as caught:
                begin()
            assert caught.value.param == "base_model"


def test_an_upload_whose_named_base_goes_meanwhile_fails(uploads, base, other, open_upload):
    upload = open_upload(files_for(base), base_model="tiny-other")
    uploads.catalog.bases.replace(base)
    with refused("unknown_base_model"):
        uploads.build(upload)
    assert uploads.get(upload).error_code == "unknown_base_model"


def test_a_dry_run_is_checked_against_the_base_that_it_names(uploads, base, deep, open_upload):
    uploads.catalog.bases.replace(base, deep)
    upload = open_upload(files_for(base), name=None, base_model="tiny-deep")
    with refused("target_mismatch"):  # it has no tensors for the third layer
        uploads.build(upload)


def test_a_version_whose_base_is_not_served_is_refused_with_those_that_are(
    uploads, database, base, other, deep, publish_upload
):
    publish_upload(files_for(base), base_model="tiny-other")
    with database.begin() as conn:
        uploads.catalog.bases.replace(base, deep)
        with refused("model_not_servable", match="tiny-llama, tiny-deep"):
            uploads.catalog.resolve(conn, A, "pirate")
        uploads.catalog.bases.replace(base, deep, other)
        assert uploads.catalog.resolve(conn, A, "pirate").version == 1


def test_no_adapter_gets_the_name_of_any_base_model(uploads, database, base):
    with database.begin() as conn:
        for name in ("tiny-llama", "tiny-other"):
            with refused("invalid_name"):
                uploads.open(files_for(base), conn, name=name)


def test_equal_weights_with_another_template_are_another_base(
    uploads, database, base, publish_upload
):
    twin = replace(base, model_id="twin", served_as="another template")
    uploads.catalog.bases.replace(base, twin)
    for number, served in enumerate((twin, base), 1):
        version = publish_upload(files_for(base), base_model=served.model_id)
        assert (version.version, version.base_model) == (number, served.model_id)
        assert version.base_revision == base.base_revision
        assert uploads.catalog.bases.serving(version.base) is served
    files = files_for(base)
    with database.begin() as conn:
        for number, served in enumerate((twin, base), 1):
            known = uploads.find_known(conn, files, base_model=served.model_id)
            assert known.version == number
        uploads.catalog.bases.replace(base)
        with refused("model_not_servable", match="Its weights are served as tiny-llama, with"):
            uploads.catalog.resolve(conn, A, "pirate@1")
        proving = uploads.prove_again(conn, 1)
        assert proving.built.base_model == "tiny-llama"
        assert proving.built.base_variant == base.variant
        with refused("already_proved"):
            uploads.prove_again(conn, 2)
        uploads.catalog.bases.replace(replace(twin, model_id="renamed"))
        assert uploads.catalog.resolve(conn, A, "pirate@1").version == 1
        with refused("model_not_servable"):
            uploads.catalog.resolve(conn, A, "pirate@2")


def test_a_version_is_proved_on_the_other_base_or_on_the_named_one(
    uploads, database, base, other, deep, publish_upload
):
    publish_upload(files_for(base), base_model="tiny-llama")
    with database.begin() as conn:
        proving = uploads.prove_again(conn, 1)
        assert proving.built.base_revision == other.base_revision
        with refused("already_proved"):
            uploads.prove_again(conn, 1, base_model="tiny-llama")
        with refused("unknown_base_model"):
            uploads.prove_again(conn, 1, base_model="tiny-deep")
        uploads.catalog.bases.replace(base, other, deep)
        with refused("base_model_unclear", match="tiny-other, tiny-deep", param="base_model"):
            uploads.prove_again(conn, 1)
        proving = uploads.prove_again(conn, 1, base_model="tiny-deep")
        assert proving.built.base_revision == deep.base_revision
        assert proving.base_model == "tiny-deep"
