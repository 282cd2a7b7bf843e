"""Checked uploads until their end: the effect of a verdict, and claims on proving an upload."""

import pytest

from registry import upload_proof
from registry.errors import (
    InvalidAdapter,
    QuotaExceeded,
    StorageError,
    UploadNotOpen,
)
from registry.proof import Proof
from registry.upload_build import build_upload
from registry.upload_proof import claim_proofs, finish_proof, renew_claim
from tests.registry.factories import (
    ActingStorage,
    complete_and_prove,
    keys,
)

A = "tenant-a"
PASSED = Proof(verdict="passed", max_effect=2.5, num_tokens=64, device_bytes=4096)


@pytest.fixture
def make_proving(uploads, database, open_upload):
    def make(**options):
        upload = open_upload(**options)
        return build_upload(uploads, database.begin, A, upload.upload_id)

    return make


def finish(uploads, database, upload, proof=PASSED):
    with database.begin() as conn:
        return finish_proof(uploads, conn, upload, proof, retry_s=5)


def claim(uploads, database, limit=9):
    with database.begin() as conn:
        return [u.upload_id for u in claim_proofs(uploads, conn, limit=limit, claim_s=10)]


def test_there_is_no_version_before_the_proof(uploads, catalog, database, make_proving, storage):
    upload = make_proving()
    assert upload.state == "proving"
    with database.begin() as conn:
        assert catalog.list_adapters(conn, A) == []
    assert keys(storage) == [upload.built["object_key"]], "the parts are gone, the object is there"


def test_an_adapter_that_passed_is_a_version_with_the_proof_in_its_passport(
    uploads, catalog, database, make_proving
):
    upload = finish(uploads, database, make_proving(alias="prod"))
    with database.begin() as conn:
        version = uploads.get_version(conn, upload)
        assert catalog.resolve(conn, A, "pirate@prod") == version.ref
    assert upload.state == "complete"
    assert upload.built["passport"] == version.passport
    canary = version.passport["canary"]
    assert (canary["passed"], canary["max_effect"], canary["device_bytes"]) == (True, 2.5, 4096)
    assert not {"verdict", "message"} & canary.keys()


@pytest.mark.parametrize("verdict", ["not_finite", "no_effect", "mismatch", "not_served"])
def test_an_adapter_that_did_not_pass_is_no_version_and_its_report_is_kept(
    uploads, catalog, database, make_proving, verdict
):
    proof = Proof(verdict=verdict, message="Because.", max_difference=3.0)
    upload = finish(uploads, database, make_proving(), proof)
    assert (upload.state, upload.error_code, upload.error) == ("failed", verdict, "Because.")
    canary = upload.built["passport"]["canary"]
    assert (canary["passed"], canary["max_difference"]) == (False, 3.0)
    with pytest.raises(InvalidAdapter) as caught:
        build_upload(uploads, database.begin, A, upload.upload_id)
    assert caught.value.code == verdict
    with database.begin() as conn:
        assert catalog.list_adapters(conn, A) == []


def test_the_object_of_a_version_of_this_adapter_needs_no_second_proof(
    uploads, catalog, database, make_proving, open_upload
):
    # Both are created before either is proved, so their files are not known from a version.
    first, second = open_upload(), open_upload(alias="prod")
    version = complete_and_prove(uploads, database, first)
    assert make_proving(seed=2).state == "proving"
    same = build_upload(uploads, database.begin, A, second.upload_id)
    assert (same.state, same.version) == ("complete", version.version)
    with database.begin() as conn:
        assert catalog.resolve(conn, A, "pirate@prod") == version.ref


def test_an_object_that_is_gone_when_the_row_is_to_mean_it_leaves_the_upload_open(
    uploads, database, open_upload, storage
):
    upload = open_upload()

    def forget():
        for key in keys(storage, "tenants/"):
            storage.delete(key)

    uploads.storage = ActingStorage(storage, after="put", act=forget)
    with pytest.raises(StorageError):
        build_upload(uploads, database.begin, A, upload.upload_id)
    uploads.storage = storage
    assert complete_and_prove(uploads, database, upload).version == 1


def test_a_quota_reached_while_it_waited_ends_the_upload(
    uploads, catalog, database, make_proving, monkeypatch
):
    upload = make_proving()
    publish = uploads.publish

    def publish_and_refuse(conn, *arguments):
        publish(conn, *arguments)
        raise QuotaExceeded(quota="max_aliases", limit=1, remedy="delete one")

    monkeypatch.setattr(uploads, "publish", publish_and_refuse)
    upload = finish(uploads, database, upload)
    assert (upload.state, upload.error_code) == ("failed", "quota_exceeded")
    with database.begin() as conn:
        assert catalog.list_adapters(conn, A) == []


def test_a_dry_run_ends_with_its_passport_and_nothing_else(
    uploads, catalog, database, open_upload, tmp_path
):
    upload = open_upload(create=uploads.create_dry_run)
    upload = build_upload(uploads, database.begin, A, upload.upload_id)
    assert (upload.state, upload.built["passport"]["canary"]) == ("complete", None)
    assert upload.built["passport"]["rank"] == 4
    with database.begin() as conn:
        assert uploads.get_version(conn, upload) is None
        assert catalog.list_adapters(conn, A) == []
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


# Claims


def test_a_claimed_upload_is_claimed_by_nobody_else_until_the_claim_runs_out(
    uploads, database, make_proving, clock
):
    upload = make_proving()
    assert claim(uploads, database) == [upload.upload_id]
    clock.now_s += 9
    assert claim(uploads, database) == []
    clock.now_s += 1
    assert claim(uploads, database) == [upload.upload_id]


def test_a_renewed_claim_runs_on_and_one_given_back_is_free(uploads, database, make_proving, clock):
    upload = make_proving()
    claim(uploads, database)
    clock.now_s += 9
    with database.begin() as conn:
        renew_claim(uploads, conn, upload, claim_s=10)
    clock.now_s += 9
    assert claim(uploads, database) == []
    with database.begin() as conn:
        renew_claim(uploads, conn, upload, claim_s=0)
    assert claim(uploads, database) == [upload.upload_id]


def test_two_that_saw_the_same_upload_do_not_both_claim_it(
    uploads, database, make_proving, monkeypatch
):
    upload = make_proving()
    monkeypatch.setattr(upload_proof.proof_claims, "list_unclaimed", lambda *_: [upload])
    assert claim(uploads, database) == [upload.upload_id]
    assert claim(uploads, database) == []


def test_the_oldest_are_claimed_first_and_no_more_than_asked_for(
    uploads, database, make_proving, clock
):
    made = []
    for seed in (1, 2, 3):
        made.append(make_proving(seed=seed).upload_id)
        clock.now_s += 1
    assert claim(uploads, database, limit=2) == made[:2]
    assert claim(uploads, database, limit=2) == made[2:]


def test_one_that_could_not_be_proved_is_tried_again_later(uploads, database, make_proving, clock):
    upload = make_proving()
    claim(uploads, database)
    assert finish(uploads, database, upload, Proof(verdict="unavailable")).state == "proving"
    clock.now_s += 4
    assert claim(uploads, database) == []
    clock.now_s += 1
    assert claim(uploads, database) == [upload.upload_id]


def test_one_that_gives_up_while_it_is_published_is_no_version(
    uploads, catalog, database, make_proving, monkeypatch
):
    """Another gateway whose clock is ahead may give up meanwhile: sweeps take no tenant lock."""
    upload = make_proving()
    publish = catalog.publish

    def give_up_and_publish(conn, *arguments):
        values = {"error_code": "unavailable", "error": "Too late."}
        upload_proof.upload_rows.end_overdue(conn, 2**52, "proving", "failed", **values)
        return publish(conn, *arguments)

    monkeypatch.setattr(catalog, "publish", give_up_and_publish)
    with pytest.raises(UploadNotOpen):
        finish(uploads, database, upload)
    with database.begin() as conn:
        assert catalog.list_adapters(conn, A) == []
