"""Reads receipts from the database: entries, each with the event and the price it is made of.

The same function makes a receipt when it is posted and when it is read again, from rows with the
same names, so that an exported receipt is the one that was signed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from engine.wire.messages import PROOF_TENANT
from server.billing.rating import format_usd
from server.billing.receipts.receipt import CHARGES, Receipt, tenant_account
from server.billing.tables import entries, kept_events, price_versions, usage_events
from server.database.pages import pages
from server.text.times import rfc3339

_SAME = (
    "entry_id", "kind", "tenant_id", "tenant_name", "debit_account", "credit_account",
    "reverses_entry_id", "memo", "period", "price_version", "receipt_seq", "prev_sha256",
    "signing_key",
)  # fmt: skip
_OF_USAGE = (
    "request_id", "key_id", "model", "base_revision", "prompt_tokens", "cached_tokens",
    "completion_tokens", "finish_reason", "stop_cause", "is_failed", "output_sha256",
    "hold_nanousd", "engine_id", "journal_seq",
)  # fmt: skip
_OF_KEPT = ("tier", "size_bytes", "slabs", "duration_ms")
_OF_BOTH = ("adapter_id", "adapter_version", "adapter_digest")
TOKEN_PRICES = ("prompt_nanousd", "cached_nanousd", "completion_nanousd")
KEPT_KINDS = CHARGES[1:]

NO_EVENT: Mapping[str, Any] = dict.fromkeys(
    (*_OF_USAGE, *_OF_KEPT, *_OF_BOTH, *TOKEN_PRICES, "started_at_ms", "first_token_at_ms")
)
"""The columns of an event and its prices, all None, for an entry without an event."""

SIGNED_AMOUNT = sa.case(
    (
        entries.c.debit_account == sa.literal(tenant_account("")) + entries.c.tenant_id,
        entries.c.amount_nanousd,
    ),
    else_=-entries.c.amount_nanousd,
)
"""An entry's amount as its tenant sees it: a charge is positive."""


def is_tenants(tenant_id: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Whether a row belongs to a tenant, and not to a proof, whose rows belong to nobody."""
    return tenant_id != PROOF_TENANT


def receipt_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Make a receipt without its seal.

    row: columns named as in `select_receipts`, with an unsigned amount_nanousd. The receipt's
    amount is signed as the tenant sees it: a charge is positive.
    """
    kind = row["kind"]
    is_charged = row["debit_account"] == tenant_account(row["tenant_id"])
    amount = row["amount_nanousd"] if is_charged else -row["amount_nanousd"]
    is_usage, is_kept = kind == "usage", kind in KEPT_KINDS
    receipt = {name: row[name] for name in _SAME}
    receipt |= {name: row[name] if is_usage else None for name in (*_OF_USAGE, *TOKEN_PRICES)}
    receipt |= {name: row[name] if is_kept else None for name in _OF_KEPT}
    receipt |= {name: row[name] for name in _OF_BOTH}
    receipt["kept_nanousd"] = row[f"{kind}_nanousd"] if is_kept else None
    receipt["amount_nanousd"] = amount
    receipt["amount_usd"] = format_usd(amount)
    if (is_failed := receipt["is_failed"]) is not None:
        receipt["is_failed"] = bool(is_failed)
    for name in ("started_at", "first_token_at", "ended_at", "posted_at"):
        receipt[name] = rfc3339(row[f"{name}_ms"])
    return receipt


def sealed_receipt(row: Mapping[str, Any]) -> Receipt:
    return receipt_of(row) | {"sha256": row["sha256"], "signature": row["signature"]}


def select_receipts() -> sa.Select[Any]:
    """Select every entry with its event and price, by the names that `receipt_of` reads."""
    usage, kept, price = usage_events.c, kept_events.c, price_versions.c
    columns: list[sa.ColumnElement[Any]] = [
        entries.c[name] for name in (*_SAME, "amount_nanousd", "sha256", "signature")
    ]
    columns += [entries.c.at_ms.label("ended_at_ms"), entries.c.posted_at_ms]
    columns += [usage[name] for name in (*_OF_USAGE, "first_token_at_ms")]
    columns += [kept[name] for name in _OF_KEPT]
    both = (*_OF_BOTH, "started_at_ms")
    columns += [sa.func.coalesce(usage[name], kept[name]).label(name) for name in both]
    columns += [price[name] for name in TOKEN_PRICES]
    columns += [price[f"{kind}_nanousd"] for kind in KEPT_KINDS]
    joined = entries.outerjoin(usage_events, usage.event_id == entries.c.entry_id)
    joined = joined.outerjoin(kept_events, kept.event_id == entries.c.entry_id)
    joined = joined.outerjoin(price_versions, price.price_version == entries.c.price_version)
    return sa.select(*columns).select_from(joined)


def read_receipts(conn: Connection, query: sa.Select[Any]) -> list[Receipt]:
    """Read receipts of one tenant, in the order of their seqs."""
    rows = conn.execute(query.order_by(entries.c.receipt_seq)).mappings()
    return [sealed_receipt(dict(row)) for row in rows]


def iterate_receipts(conn: Connection, query: sa.Select[Any]) -> Iterator[Receipt]:
    """Yield all receipts of a query. One connection is held meanwhile; pages are read from it."""
    for page in pages(conn, query, entries.c.tenant_id, entries.c.receipt_seq):
        yield from (sealed_receipt(dict(row)) for row in page)
