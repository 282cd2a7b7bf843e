"""Claims on uploads that wait for their proof: each claim lets one gateway prove one upload.

Proving uploads are not discarded, so the index on discarded_at_ms finds them, however many uploads
have ended.
"""

import json

from sqlalchemy import ColumnElement, Connection, or_, select, true, update

from registry.tables import uploads
from registry.upload_rows import PROVING, Upload, to_upload


def list_unclaimed(conn: Connection, now_ms: int, limit: int) -> list[Upload]:
    """Proving uploads of all tenants without a claim in force, oldest first."""
    query = (
        select(uploads)
        .where(uploads.c.discarded_at_ms.is_(None), uploads.c.state == PROVING, _unclaimed(now_ms))
        .order_by(uploads.c.created_at_ms)
        .limit(limit)
    )
    return [to_upload(conn, row) for row in conn.execute(query).all()]


def claim(conn: Connection, upload: Upload, now_ms: int, until_ms: int) -> bool:
    """Claim an upload until `until_ms`. False if another gateway was first, or the proof ended."""
    return _set_claim(conn, upload, until_ms, _unclaimed(now_ms))


def renew_claim(conn: Connection, upload: Upload, until_ms: int) -> bool:
    """Extend the caller's claim. False if the upload is not proving any more."""
    return _set_claim(conn, upload, until_ms, true())


def _set_claim(
    conn: Connection, upload: Upload, until_ms: int, condition: ColumnElement[bool]
) -> bool:
    claimed = conn.execute(
        update(uploads)
        .where(
            uploads.c.upload_id == upload.upload_id,
            uploads.c.tenant_id == upload.tenant_id,
            uploads.c.state == PROVING,
            condition,
        )
        .values(proving_until_ms=until_ms)
    )
    return claimed.rowcount == 1


def _unclaimed(now_ms: int) -> ColumnElement[bool]:
    return or_(uploads.c.proving_until_ms.is_(None), uploads.c.proving_until_ms <= now_ms)


def proving_object_keys(conn: Connection, tenant_id: str) -> set[str]:
    """Keys of the tenant's canonical objects that become versions if they pass their proof."""
    query = select(uploads.c.built).where(
        uploads.c.tenant_id == tenant_id, uploads.c.state == PROVING
    )
    return {json.loads(built)["object_key"] for built in conn.execute(query).scalars()}
