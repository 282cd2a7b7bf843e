"""Deletion of unneeded data: parts of ended uploads, objects without a row, purged versions.

Every function does a bounded amount of work and is meant to be called repeatedly, by several
gateways at once if need be.

A READY row always has its object, although objects are put outside of transactions and
`sweep_objects` deletes objects that no row refers to. Build and sweep both decide under
the tenant's lock, after checking whether the other came first:

    build: put object ── lock: if it still exists, write the row of a proving upload
    sweep:               lock: if no row refers to it, delete it

If the sweep comes first, the build misses the object and leaves the upload open. If the row comes
first, the sweep finds it: the upload's row while it is proving, and its version's afterwards. Once
a row refers to an object, the object is not deleted; a version is only made from a proving upload,
in the transaction that ends its proving.

Under the lock the store is only asked for a size or to delete one key; no bytes are transferred.
"""

import json
import re
from collections.abc import Iterator
from itertools import groupby, islice

from sqlalchemy import Connection, select, update

from registry.catalog import adapter_rows
from registry.catalog.catalog import Catalog
from registry.catalog.events import prune_events
from registry.catalog.offers import prune_offers
from registry.errors import Invalid, StorageError
from registry.storage.storage import PresignedStorage, Storage, StoredObject
from registry.tables import upload_parts, uploads
from registry.uploads import presigned
from registry.uploads.ends import UNAVAILABLE
from registry.uploads.rows import (
    CANCELLED,
    COMPLETE,
    EXPIRED,
    FAILED,
    OPEN,
    PRESIGNED,
    PROVING,
    Begin,
    Upload,
    is_of,
    to_upload,
)
from registry.uploads.rules import RegistryLimits

_ENDED = (COMPLETE, FAILED, EXPIRED, CANCELLED)
# Keys of one tenant in one query.
_BATCH = 500
_OBJECT_KEY = re.compile(r"tenants/([^/]+)/[0-9a-f]{64}")


def sweep_uploads(begin: Begin, storage: Storage, limits: RegistryLimits, now_ms: int) -> int:
    """End the uploads whose time is over, and discard the parts of ended uploads.

    Returns how many uploads were discarded.
    """
    with begin() as conn:
        end_overdue(conn, now_ms, limits.proof_ttl_s)
        ended = _undiscarded(conn, limits.max_discards_per_sweep)
    return sum(discard(begin, storage, upload, now_ms) for upload in ended)


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
        marked = conn.execute(
            update(uploads)
            .where(is_of(uploads, upload), uploads.c.state.in_(_ENDED))
            .values(discarded_at_ms=now_ms)
        )
    return marked.rowcount == 1


def end_overdue(conn: Connection, now_ms: int, proof_ttl_s: int) -> None:
    """End the open and the proving uploads of all tenants whose time is over.

    No engine proved the latter in time; their files are not at fault.
    """
    unproved = {
        "error_code": UNAVAILABLE,
        "error": f"No engine could prove the adapter within {proof_ttl_s / 3600:g} hours; "
        "upload it again.",
    }
    is_overdue = uploads.c.discarded_at_ms.is_(None), uploads.c.expires_at_ms <= now_ms
    for state, values in ((OPEN, {"state": EXPIRED}), (PROVING, {"state": FAILED} | unproved)):
        conn.execute(update(uploads).where(*is_overdue, uploads.c.state == state).values(values))


def _undiscarded(conn: Connection, limit: int) -> list[Upload]:
    """Ended uploads of all tenants whose parts may still be in the store, oldest first."""
    query = (
        select(uploads)
        .where(uploads.c.discarded_at_ms.is_(None), uploads.c.state.in_(_ENDED))
        .order_by(uploads.c.expires_at_ms)
        .limit(limit)
    )
    return [to_upload(conn, row) for row in conn.execute(query).all()]


def sweep_objects(begin: Begin, storage: Storage, limits: RegistryLimits, now_ms: int) -> int:
    """Delete old objects that no row refers to. Returns how many.

    A canonical object is an orphan if its upload died, failed or expired between the store and the
    row, or if its last version was purged; a part is an orphan if it arrived as its upload ended.
    """
    swept = 0
    old = _older(storage, "tenants/", now_ms, limits.orphan_grace_s)
    for tenant_id, key in islice(_orphans(begin, old), limits.max_orphans_per_sweep):
        with begin() as conn:
            adapter_rows.lock_tenant(conn, tenant_id)
            # Checked again: an upload may refer to the object since it was listed.
            if not _meant(conn, tenant_id, [key]):
                storage.delete(key)
                swept += 1
    return swept + _sweep_leftovers(storage, limits, now_ms)


def purge(begin: Begin, catalog: Catalog, now_ms: int) -> None:
    """Purge the versions that can no longer be restored, and delete old events and offers."""
    with begin() as conn:
        catalog.purge_deleted(conn)
    with begin() as conn:
        prune_events(conn, now_ms)
    with begin() as conn:
        prune_offers(conn, now_ms)


def _orphans(begin: Begin, old: Iterator[StoredObject]) -> Iterator[tuple[str, str]]:
    """Tenant and key of canonical objects that no row refers to when they are listed."""
    matches = (match for found in old if (match := _OBJECT_KEY.fullmatch(found.key)))
    for tenant_id, of_tenant in groupby(matches, key=lambda match: match[1]):
        keys = (match[0] for match in of_tenant)
        while batch := list(islice(keys, _BATCH)):
            with begin() as conn:
                meant = _meant(conn, tenant_id, batch)
            yield from ((tenant_id, key) for key in batch if key not in meant)


def _meant(conn: Connection, tenant_id: str, keys: list[str]) -> set[str]:
    """The given keys that a ready or restorable version, or a proving upload, refers to."""
    query = select(uploads.c.built).where(
        uploads.c.tenant_id == tenant_id, uploads.c.state == PROVING
    )
    proving = {json.loads(built)["object_key"] for built in conn.execute(query).scalars()}
    return adapter_rows.live_object_keys(conn, tenant_id, keys) | (proving & set(keys))


def _sweep_leftovers(storage: Storage, limits: RegistryLimits, now_ms: int) -> int:
    """Delete parts older than any upload can be: their upload was discarded before they arrived."""
    age_s = limits.upload_ttl_s + limits.orphan_grace_s
    old = list(islice(_older(storage, "uploads/", now_ms, age_s), limits.max_orphans_per_sweep))
    for found in old:
        storage.delete(found.key)
    if isinstance(storage, PresignedStorage):
        # Killed gateways leave multipart uploads of puts, and of presigned files without an id row.
        storage.abort_multiparts("", now_ms / 1000 - age_s)
    return len(old)


def _older(storage: Storage, prefix: str, now_ms: int, age_s: int) -> Iterator[StoredObject]:
    before_s = now_ms / 1000 - age_s
    return (found for found in storage.list(prefix) if found.modified_at < before_s)
