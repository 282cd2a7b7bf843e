"""Proofs of uploads: an upload with checked files waits for an engine's proof, which decides it.

A READY row always has its object, although objects are put outside of transactions and
`registry.sweep` deletes objects that no row refers to. Proof and sweep both decide under the
tenant's lock, after checking whether the other came first:

    put object ── lock: if it still exists, a row refers to it ── ... ── lock: version READY
                  lock: if no row refers to it, delete it

If the sweep comes first, the object is missing when it is looked for, and the upload stays open. If
the row comes first, the sweep finds it: the upload's row while it is proving, and its version's
afterwards. Once a row refers to an object, the object is not deleted; a version is only made from a
proving upload, in the transaction that ends its proving.

Under the lock the store is only asked for a size or to delete one key; no bytes are transferred.
"""

from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection

from registry import adapter_rows, proof_claims, upload_rows
from registry.adapter_rows import Version
from registry.base_model import BaseModel
from registry.base_models import BaseModels
from registry.build import BuiltAdapter, built_fields
from registry.errors import (
    AlreadyProved,
    InvalidAdapter,
    InvalidUpload,
    ProofFailed,
    ProofUnavailable,
    QuotaExceeded,
    StorageError,
    UploadNotOpen,
)
from registry.names import check_alias
from registry.proof import Proof
from registry.upload_rows import COMPLETE, FAILED, OPEN, PROVING, Upload
from registry.upload_rules import RegistryLimits, check_quotas
from registry.uploads import Uploads, new_upload_id

_UNAVAILABLE = "unavailable"


def ended(upload: Upload) -> Upload:
    """Return an upload that is proving or complete; raise the reason if it ended in another way.

    Raises ProofUnavailable, ProofFailed, InvalidAdapter, UploadNotOpen.
    """
    if upload.state == FAILED:
        if upload.error_code == _UNAVAILABLE:
            raise ProofUnavailable(message=upload.error or "")
        if upload.error_code == ProofFailed.code:
            raise ProofFailed(upload.error)
        raise InvalidAdapter(
            code=upload.error_code or "invalid_adapter",
            message=upload.error or "",
            param=upload.error_param,
        )
    if upload.state not in (PROVING, COMPLETE):
        raise UploadNotOpen(upload_id=upload.upload_id, state=upload.state)
    return upload


def start_proof(uploads: Uploads, conn: Connection, built: BuiltAdapter) -> Upload:
    """Make the upload proving, or complete if there is nothing to prove; returns the upload.

    A dry run needs no proof, nor does an object that is a version of this adapter already. Raises
    UploadNotOpen, and StorageError if the object is missing: then the upload is still open.
    """
    tenant_id = built.upload.tenant_id
    adapter_rows.lock_tenant(conn, tenant_id)
    upload = uploads.get_upload(conn, tenant_id, built.upload.upload_id)
    if upload.state != OPEN:
        return ended(upload)
    if upload.is_dry_run:
        passport = {**built.passport, "canary": None}
        report = {"passport": passport, "base_model": built.base_model}
        upload_rows.move_upload(conn, upload, COMPLETE, built=report)
        return uploads.get_upload(conn, tenant_id, upload.upload_id)
    _check_object(uploads, built)
    known = _same_version(conn, built)
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
    base_model: str | None = None,
    limits: RegistryLimits | None = None,
) -> Upload:
    """Open an upload that proves a version on another base model than the one it is for.

    The object stays the same and no file is sent: the upload has no files, and is proving from the
    start. base_model: the name of the other base model; None for the only other one that is served.
    Raises AdapterNotFound, AlreadyProved, InvalidName, InvalidUpload, UnknownBaseModel,
    QuotaExceeded.
    """
    if alias is not None:
        check_alias(alias)
    adapter_rows.lock_tenant(conn, tenant_id)
    version = uploads.catalog.get_version(conn, tenant_id, name, number)
    base = _other_base(uploads.catalog.bases, name, version, base_model)
    if version.tokenizer is not None:
        raise InvalidUpload(
            code="tokenizer_mismatch",
            message=f"Version {number} has a tokenizer or a chat template of its own, which was "
            "compared with its base model's; upload its files again for the other base model.",
            param="base_model",
        )
    built = built_fields(version)
    built["base_revision"], built["base_model"] = base.base_revision, base.model_id
    built["base_variant"] = base.variant
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
        response_template=version.response_template,
        base_model=base_model,
    )
    check_quotas(conn, upload, limits or uploads.limits)
    upload_rows.insert_upload(conn, upload)
    return upload


def claim_proofs(uploads: Uploads, conn: Connection, *, limit: int, claim_s: float) -> list[Upload]:
    """Claim up to `limit` uploads that only the caller may prove while it renews the claims."""
    now_ms = uploads.now_ms()
    until_ms = now_ms + int(claim_s * 1000)
    found = proof_claims.list_unclaimed(conn, now_ms, limit)
    return [upload for upload in found if proof_claims.claim(conn, upload, now_ms, until_ms)]


def renew_claim(uploads: Uploads, conn: Connection, upload: Upload, *, claim_s: float) -> None:
    """Extend a claim to claim_s from now; 0 gives the upload back."""
    proof_claims.renew_claim(conn, upload, uploads.now_ms() + int(claim_s * 1000))


def finish_proof(
    uploads: Uploads, conn: Connection, upload: Upload, proof: Proof, *, retry_s: float
) -> Upload:
    """Carry out the engine's verdict: the upload is complete or failed, or is proved in retry_s.

    Returns the upload. An upload that has ended otherwise stays unchanged.
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
            # The quota was reached while the upload waited; it fails, or it would wait forever.
            fault = (error.code, str(error))
    if fault is not None:
        code, message = fault
        report = built_fields(built)
        upload_rows.move_upload(conn, upload, FAILED, built=report, error_code=code, error=message)
    return uploads.get_upload(conn, tenant_id, upload_id)


def give_up_proofs(uploads: Uploads, conn: Connection) -> None:
    """Fail the uploads that no engine proved in time; their files are not at fault."""
    hours = uploads.limits.proof_ttl_s / 3600
    upload_rows.end_overdue(
        conn,
        uploads.now_ms(),
        PROVING,
        FAILED,
        error_code=_UNAVAILABLE,
        error=f"No engine could prove the adapter within {hours:g} hours; upload it again.",
    )


def with_proof(built: dict[str, Any], proof: Proof) -> dict[str, Any]:
    """Fields of the built adapter with the proof's figures added to the passport."""
    figures = asdict(proof)
    del figures["verdict"], figures["message"]
    canary = {"passed": proof.verdict == "passed", **figures}
    return {**built, "passport": {**built["passport"], "canary": canary}}


def _other_base(
    bases: BaseModels, name: str, version: Version, base_model: str | None
) -> BaseModel:
    """The base model to prove the version on, see `prove_again`."""
    candidates = bases.candidates(base_model)
    its_own = bases.serving(version.base)
    others = [base for base in candidates if base is not its_own]
    if not others:
        raise AlreadyProved(name=name, version=version.version)
    if len({base.variant for base in others}) > 1:
        names = ", ".join(base.model_id for base in others)
        raise InvalidUpload(
            code="base_model_unclear",
            message=f"The version can be proved on one of {names}; name it with base_model.",
            param="base_model",
        )
    return others[0]


def _check_object(uploads: Uploads, built: BuiltAdapter) -> None:
    stored_bytes = uploads.storage.size(built.object_key)
    if stored_bytes != built.size_bytes:
        raise StorageError(
            key=built.object_key,
            reason=f"{stored_bytes} bytes are stored, {built.size_bytes} were put",
        )


def _same_version(conn: Connection, built: BuiltAdapter) -> Version | None:
    tenant_id, name = built.upload.tenant_id, built.upload.adapter_name
    adapter = adapter_rows.find_adapter(conn, tenant_id, name)
    if adapter is None:
        return None
    made = built.as_version(adapter.adapter_id, 0, 0)
    return adapter_rows.find_same_version(conn, tenant_id, made)
