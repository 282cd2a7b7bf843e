"""Deletion of unneeded data: parts of ended uploads, objects without a row, purged versions.

Every function does a bounded amount of work and is meant to be called repeatedly, by several
gateways at once if need be.
"""

import json
import re
from collections.abc import Iterator
from itertools import groupby, islice

from sqlalchemy import Connection, select

from registry.catalog import adapter_rows
from registry.catalog.catalog import Catalog
from registry.catalog.events import prune_events
from registry.catalog.offers import prune_offers
from registry.storage.storage import PresignedStorage, Storage, StoredObject
from registry.tables import uploads
from registry.transactions import Begin
from registry.uploads.ends import discard, end_overdue, list_undiscarded
from registry.uploads.rows import PROVING
from registry.uploads.rules import RegistryLimits

# Keys of one tenant in one query.
_BATCH = 500
_OBJECT_KEY = re.compile(r"tenants/([^/]+)/[0-9a-f]{64}")


def sweep_uploads(begin: Begin, storage: Storage, limits: RegistryLimits, now_ms: int) -> int:
    """End the uploads whose time is over, and discard the parts of ended uploads.

    Returns how many uploads were discarded.
    """
    with begin() as conn:
        end_overdue(conn, now_ms, limits.proof_ttl_s)
        ended = list_undiscarded(conn, limits.max_discards_per_sweep)
    return sum(discard(begin, storage, upload, now_ms) for upload in ended)


def sweep_objects(begin: Begin, storage: Storage, limits: RegistryLimits, now_ms: int) -> int:
    """Delete old objects that no row refers to. Returns how many.

    A canonical object is an orphan if its upload died, failed or expired between the store and the
    row, or if its last version was purged; a part is an orphan if it arrived as its upload ended.
    registry.uploads.proving explains why no object is deleted that a row comes to refer to.
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
