"""Acknowledgements: an operator accepts a finding, and a signed entry books its difference, once.

These entries are a chain of their own, of no tenant, so that no tenant's bill changes. Actor and
reason are in the audit log.
"""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import record_audit
from registry.errors import Conflict, NotFound
from server.billing.audit.report import Report
from server.billing.entries import Draft, lock_ledger, post_entries
from server.billing.receipts.receipt import Receipt, tenant_account
from server.billing.receipts.signing import Signer
from server.billing.receipts.signing_keys import record_key
from server.billing.tables import acknowledgements

BOOKS = "books"
"""Stands for a tenant's id in the entries that book differences."""


def acknowledged_ids(conn: Connection) -> frozenset[str]:
    return frozenset(conn.scalars(sa.select(acknowledgements.c.finding_id)))


def acknowledge(
    conn: Connection,
    signer: Signer,
    report: Report,
    finding_id: str,
    *,
    reason: str,
    now_ms: int,
) -> Receipt:
    """Book a finding of a report that was just made, and return the entry's receipt.

    The amount is the finding's difference, less what was booked when it was smaller; it is 0 if no
    price is known, and the memo says so. Raises NotFound; Conflict if it is acknowledged already.
    """
    lock_ledger(conn)
    if finding_id in acknowledged_ids(conn):
        raise Conflict(f"The finding {finding_id} is acknowledged already.")
    finding = next((f for f in report.findings if f.finding_id == finding_id), None)
    if finding is None:
        raise NotFound(f"The audit has no finding {finding_id} now; its report has their ids.")
    earlier = sa.select(sa.func.sum(acknowledgements.c.difference_nanousd))
    booked = int(conn.scalar(earlier.filter_by(finding=str(finding))) or 0)
    amount = finding.difference_nanousd - booked
    accounts = ("expense/difference", tenant_account(BOOKS))
    debit, credit = accounts if amount >= 0 else accounts[::-1]
    unpriced = "" if amount else "no price is known; "
    draft = Draft(
        kind="difference",
        tenant_id=BOOKS,
        debit_account=debit,
        credit_account=credit,
        amount_nanousd=abs(amount),
        at_ms=now_ms,
        memo=f"finding {finding_id}: {unpriced}{reason}"[:512],
    )
    record_key(conn, signer.public, now_ms)
    receipt = post_entries(conn, signer, [draft], now_ms)[0]
    values = {"finding_id": finding_id, "finding": str(finding), "difference_nanousd": amount}
    conn.execute(sa.insert(acknowledgements).values(**values, entry_id=receipt["entry_id"]))
    detail = f"{finding}; entry {receipt['entry_id']}: {reason}"
    action = "audit.acknowledge"
    record_audit(conn, None, action, detail, target=finding_id, at_ms=now_ms, actor="operator")
    return receipt
