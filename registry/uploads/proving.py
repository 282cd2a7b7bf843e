"""Claims on proofs: of gateways that serve the same uploads, one alone has an engine prove each."""

from sqlalchemy import ColumnElement, Connection, or_, select, update

from registry.tables import uploads
from registry.uploads.rows import PROVING, Upload, is_of, to_upload


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


def _is_free(now_ms: int) -> ColumnElement[bool]:
    """Condition that no claim is in force."""
    return or_(uploads.c.proving_until_ms.is_(None), uploads.c.proving_until_ms <= now_ms)
