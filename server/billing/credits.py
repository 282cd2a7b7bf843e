"""Entries that an operator posts by hand (credits, payments, corrections), and tenants' balances.

An entry is posted once for its idempotency key, however often it is requested.
"""

from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.audit import record_audit
from server.billing import ledger
from server.billing.entries import Draft, lock_ledger, post_entries
from server.billing.rating import format_usd
from server.billing.receipts.receipt import UNDOING, Receipt, tenant_account
from server.billing.receipts.rows import sealed_receipt, select_receipts
from server.billing.receipts.signing import Signer
from server.billing.tables import entries, holds, tenant_accounts
from server.faults import Conflict, Invalid, NotFound

CreditKind = Literal["credit", "payment"]

_FROM: dict[CreditKind, str] = {"credit": "expense/credit", "payment": "cash/payment"}


class IdempotencyKeyReused(Invalid):
    """The idempotency key was used before for a different entry."""

    default_code = "idempotency_key_reused"

    def __init__(self) -> None:
        message = "This Idempotency-Key has posted something else; use a new one for each entry."
        super().__init__(message, param="Idempotency-Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A tenant's balance.

    balance_nanousd: sum of the tenant's entries; a negative balance is owed.
    held_nanousd: sum of the open holds of its requests.
    """

    balance_nanousd: int
    held_nanousd: int

    @property
    def available_nanousd(self) -> int:
        return self.balance_nanousd - self.held_nanousd


def balance_of(conn: Connection, tenant_id: str) -> Balance:
    account = sa.select(tenant_accounts.c.balance_nanousd)
    balance = conn.scalar(account.where(tenant_accounts.c.tenant_id == tenant_id))
    held = sa.select(sa.func.coalesce(sa.func.sum(holds.c.amount_nanousd), 0)).where(
        holds.c.tenant_id == tenant_id,
        # A literal, as in the condition of the partial index: planners do not match a parameter.
        holds.c.state == sa.literal_column("'open'"),
    )
    return Balance(balance_nanousd=balance or 0, held_nanousd=int(conn.execute(held).scalar_one()))


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
    amount = receipt["amount_nanousd"]
    assert isinstance(amount, int)
    action, tenant_id = f"ledger.{receipt['kind']}", str(receipt["tenant_id"])
    memo = f": {receipt['memo']}" if receipt["memo"] else ""
    detail = f"entry {receipt['entry_id']}, {format_usd(amount)} dollars{memo}"
    record_audit(conn, tenant_id, action, detail, at_ms=now_ms, actor="operator")
