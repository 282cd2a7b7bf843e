"""Ends of uploads: published as a version, cancelled, overdue; then its parts are discarded."""

from sqlalchemy import Connection, select, update

from registry.catalog import adapter_rows
from registry.catalog.adapter_rows import BuiltAdapter
from registry.catalog.catalog import Catalog
from registry.errors import Conflict, Fault, Invalid, InvalidAdapter, StorageError
from registry.storage.storage import Storage
from registry.tables import upload_parts, uploads
from registry.transactions import Begin
from registry.uploads import presigned
from registry.uploads.rows import (
    CANCELLED,
    COMPLETE,
    EXPIRED,
    FAILED,
    OPEN,
    PRESIGNED,
    PROVING,
    Upload,
    get_upload,
    is_of,
    move_upload,
    not_open,
    to_upload,
)

_ENDED = (COMPLETE, FAILED, EXPIRED, CANCELLED)
_UNAVAILABLE = "unavailable"


class ProofFailed(Fault):
    """The proof of the upload failed by an error of the server; its files are not at fault."""

    default_code = "proof_failed"


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
        if upload.error_code == _UNAVAILABLE:
            raise Conflict(upload.error or "", code=_UNAVAILABLE)
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


def end_overdue(conn: Connection, now_ms: int, proof_ttl_s: int) -> None:
    """End the open and the proving uploads of all tenants whose time is over.

    No engine proved the latter in time; their files are not at fault.
    """
    unproved = {
        "error_code": _UNAVAILABLE,
        "error": f"No engine could prove the adapter within {proof_ttl_s / 3600:g} hours; "
        "upload it again.",
    }
    is_overdue = uploads.c.discarded_at_ms.is_(None), uploads.c.expires_at_ms <= now_ms
    for state, values in ((OPEN, {"state": EXPIRED}), (PROVING, {"state": FAILED} | unproved)):
        conn.execute(update(uploads).where(*is_overdue, uploads.c.state == state).values(values))


def list_undiscarded(conn: Connection, limit: int) -> list[Upload]:
    """Ended uploads of all tenants whose parts may still be in the store, oldest first."""
    query = (
        select(uploads)
        .where(uploads.c.discarded_at_ms.is_(None), uploads.c.state.in_(_ENDED))
        .order_by(uploads.c.expires_at_ms)
        .limit(limit)
    )
    return [to_upload(conn, row) for row in conn.execute(query).all()]


def discard(begin: Begin, storage: Storage, upload: Upload, now_ms: int) -> bool:
    """Delete the parts of an upload that takes no more parts. Repeating is harmless.

    Returns True once an ended upload has no parts left; False after an error of the store, and for
    a proving upload, which is discarded again when it has ended.
    """
    try:
        if upload.transfer == PRESIGNED:
            presigned.abort_files(presigned.storage_of(storage), upload)
        for found in list(storage.list(f"uploads/{upload.upload_id}/")):
            storage.delete(found.key)
    except (StorageError, Invalid):
        # The upload's end does not depend on this, and the next sweep finds the upload again.
        return False
    with begin() as conn:
        conn.execute(upload_parts.delete().where(is_of(upload_parts, upload)))
        return mark_discarded(conn, upload, now_ms)


def mark_discarded(conn: Connection, upload: Upload, now_ms: int) -> bool:
    """Record that the store has no parts of the upload; False if the upload has not ended."""
    marked = conn.execute(
        update(uploads)
        .where(is_of(uploads, upload), uploads.c.state.in_(_ENDED))
        .values(discarded_at_ms=now_ms)
    )
    return marked.rowcount == 1
