"""Deletion of unneeded data: parts of ended uploads, objects without a row, purged versions.

Every function does a bounded amount of work and is meant to be called repeatedly, by several
gateways at once if need be.
"""

import re
from collections.abc import Iterator
from itertools import groupby, islice

from sqlalchemy import Connection

from registry import adapter_rows, presigned, proof_claims, upload_proof, upload_rows
from registry.errors import InvalidUpload, StorageError
from registry.events import prune_events
from registry.offers import prune_offers
from registry.storage import PresignedStorage, StoredObject
from registry.transactions import Begin
from registry.upload_rows import EXPIRED, OPEN, PRESIGNED, Upload
from registry.uploads import Uploads

# Keys of one tenant in one query.
_BATCH = 500
_OBJECT_KEY = re.compile(r"tenants/([^/]+)/[0-9a-f]{64}")


def sweep_uploads(uploads: Uploads, begin: Begin) -> int:
    """End the uploads whose time is over, and discard the parts of ended uploads.

    Returns how many uploads were discarded.
    """
    with begin() as conn:
        upload_rows.end_overdue(conn, uploads.now_ms(), OPEN, EXPIRED)
        upload_proof.give_up_proofs(uploads, conn)
        ended = upload_rows.list_undiscarded(conn, uploads.limits.max_discards_per_sweep)
    return sum(discard(uploads, begin, upload) for upload in ended)


def discard(uploads: Uploads, begin: Begin, upload: Upload) -> bool:
    """Delete the parts of an upload that takes no more parts. Repeating is harmless.

    Returns True once an ended upload has no parts left; False after an error of the store, and for
    a proving upload, which is discarded again when it has ended.
    """
    try:
        if upload.transfer == PRESIGNED:
            presigned.abort_files(uploads.presigned_storage(), upload)
        for found in list(uploads.storage.list(f"uploads/{upload.upload_id}/")):
            uploads.storage.delete(found.key)
    except (StorageError, InvalidUpload):
        # The upload's end does not depend on this, and the next sweep finds the upload again.
        return False
    with begin() as conn:
        return upload_rows.mark_discarded(
            conn, upload.tenant_id, upload.upload_id, uploads.now_ms()
        )


def sweep_objects(uploads: Uploads, begin: Begin) -> int:
    """Delete old objects that no row refers to. Returns how many.

    A canonical object is an orphan if its upload died, failed or expired between the store and the
    row, or if its last version was purged; a part is an orphan if it arrived as its upload ended.
    registry.upload_proof explains why no object is deleted that a row comes to refer to.
    """
    orphans = _orphans(uploads, begin)
    swept = 0
    for tenant_id, key in islice(orphans, uploads.limits.max_orphans_per_sweep):
        with begin() as conn:
            adapter_rows.lock_tenant(conn, tenant_id)
            # Checked again: an upload may refer to the object since it was listed.
            if not _meant(conn, tenant_id, [key]):
                uploads.storage.delete(key)
                swept += 1
    return swept + _sweep_leftovers(uploads)


def purge(uploads: Uploads, begin: Begin) -> None:
    """Purge the versions that can no longer be restored, and delete old events and offers."""
    with begin() as conn:
        uploads.catalog.purge_deleted(conn)
    with begin() as conn:
        prune_events(conn, uploads.now_ms())
    with begin() as conn:
        prune_offers(conn, uploads.now_ms())


def _orphans(uploads: Uploads, begin: Begin) -> Iterator[tuple[str, str]]:
    """Tenant and key of old canonical objects that no row refers to when they are listed."""
    for tenant_id, found in groupby(_old_objects(uploads), key=lambda pair: pair[0]):
        keys = (key for _, key in found)
        while batch := list(islice(keys, _BATCH)):
            with begin() as conn:
                meant = _meant(conn, tenant_id, batch)
            yield from ((tenant_id, key) for key in batch if key not in meant)


def _old_objects(uploads: Uploads) -> Iterator[tuple[str, str]]:
    """Tenant and key of canonical objects older than the grace period, tenant by tenant."""
    for found in _older(uploads, "tenants/", uploads.limits.orphan_grace_s):
        if match := _OBJECT_KEY.fullmatch(found.key):
            yield match[1], found.key


def _meant(conn: Connection, tenant_id: str, keys: list[str]) -> set[str]:
    """The given keys that a ready or restorable version, or a proving upload, refers to."""
    live = adapter_rows.live_object_keys(conn, tenant_id, keys)
    return live | (proof_claims.proving_object_keys(conn, tenant_id) & set(keys))


def _sweep_leftovers(uploads: Uploads) -> int:
    """Delete parts older than any upload can be: their upload was discarded before they arrived."""
    limits, storage = uploads.limits, uploads.storage
    age_s = limits.upload_ttl_s + limits.orphan_grace_s
    old = list(islice(_older(uploads, "uploads/", age_s), limits.max_orphans_per_sweep))
    for found in old:
        storage.delete(found.key)
    if isinstance(storage, PresignedStorage):
        # Killed gateways leave multipart uploads of puts, and of presigned files without an id row.
        storage.abort_multiparts("", uploads.now_ms() / 1000 - age_s)
    return len(old)


def _older(uploads: Uploads, prefix: str, age_s: int) -> Iterator[StoredObject]:
    before_s = uploads.now_ms() / 1000 - age_s
    return (found for found in uploads.storage.list(prefix) if found.modified_at < before_s)
