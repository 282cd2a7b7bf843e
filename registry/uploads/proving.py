"""Proofs of uploads: an upload with checked files waits for an engine's proof, which decides it.

A READY row always has its object, although objects are put outside of transactions and
`registry.uploads.sweep` deletes objects that no row refers to. Build and sweep both decide under
the tenant's lock, after checking whether the other came first:

    build: put object ── lock: if it still exists, write the row of a proving upload
    sweep:               lock: if no row refers to it, delete it

If the sweep comes first, the build misses the object and leaves the upload open. If the row comes
first, the sweep finds it: the upload's row while it is proving, and its version's afterwards. Once
a row refers to an object, the object is not deleted; a version is only made from a proving upload,
in the transaction that ends its proving.

Under the lock the store is only asked for a size or to delete one key; no bytes are transferred.
"""

from dataclasses import asdict, replace

from sqlalchemy import ColumnElement, Connection, or_, select, update

from registry.catalog import adapter_rows
from registry.catalog.adapter_rows import BuiltAdapter
from registry.catalog.catalog import Catalog
from registry.errors import QuotaExceeded
from registry.tables import uploads
from registry.uploads.ends import publish
from registry.uploads.proof import Proof
from registry.uploads.rows import FAILED, PROVING, Upload, get_upload, is_of, move_upload, to_upload


def claim_proofs(conn: Connection, now_ms: int, *, limit: int, claim_ms: int) -> list[Upload]:
    """Claim up to `limit` proving uploads of all tenants, the oldest first.

    Only the caller may prove them while it renews the claims.
    """
    # Proving uploads are not discarded, so the index on discarded_at_ms finds them, however many
    # uploads have ended.
    query = (
        select(uploads)
        .where(uploads.c.discarded_at_ms.is_(None), uploads.c.state == PROVING, _is_free(now_ms))
        .order_by(uploads.c.created_at_ms)
        .limit(limit)
    )
    found = [to_upload(conn, row) for row in conn.execute(query).all()]
    # Another gateway may have been first.
    return [it for it in found if claim_proof(conn, it, now_ms + claim_ms, _is_free(now_ms))]


def claim_proof(
    conn: Connection, upload: Upload, until_ms: int, *conditions: ColumnElement[bool]
) -> bool:
    """Claim a proof, or renew the caller's claim, until `until_ms`; a time that is over gives it
    back. False if the upload is not proving any more, or does not meet the conditions.
    """
    claimed = conn.execute(
        update(uploads)
        .where(is_of(uploads, upload), uploads.c.state == PROVING, *conditions)
        .values(proving_until_ms=until_ms)
    )
    return claimed.rowcount == 1


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
    built = with_proof(upload.built, proof)
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


def with_proof(built: BuiltAdapter, proof: Proof) -> BuiltAdapter:
    """The adapter with the proof's figures in its passport."""
    figures = asdict(proof) | {"warnings": list(proof.warnings)}
    del figures["verdict"], figures["message"]
    canary = {"passed": proof.verdict == "passed", **figures}
    return replace(built, passport={**built.passport, "canary": canary})


def _is_free(now_ms: int) -> ColumnElement[bool]:
    """Condition that no claim is in force."""
    return or_(uploads.c.proving_until_ms.is_(None), uploads.c.proving_until_ms <= now_ms)
