"""A version for another base model becomes one for this model: its object is proved again."""

from dataclasses import replace

import pytest

from registry.base_models import BaseModels
from registry.catalog import Catalog
from registry.errors import (
    AdapterNotFound,
    AdapterNotServable,
    InvalidUpload,
    QuotaExceeded,
)
from registry.own_tokenizer import CHAT_TEMPLATE
from registry.proof import Proof
from registry.sweep import sweep_objects, sweep_uploads
from registry.upload_proof import claim_proofs, finish_proof, prove_again
from registry.uploads import Uploads
from registry.work_dir import WorkDir
from tests.registry.factories import (
    keys,
    sound_files,
    upload_adapter,
)

# Other tests run the same statements on PostgreSQL.
pytestmark = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

A = "tenant-a"


@pytest.fixture
def version(uploads, database, tmp_path):
    return upload_adapter(uploads, database, tmp_path)


@pytest.fixture
def newer(uploads, version, storage, clock, tmp_path):
    """Uploads on the same store and database, but for another base model."""
    base = replace(next(iter(uploads.catalog.bases)), model_id="newer", base_revision="f" * 64)
    catalog = Catalog(BaseModels(base), clock)
    return Uploads(catalog, storage, uploads.limits, clock, WorkDir(tmp_path / "work"))


def test_the_same_object_is_the_next_version_once_it_is_proved(newer, database, version):
    with database.begin() as conn:
        with pytest.raises(AdapterNotServable, match="prove pirate 1 --base-model newer"):
            newer.catalog.resolve(conn, A, "pirate")
        upload = prove_again(newer, conn, A, "key-2", "pirate", 1, "prod")
        assert (upload.state, upload.files) == ("proving", {})
        assert upload.built["passport"]["canary"] is None, "the old base's figures do not count"
        [claimed] = claim_proofs(newer, conn, limit=8, claim_s=1)
        assert claimed == upload
        done = finish_proof(
            newer, conn, claimed, Proof(verdict="passed", max_effect=0.5), retry_s=1
        )
        proved = newer.get_version(conn, done)
        assert (proved.version, proved.digest) == (2, version.digest)
        assert proved.base_revision == "f" * 64
        assert proved.passport["canary"]["max_effect"] == 0.5
        assert newer.catalog.resolve(conn, A, "pirate@prod") == proved.ref
        [first] = newer.catalog.list_versions(conn, A, "pirate", before=2)
        assert first == version, "the old version is unchanged"


def test_one_that_fails_on_the_new_base_stays_what_it_is(newer, database, version):
    with database.begin() as conn:
        upload = prove_again(newer, conn, A, "key-2", "pirate", 1)
        failed = finish_proof(
            newer, conn, upload, Proof(verdict="not_served", message="Other shapes."), retry_s=1
        )
        assert (failed.state, failed.error_code, failed.error) == (
            "failed", "not_served", "Other shapes.",
        )  # fmt: skip
        assert newer.catalog.list_versions(conn, A, "pirate") == [version]


def test_the_object_of_one_that_waits_is_not_swept(newer, database, version, storage, clock):
    with database.begin() as conn:
        prove_again(newer, conn, A, "key-2", "pirate", 1)
        newer.catalog.delete_adapter(conn, A, "pirate")
        clock.now_s += newer.catalog.retention_s
        newer.catalog.purge_deleted(conn)
    newer.limits = replace(newer.limits, proof_ttl_s=10**9, orphan_grace_s=-(10**9))
    assert sweep_objects(newer, database.begin) == 0
    assert keys(storage) == [version.object_key]
    assert sweep_uploads(newer, database.begin) >= 0


@pytest.mark.parametrize("number", [0, 2, -1, 10**12])
def test_there_must_be_such_a_version(newer, database, version, number):
    with database.begin() as conn, pytest.raises(AdapterNotFound):
        prove_again(newer, conn, A, "key-1", "pirate", number)


def test_a_tokenizer_of_its_own_is_compared_with_the_new_bases_first(
    uploads, newer, database, base, tmp_path
):
    files = sound_files(base) | {CHAT_TEMPLATE: b"x"}
    upload_adapter(uploads, database, tmp_path, files=files)
    with database.begin() as conn, pytest.raises(InvalidUpload, match="upload its files again"):
        prove_again(newer, conn, A, "key-2", "pirate", 2)


def test_it_counts_as_an_upload(newer, database, version):
    with database.begin() as conn:
        for _ in range(newer.limits.max_open_uploads):
            prove_again(newer, conn, A, "key-1", "pirate", 1)
        with pytest.raises(QuotaExceeded):
            prove_again(newer, conn, A, "key-1", "pirate", 1)
