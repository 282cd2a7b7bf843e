"""A version for another base model becomes one for this model: its object is proved again."""

from dataclasses import replace

import pytest

from registry.base.base_models import BaseModels
from registry.catalog.catalog import Catalog
from registry.errors import Invalid, QuotaExceeded
from registry.formats.own_tokenizer import CHAT_TEMPLATE
from registry.uploads.proof import Proof
from tests.refusals import refused
from tests.registry.factories import keys, sound_files

# Other tests run the same statements on PostgreSQL.
pytestmark = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

A = "tenant-a"


@pytest.fixture
def version(publish_upload):
    return publish_upload()


@pytest.fixture
def newer(uploads, version, clock):
    """Uploads on the same store and database, but for another base model."""
    base = replace(next(iter(uploads.catalog.bases)), model_id="newer", base_revision="f" * 64)
    return replace(uploads, catalog=Catalog(BaseModels(base), clock))


def test_the_same_object_is_the_next_version_once_it_is_proved(newer, connection, version):
    with refused("model_not_servable", match="prove pirate 1 --base-model newer"):
        newer.catalog.resolve(connection, A, "pirate")
    with newer.begin() as conn:
        upload = newer.prove_again(conn, 1, alias="prod")
    assert (upload.state, upload.files) == ("proving", {})
    assert upload.built.passport["canary"] is None, "the old base's figures do not count"
    [claimed] = newer.claim()
    assert claimed == upload
    proved = newer.version_of(newer.finish(claimed, Proof(verdict="passed", max_effect=0.5)))
    assert (proved.version, proved.digest) == (2, version.digest)
    assert proved.base_revision == "f" * 64
    assert proved.passport["canary"]["max_effect"] == 0.5
    with newer.begin() as conn:
        assert newer.catalog.resolve(conn, A, "pirate@prod") == proved
        [first] = newer.catalog.list_versions(conn, A, "pirate", before=2)
    assert first == version, "the old version is unchanged"


def test_one_that_fails_on_the_new_base_stays_what_it_is(newer, connection, version):
    with newer.begin() as conn:
        upload = newer.prove_again(conn, 1)
    failed = newer.finish(upload, Proof(verdict="not_served", message="Other shapes."))
    assert (failed.state, failed.error_code, failed.error) == (
        "failed", "not_served", "Other shapes.",
    )  # fmt: skip
    assert newer.catalog.list_versions(connection, A, "pirate") == [version]


def test_the_object_of_one_that_waits_is_not_swept(newer, version, storage, clock):
    with newer.begin() as conn:
        newer.prove_again(conn, 1)
        newer.catalog.delete_adapter(conn, A, "pirate")
        clock.now_s += newer.catalog.retention_s
        newer.catalog.purge_deleted(conn)
    newer.limits = replace(newer.limits, proof_ttl_s=10**9, orphan_grace_s=-(10**9))
    assert newer.sweep_objects() == 0
    assert keys(storage) == [version.object_key]


@pytest.mark.parametrize("number", [0, 2, -1, 10**12])
def test_there_must_be_such_a_version(newer, connection, number):
    with refused("model_not_found"):
        newer.prove_again(connection, number)


def test_a_tokenizer_of_its_own_is_compared_with_the_new_bases_first(
    newer, connection, base, publish_upload
):
    publish_upload(sound_files(base) | {CHAT_TEMPLATE: b"x"})
    with pytest.raises(Invalid, match="upload its files again"):
        newer.prove_again(connection, 2)


def test_it_counts_as_an_upload(newer, connection):
    for _ in range(newer.limits.max_open_uploads):
        newer.prove_again(connection, 1)
    with pytest.raises(QuotaExceeded):
        newer.prove_again(connection, 1)
