"""From checked files to a version: uploads that wait for an engine's proof, and what it decides.

A READY row without its object cannot be, though objects are put outside of transactions and
`registry.sweep` deletes those that no row means. Both decide under the tenant's lock, after
looking at what the other may have done:

    put object ── lock: is it still there? then the row means it ── ... ── lock: version READY
                  lock: does no row mean it? then delete it

If the sweep comes first, the object is gone when it is looked for, and the upload stays open. If
the row comes first, the sweep finds it, as long as the upload is proving and after that by its
version. From the moment that a row means an object, nobody deletes it; a version is only ever
made of a proving upload, in the transaction that ends its proving.

Under the lock the store is asked for a size or told to delete one key: no bytes move meanwhile.
"""

from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection

from registry import adapter_rows, proof_claims, upload_rows
from registry.adapter_rows import Version
from registry.build import BuiltAdapter
from registry.errors import (
    AlreadyProved,
    InvalidAdapter,
    ProofUnavailable,
    QuotaExceeded,
    StorageError,
    UploadNotOpen,
)
from registry.names import check_alias
from registry.proof import Proof
from registry.upload_rows import COMPLETE, FAILED, OPEN, PROVING, Upload
from registry.upload_rules import RegistryLimits, check_quotas
from registry.uploads import Uploads, built_fields, new_upload_id

_UNAVAILABLE = "unavailable"


def ended(upload: Upload) -> Upload:
    """An upload that is proving or complete. Raises why it is not, if it is not open either."""
    if upload.state == FAILED:
        if upload.error_code == _UNAVAILABLE:
            raise ProofUnavailable(message=upload.error or "")
        raise InvalidAdapter(
            code=upload.error_code or "invalid_adapter",
            message=upload.error or "",
            param=upload.error_param,
        )
    if upload.state not in (PROVING, COMPLETE):
        raise UploadNotOpen(upload_id=upload.upload_id, state=upload.state)
    return upload


def start_proof(uploads: Uploads, conn: Connection, built: BuiltAdapter) -> Upload:
    """The upload, now proving; or complete, where there is nothing to prove.

    That is a dry run, and an object that is a version of this adapter already. Raises
    UploadNotOpen, and StorageError when the object is gone: then the upload is still open.
    """
    tenant_id = built.upload.tenant_id
    adapter_rows.lock_tenant(conn, tenant_id)
    upload = uploads.get_upload(conn, tenant_id, built.upload.upload_id)
    if upload.state != OPEN:
        return ended(upload)
    if upload.is_dry_run:
        passport = {**built.passport, "canary": None}
        upload_rows.move_upload(conn, upload, COMPLETE, built={"passport": passport})
        return uploads.get_upload(conn, tenant_id, upload.upload_id)
    _check_object(uploads, built)
    known = _same_version(conn, upload, built)
    if known is not None:
        uploads.publish(conn, upload, BuiltAdapter(upload, **built_fields(known)))
    else:
        upload_rows.move_upload(
            conn,
            upload,
            PROVING,
            built=built_fields(built),
            expires_at_ms=uploads.now_ms() + uploads.limits.proof_ttl_s * 1000,
        )
    return uploads.get_upload(conn, tenant_id, upload.upload_id)


def prove_again(
    uploads: Uploads,
    conn: Connection,
    tenant_id: str,
    key_id: str,
    name: str,
    number: int,
    alias: str | None = None,
    *,
    limits: RegistryLimits | None = None,
) -> Upload:
    """A version that was made for another base model, on the way to be one for this base.

    Its object is the same and nothing is sent: the upload has no files, and is proving from the
    start. Raises AdapterNotFound, AlreadyProved, InvalidName, QuotaExceeded.
    """
    if alias is not None:
        check_alias(alias)
    adapter_rows.lock_tenant(conn, tenant_id)
    version = uploads.catalog.get_version(conn, tenant_id, name, number)
    if uploads.catalog.is_servable(version):
        raise AlreadyProved(name=name, version=number)
    built = built_fields(version) | {"base_revision": uploads.catalog.base.base_revision}
    built["passport"] = {**version.passport, "canary": None}
    now_ms = uploads.now_ms()
    upload = Upload(
        upload_id=new_upload_id(),
        tenant_id=tenant_id,
        adapter_name=name,
        alias=alias,
        state=PROVING,
        created_by_key=key_id,
        created_at_ms=now_ms,
        expires_at_ms=now_ms + uploads.limits.proof_ttl_s * 1000,
        files={},
        built=built,
    )
    check_quotas(conn, upload, limits or uploads.limits)
    upload_rows.insert_upload(conn, upload)
    return upload


def claim_proofs(uploads: Uploads, conn: Connection, *, limit: int, claim_s: float) -> list[Upload]:
    """Uploads that the caller is to prove, alone for so long as it renews its claim."""
    now_ms = uploads.now_ms()
    until_ms = now_ms + int(claim_s * 1000)
    found = proof_claims.list_unclaimed(conn, now_ms, limit)
    return [upload for upload in found if proof_claims.claim(conn, upload, now_ms, until_ms)]


def renew_claim(uploads: Uploads, conn: Connection, upload: Upload, *, claim_s: float) -> None:
    """For claim_s more from now; 0 gives it back."""
    proof_claims.renew_claim(conn, upload, uploads.now_ms() + int(claim_s * 1000))


def finish_proof(
    uploads: Uploads, conn: Connection, upload: Upload, proof: Proof, *, retry_s: float
) -> Upload:
    """The upload after the engine's verdict: complete, failed, or proving again in retry_s.

    One that somebody else has brought to its end stays as it is.
    """
    tenant_id, upload_id = upload.tenant_id, upload.upload_id
    adapter_rows.lock_tenant(conn, tenant_id)
    upload = uploads.get_upload(conn, tenant_id, upload_id)
    if upload.state != PROVING:
        return upload
    if proof.verdict == _UNAVAILABLE:
        renew_claim(uploads, conn, upload, claim_s=retry_s)
        return upload
    assert upload.built is not None
    built = BuiltAdapter(upload, **with_proof(upload.built, proof))
    fault: tuple[str, str] | None = (proof.verdict, proof.message)
    if proof.verdict == "passed":
        fault = None
        try:
            with conn.begin_nested():
                uploads.publish(conn, upload, built)
        except QuotaExceeded as error:
            # Reached while the upload waited; it must not wait for good.
            fault = (error.code, str(error))
    if fault is not None:
        code, message = fault
        report = built_fields(built)
        upload_rows.move_upload(conn, upload, FAILED, built=report, error_code=code, error=message)
    return uploads.get_upload(conn, tenant_id, upload_id)


def give_up_proofs(uploads: Uploads, conn: Connection) -> None:
    """Fail the uploads that no engine proved in time: no fault of their files."""
    hours = uploads.limits.proof_ttl_s / 3600
    proof_claims.give_up(
        conn,
        uploads.now_ms(),
        error_code=_UNAVAILABLE,
        error=f"No engine could prove the adapter within {hours:g} hours; upload it again.",
    )


def with_proof(built: dict[str, Any], proof: Proof) -> dict[str, Any]:
    """The proof's figures in the passport."""
    figures = asdict(proof)
    del figures["verdict"], figures["message"]
    canary = {"passed": proof.verdict == "passed", **figures}
    return {**built, "passport": {**built["passport"], "canary": canary}}


def _check_object(uploads: Uploads, built: BuiltAdapter) -> None:
    stored_bytes = uploads.storage.size(built.object_key)
    if stored_bytes != built.size_bytes:
        raise StorageError(
            key=built.object_key, reason=f"{stored_bytes} bytes, {built.size_bytes} were put"
        )


def _same_version(conn: Connection, upload: Upload, built: BuiltAdapter) -> Version | None:
    adapter = adapter_rows.find_adapter(conn, upload.tenant_id, upload.adapter_name)
    if adapter is None:
        return None
    return adapter_rows.find_same_version(
        conn, upload.tenant_id, adapter.adapter_id, built.digest, built.base_revision
    )
