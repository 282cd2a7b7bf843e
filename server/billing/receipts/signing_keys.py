"""The public keys of a ledger's receipts: the current key and all earlier ones."""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.receipts.signing import PublicKey
from server.billing.tables import signing_keys
from server.database.upsert import upsert

MAX_KEYS = 1000


@dataclass(frozen=True, slots=True)
class KnownKey:
    public: PublicKey
    created_at_ms: int


def record_key(conn: Connection, public: PublicKey, now_ms: int) -> None:
    """Record a key, so that its signatures can be checked. A known key stays as it is."""
    row = {"key_id": public.key_id, "public_key": public.raw.hex(), "created_at_ms": now_ms}
    conn.execute(upsert(conn.dialect.name, signing_keys).values(row).on_conflict_do_nothing())


def list_keys(conn: Connection) -> list[KnownKey]:
    """List the recorded keys, newest first."""
    query = sa.select(signing_keys).order_by(
        signing_keys.c.created_at_ms.desc(), signing_keys.c.key_id
    )
    return [
        KnownKey(PublicKey(bytes.fromhex(row.public_key)), row.created_at_ms)
        for row in conn.execute(query.limit(MAX_KEYS))
    ]
