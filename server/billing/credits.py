"""Entries that an operator posts by hand: credits, payments, corrections.

An entry is posted once for its idempotency key, however often it is requested.
"""

from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import record_audit
from registry.errors import Conflict, Invalid, NotFound
from server.billing import ledger
from server.billing.entries import Draft, lock_ledger, post_entries
from server.billing.rating import format_usd
from server.billing.receipts.receipt import UNDOING, Receipt, int_of, tenant_account
from server.billing.receipts.rows import sealed_receipt, select_receipts
from server.billing.receipts.signing import Signer
from server.billing.tables import entries

CreditKind = Literal["credit", "payment"]

_FROM: dict[CreditKind, str] = {"credit": "expense/credit", "payment": "cash/payment"}


class IdempotencyKeyReused(Invalid):
    """The idempotency key was used before for a different entry."""

    default_code = "idempotency_key_reused"

    def __init__(self) -> None:
        message = "This Idempotency-Key has posted something else; use a new one for each entry."
        super().__init__(message, param="Idempotency-Key")


def post_credit(
    conn: Connection,
    signer: Signer,
    kind: CreditKind,
    tenant_id: str,
    amount_nanousd: int,
    *,
    memo: str | None,
    idempotency_key: str,
    now_ms: int,
) -> Receipt:
    """Add to a tenant's balance: a credit that it is given, or a payment that it made.

    Returns the receipt. Raises IdempotencyKeyReused.
    """
    assert amount_nanousd > 0
    lock_ledger(conn)
    asked = {"kind": kind, "tenant_id": tenant_id, "amount_nanousd": -amount_nanousd, "memo": memo}
    if known := _posted_with(conn, idempotency_key, asked):
        return known
    draft = Draft(
        kind=kind,
        tenant_id=tenant_id,
        debit_account=_FROM[kind],
        credit_account=tenant_account(tenant_id),
        amount_nanousd=amount_nanousd,
        at_ms=now_ms,
        memo=memo,
        idempotency_key=idempotency_key,
    )
    receipt = post_entries(conn, signer, [draft], now_ms)[0]
    _audit(conn, receipt, now_ms)
    return receipt


def post_correction(
    conn: Connection,
    signer: Signer,
    entry_id: int,
    *,
    memo: str | None,
    idempotency_key: str,
    now_ms: int,
) -> Receipt:
    """Undo an entry by posting its opposite, and return the receipt.

    Raises NotFound, Invalid, IdempotencyKeyReused, and Conflict if the entry is corrected already.
    """
    lock_ledger(conn)
    asked = {"reverses_entry_id": entry_id, "memo": memo}
    if known := _posted_with(conn, idempotency_key, asked):
        return known
    query = sa.select(entries.c.kind, entries.c.amount_nanousd)
    entry = conn.execute(query.where(entries.c.entry_id == entry_id)).first()
    if entry is None:
        raise NotFound(f"There is no entry {entry_id}.", code="entry_not_found", param="entry_id")
    if entry.kind in (*UNDOING, "difference"):
        message = f"Entry {entry_id} is a {entry.kind} and stays."
        raise Invalid(f"{message} Charges, credits and payments can be undone.", param="entry_id")
    if entry.amount_nanousd == 0:
        raise Invalid(f"Entry {entry_id} has no amount to correct.", param="entry_id")
    receipt = ledger.reverse(
        conn, signer, entry_id, memo=memo, idempotency_key=idempotency_key, now_ms=now_ms
    )
    if receipt is None:
        raise Conflict(
            f"Entry {entry_id} is corrected already.", code="already_corrected", param="entry_id"
        )
    _audit(conn, receipt, now_ms)
    return receipt


def _posted_with(conn: Connection, idempotency_key: str, asked: dict[str, Any]) -> Receipt | None:
    """Return the receipt that this key posted before, or None.

    Raises IdempotencyKeyReused if that receipt differs from `asked`.
    """
    query = select_receipts().where(entries.c.idempotency_key == idempotency_key)
    row = conn.execute(query).mappings().first()
    if row is None:
        return None
    receipt = sealed_receipt(dict(row))
    if any(receipt[name] != value for name, value in asked.items()):
        raise IdempotencyKeyReused
    return receipt


def _audit(conn: Connection, receipt: Receipt, now_ms: int) -> None:
    action, tenant_id = f"ledger.{receipt['kind']}", str(receipt["tenant_id"])
    memo = f": {receipt['memo']}" if receipt["memo"] else ""
    dollars = format_usd(int_of(receipt, "amount_nanousd"))
    detail = f"entry {receipt['entry_id']}, {dollars} dollars{memo}"
    record_audit(conn, tenant_id, action, detail, at_ms=now_ms, actor="operator")
