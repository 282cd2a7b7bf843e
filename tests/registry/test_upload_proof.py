"""Checked uploads until their end: the effect of a verdict, and claims on proving an upload."""

from dataclasses import replace

import pytest

from registry.catalog.catalog import MAX_ALIASES
from registry.errors import StorageError
from registry.uploads.parts import Pending, pending_bytes
from registry.uploads.proof import Proof
from registry.uploads.proving import claim_proof, claim_proofs
from registry.uploads.sweep import end_overdue
from tests.refusals import refused
from tests.registry.factories import ActingStorage, keys

A = "tenant-a"
PASSED = Proof(verdict="passed", max_effect=2.5, num_tokens=64, device_bytes=4096)


@pytest.fixture
def make_proving(uploads, open_upload):
    def make(**fields):
        return uploads.build(open_upload(**fields))

    return make


def claim(uploads, limit=9):
    return [upload.upload_id for upload in uploads.claim(limit)]


def test_before_the_proof_there_is_no_version_and_no_part(
    catalog, connection, make_proving, storage
):
    upload = make_proving()
    assert upload.state == "proving"
    assert catalog.list_adapters(connection, A) == []
    assert keys(storage) == [upload.built.object_key], "the parts are gone, the object is there"
    assert pending_bytes(connection, A) == Pending(0, 0)


def test_an_adapter_that_passed_is_a_version_with_the_proof_in_its_passport(
    uploads, catalog, connection, make_proving
):
    upload = uploads.finish(make_proving(alias="prod"), PASSED)
    version = uploads.version_of(upload)
    assert catalog.resolve(connection, A, "pirate@prod") == version
    assert upload.state == "complete"
    assert uploads.get(upload).built.passport == version.passport
    canary = version.passport["canary"]
    assert (canary["passed"], canary["max_effect"], canary["device_bytes"]) == (True, 2.5, 4096)
    assert not {"verdict", "message"} & canary.keys()


@pytest.mark.parametrize("verdict", ["not_finite", "no_effect", "mismatch", "not_served"])
def test_an_adapter_that_did_not_pass_is_no_version_and_its_report_is_kept(
    uploads, catalog, connection, make_proving, verdict
):
    proof = Proof(verdict=verdict, message="Because.", max_difference=3.0)
    upload = uploads.finish(make_proving(), proof)
    assert (upload.state, upload.error_code, upload.error) == ("failed", verdict, "Because.")
    canary = upload.built.passport["canary"]
    assert (canary["passed"], canary["max_difference"]) == (False, 3.0)
    with refused(verdict):
        uploads.build(upload)
    assert catalog.list_adapters(connection, A) == []


def test_the_object_of_a_version_of_this_adapter_needs_no_second_proof(
    uploads, catalog, connection, make_proving, open_upload
):
    # Both are created before either is proved, so their files are not known from a version.
    first, second = open_upload(), open_upload(alias="prod")
    version = uploads.complete(first)
    assert make_proving(seed=2).state == "proving"
    same = uploads.build(second)
    assert (same.state, same.version) == ("complete", version.version)
    assert catalog.resolve(connection, A, "pirate@prod") == version


def test_an_object_that_is_gone_when_the_row_is_to_mean_it_leaves_the_upload_open(
    uploads, open_upload, storage
):
    upload = open_upload()

    def forget():
        for key in keys(storage, "tenants/"):
            storage.delete(key)

    uploads.storage = ActingStorage(storage, after="put", act=forget)
    with pytest.raises(StorageError):
        uploads.build(upload)
    uploads.storage = storage
    assert uploads.complete(upload).version == 1


def test_a_quota_reached_while_it_waited_ends_the_upload(
    uploads, catalog, make_version, connection, make_proving
):
    version = make_version()
    upload = make_proving(alias="prod")
    with uploads.begin() as conn:
        for number in range(1, MAX_ALIASES):
            catalog.set_alias(conn, A, "pirate", f"alias-{number}", version.version)
    upload = uploads.finish(upload)
    assert (upload.state, upload.error_code) == ("failed", "quota_exceeded")
    assert uploads.get(upload) == upload
    assert catalog.list_versions(connection, A, "pirate") == [version]


def test_a_dry_run_ends_with_its_passport_and_nothing_else(
    uploads, catalog, connection, open_upload, tmp_path
):
    upload = uploads.build(open_upload(name=None))
    assert (upload.state, upload.built.passport["canary"]) == ("complete", None)
    assert upload.built.passport["rank"] == 4
    assert uploads.version_of(upload) is None
    assert catalog.list_adapters(connection, A) == []
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


# Claims


def test_a_claimed_upload_is_claimed_by_nobody_else_until_the_claim_runs_out(
    uploads, make_proving, clock
):
    upload = make_proving()
    assert claim(uploads) == [upload.upload_id]
    clock.now_s += 9
    assert claim(uploads) == []
    clock.now_s += 1
    assert claim(uploads) == [upload.upload_id]


def test_a_renewed_claim_runs_on_and_one_given_back_is_free(uploads, make_proving, clock):
    upload = make_proving()
    claim(uploads)
    clock.now_s += 9
    with uploads.begin() as conn:
        claim_proof(conn, upload, uploads.now_ms() + 10_000)
    clock.now_s += 9
    assert claim(uploads) == []
    with uploads.begin() as conn:
        claim_proof(conn, upload, uploads.now_ms())
    assert claim(uploads) == [upload.upload_id]


def test_two_that_saw_the_same_upload_do_not_both_claim_it(uploads, make_proving, database):
    upload = make_proving()

    class Racing:
        """A connection on which another gateway claims between the search and the claim."""

        def __init__(self, conn):
            self.conn = conn

        def execute(self, statement):
            if statement.is_update:
                claim_proof(self.conn, upload, uploads.now_ms() + 10_000)
            return self.conn.execute(statement)

    with database.begin() as conn:
        assert claim_proofs(Racing(conn), uploads.now_ms(), limit=9, claim_ms=10_000) == []


def test_the_oldest_are_claimed_first_and_no_more_than_asked_for(uploads, make_proving, clock):
    made = []
    for seed in (1, 2, 3):
        made.append(make_proving(seed=seed).upload_id)
        clock.now_s += 1
    assert claim(uploads, limit=2) == made[:2]
    assert claim(uploads, limit=2) == made[2:]


def test_one_that_could_not_be_proved_is_tried_again_later(uploads, make_proving, clock):
    upload = make_proving()
    claim(uploads)
    unavailable = Proof(verdict="unavailable")
    assert uploads.finish(upload, unavailable, retry_ms=5000).state == "proving"
    clock.now_s += 4
    assert claim(uploads) == []
    clock.now_s += 1
    assert claim(uploads) == [upload.upload_id]


def test_one_that_gives_up_while_it_is_published_is_no_version(
    uploads, catalog, connection, make_proving
):
    """Another gateway whose clock is ahead may give up meanwhile: sweeps take no tenant lock."""
    upload = make_proving()

    class LateCatalog:
        def publish(self, conn, *arguments, **named):
            end_overdue(conn, 2**52, 0)
            return catalog.publish(conn, *arguments, **named)

    with refused("upload_not_open"):
        replace(uploads, catalog=LateCatalog()).finish(upload)
    assert catalog.list_adapters(connection, A) == []
