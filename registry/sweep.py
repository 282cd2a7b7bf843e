"""What nobody needs any more: parts of ended uploads, objects without a row, purged versions.

Every function does a bounded piece of work, so that it can be called again and again; several
gateways may do so at once.
"""

import re
from collections.abc import Iterator
from itertools import groupby, islice

from sqlalchemy import Connection

from registry import adapter_rows, presigned, proof_claims, upload_proof, upload_rows
from registry.errors import InvalidUpload, StorageError
from registry.events import prune_events
from registry.storage import PresignedStorage, StoredObject
from registry.transactions import Begin
from registry.upload_rows import PRESIGNED, Upload
from registry.uploads import Uploads

# Keys of one tenant that one query asks about.
_BATCH = 500
_OBJECT_KEY = re.compile(r"tenants/([^/]+)/[0-9a-f]{64}")


def sweep_uploads(uploads: Uploads, begin: Begin) -> int:
    """End the uploads whose time is over and discard what ended ones left.

    Returns how many were discarded.
    """
    with begin() as conn:
        upload_rows.expire(conn, uploads.now_ms())
        upload_proof.give_up_proofs(uploads, conn)
        ended = upload_rows.list_undiscarded(conn, uploads.limits.max_discards_per_sweep)
    return sum(discard(uploads, begin, upload) for upload in ended)


def discard(uploads: Uploads, begin: Begin, upload: Upload) -> bool:
    """Delete the parts of an upload that takes no more of them. Again is harmless.

    True once an ended upload has nothing left and never will; a proving one is asked again.
    """
    try:
        if upload.transfer == PRESIGNED:
            presigned.abort_files(uploads.presigned_storage(), upload)
        for found in list(uploads.storage.list(f"uploads/{upload.upload_id}/")):
            uploads.storage.delete(found.key)
    except (StorageError, InvalidUpload):
        # How the upload ended does not depend on it, and the next sweep finds it again.
        return False
    with begin() as conn:
        return upload_rows.mark_discarded(
            conn, upload.tenant_id, upload.upload_id, uploads.now_ms()
        )


def sweep_objects(uploads: Uploads, begin: Begin) -> int:
    """Delete old objects that no row means. Returns how many.

    Canonical objects are orphans when their upload died, failed or expired between the store and
    the row, or when their last version was purged; parts when they came as their upload ended.
    Why none is deleted that a row comes to mean: registry.upload_proof.
    """
    orphans = _orphans(uploads, begin)
    swept = 0
    for tenant_id, key in islice(orphans, uploads.limits.max_orphans_per_sweep):
        with begin() as conn:
            adapter_rows.lock_tenant(conn, tenant_id)
            # Asked again: a completion may have come to mean it since it was listed.
            if not _meant(conn, tenant_id, [key]):
                uploads.storage.delete(key)
                swept += 1
    return swept + _sweep_leftovers(uploads)


def purge(uploads: Uploads, begin: Begin) -> None:
    """Give up what was deleted longer ago than can be restored, and forget old events."""
    with begin() as conn:
        uploads.catalog.purge_deleted(conn)
    with begin() as conn:
        prune_events(conn, uploads.now_ms())


def _orphans(uploads: Uploads, begin: Begin) -> Iterator[tuple[str, str]]:
    """(tenant, key) of old canonical objects that no row means as they are listed."""
    for tenant_id, found in groupby(_old_objects(uploads), key=lambda pair: pair[0]):
        keys = (key for _, key in found)
        while batch := list(islice(keys, _BATCH)):
            with begin() as conn:
                meant = _meant(conn, tenant_id, batch)
            yield from ((tenant_id, key) for key in batch if key not in meant)


def _old_objects(uploads: Uploads) -> Iterator[tuple[str, str]]:
    """(tenant, key) of canonical objects past their grace, tenant by tenant."""
    for found in _older(uploads, "tenants/", uploads.limits.orphan_grace_s):
        if match := _OBJECT_KEY.fullmatch(found.key):
            yield match[1], found.key


def _meant(conn: Connection, tenant_id: str, keys: list[str]) -> set[str]:
    """Those that a version has or may be restored to have, or that wait for their proof."""
    live = adapter_rows.live_object_keys(conn, tenant_id, keys)
    return live | proof_claims.proving_object_keys(conn, tenant_id)


def _sweep_leftovers(uploads: Uploads) -> int:
    """Delete parts as old as no upload gets: their own was discarded before they arrived."""
    limits, storage = uploads.limits, uploads.storage
    age_s = limits.upload_ttl_s + limits.orphan_grace_s
    old = list(islice(_older(uploads, "uploads/", age_s), limits.max_orphans_per_sweep))
    for found in old:
        storage.delete(found.key)
    if isinstance(storage, PresignedStorage):
        # Those of killed gateways: of presigned files before their id was kept, and of puts.
        storage.abort_multiparts("", uploads.now_ms() / 1000 - age_s)
    return len(old)


def _older(uploads: Uploads, prefix: str, age_s: int) -> Iterator[StoredObject]:
    before_s = uploads.now_ms() / 1000 - age_s
    return (found for found in uploads.storage.list(prefix) if found.modified_at < before_s)
