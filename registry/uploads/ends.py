"""Ends of uploads: the verdict on a proof, publication as a version, cancellation."""

from dataclasses import asdict, replace

from sqlalchemy import Connection

from registry.catalog import adapter_rows
from registry.catalog.adapter_rows import BuiltAdapter
from registry.catalog.catalog import Catalog
from registry.errors import Conflict, Fault, InvalidAdapter, QuotaExceeded
from registry.uploads.proof import Proof
from registry.uploads.proving import claim_proof
from registry.uploads.rows import (
    CANCELLED,
    COMPLETE,
    FAILED,
    OPEN,
    PROVING,
    Upload,
    get_upload,
    move_upload,
    not_open,
)

UNAVAILABLE = "unavailable"
"""Code of an upload that no engine could prove in time."""


class ProofFailed(Fault):
    """The proof of the upload failed by an error of the server; its files are not at fault."""

    default_code = "proof_failed"


def finish_proof(
    conn: Connection, catalog: Catalog, upload: Upload, proof: Proof, now_ms: int, *, retry_ms: int
) -> Upload:
    """Carry out the engine's verdict: the upload is complete or failed, or is proved in retry_ms.

    Returns the upload. An upload that has ended otherwise stays unchanged.
    """
    adapter_rows.lock_tenant(conn, upload.tenant_id)
    upload = get_upload(conn, upload.tenant_id, upload.upload_id, now_ms)
    if upload.state != PROVING:
        return upload
    if proof.verdict == "unavailable":
        claim_proof(conn, upload, now_ms + retry_ms)
        return upload
    assert upload.built is not None
    built = _with_proof(upload.built, proof)
    code: str | None = proof.verdict
    message = proof.message
    if proof.verdict == "passed":
        try:
            with conn.begin_nested():
                return publish(conn, catalog, upload, built)
        except QuotaExceeded as error:
            # The quota was reached while the upload waited; it fails, or it would wait forever.
            code, message = error.code, str(error)
    return move_upload(conn, upload, FAILED, built=built, error_code=code, error=message)


def publish(conn: Connection, catalog: Catalog, upload: Upload, built: BuiltAdapter) -> Upload:
    """Make the object a version, move `latest` and the upload's alias to it, and complete the
    upload.

    If the adapter has a version with the same bytes, that version is used. upload: as the caller
    read it under the tenant's lock. Raises QuotaExceeded; and Conflict if the upload's time is
    over, since the sweep ends uploads without the tenant's lock.
    """
    version = catalog.publish(
        conn,
        upload.tenant_id,
        upload.adapter_name,
        built,
        key_id=upload.created_by_key,
        response_template=upload.response_template,
        alias=upload.alias,
    )
    return move_upload(
        conn,
        upload,
        COMPLETE,
        built=built,
        adapter_id=version.adapter_id,
        version=version.version,
    )


def check_fault(upload: Upload) -> Upload:
    """Return an upload that is proving or complete; raise the reason if it ended in another way.

    Raises Conflict, ProofFailed, InvalidAdapter.
    """
    if upload.state == FAILED:
        if upload.error_code == UNAVAILABLE:
            raise Conflict(upload.error or "", code=UNAVAILABLE)
        if upload.error_code == ProofFailed.default_code:
            raise ProofFailed(upload.error or "")
        raise InvalidAdapter(
            code=upload.error_code or "invalid_adapter",
            message=upload.error or "",
            param=upload.error_param,
        )
    if upload.state not in (PROVING, COMPLETE):
        raise not_open(upload)
    return upload


def cancel_upload(conn: Connection, tenant_id: str, upload_id: str, now_ms: int) -> Upload:
    """Cancel an open upload; repeating is harmless. Raises NotFound, Conflict."""
    adapter_rows.lock_tenant(conn, tenant_id)
    upload = get_upload(conn, tenant_id, upload_id, now_ms)
    if upload.state == OPEN:
        return move_upload(conn, upload, CANCELLED)
    if upload.state != CANCELLED:
        raise not_open(upload)
    return upload


def _with_proof(built: BuiltAdapter, proof: Proof) -> BuiltAdapter:
    """The adapter with the proof's figures in its passport."""
    figures = asdict(proof) | {"warnings": list(proof.warnings)}
    del figures["verdict"], figures["message"]
    canary = {"passed": proof.verdict == "passed", **figures}
    return replace(built, passport={**built.passport, "canary": canary})
