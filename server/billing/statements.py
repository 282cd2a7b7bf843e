"""Statements: a tenant's total of a month, issued when the month is over, signed, never changed.

An entry that is posted for a month after its statement is on the statement of a later month.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import record_audit
from registry.errors import Conflict
from registry.tables import adapters
from server.accounts.tables import tenants
from server.billing.entries import lock_ledger
from server.billing.months import end_of, month_before, month_of
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.receipts.rows import SIGNED_AMOUNT, is_tenants, read_receipts, select_receipts
from server.billing.receipts.signing import Signer
from server.billing.statement_figures import SCHEMA, StatementFigures, canonical, sha256_of
from server.billing.storage_charges import posted_until_ms
from server.billing.tables import IS_OPEN, entries, holds, statements, tenant_accounts
from server.database.clock import database_now_ms
from server.database.database import Database
from server.database.pages import PAGE_SIZE
from server.text.json_object import JsonObject
from server.text.times import rfc3339

GRACE_MS = 3_600_000
"""Shortest wait after a month's end, in which its last requests are posted."""
MAX_GRACE_MS = 24 * GRACE_MS
"""Longest wait after a month's end; requests settled later go on the next statement."""
MAX_PERIODS = 1200
"""Most months of one tenant that a query returns."""

_TENANTS_PER_PAGE = 100
_MAX_OVERDUE = 1000
"""Overdue statements that a look counts."""


@dataclass(frozen=True, slots=True)
class Statement:
    """An issued statement. document: canonical JSON, as it was signed."""

    tenant_id: str
    period: str
    issued_at_ms: int
    num_entries: int
    total_nanousd: int
    document: str
    sha256: str
    signing_key: str
    signature: str

    @property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.document)
        return values

    @property
    def spent_nanousd(self) -> int:
        return int(self.values["spent_nanousd"])


@dataclass(frozen=True, slots=True)
class OpenPeriod:
    """The figures so far of a month without a statement. totals: (entries, amount) by kind."""

    tenant_id: str
    period: str
    totals: dict[str, tuple[int, int]]
    opening_balance_nanousd: int

    @property
    def num_entries(self) -> int:
        return sum(count for count, _ in self.totals.values())

    @property
    def total_nanousd(self) -> int:
        return sum(amount for _, amount in self.totals.values())

    @property
    def spent_nanousd(self) -> int:
        return sum(amount for kind, (_, amount) in self.totals.items() if kind in SPEND_KINDS)


class Statements:
    """Issues statements.

    Receipts are summed in short reads, and only the last of them under the ledger's lock: no entry
    can come in between, and nobody waits for a long month.
    """

    def __init__(
        self,
        database: Database,
        signer: Signer,
        *,
        now_ms: Callable[[Connection], int] = database_now_ms,
        note_waits: Callable[[dict[str, float]], None] = lambda waits: None,
    ) -> None:
        self._database = database
        self._signer = signer
        self._now_ms = now_ms
        self._note_waits = note_waits

    async def turn(self) -> None:
        """Look what waits, then issue all due statements in a thread. Raises LedgerUnavailable."""
        # The look comes first, since a statement that cannot be issued ends the turn.
        self._note_waits(await self._database.read(lambda conn: _look(conn, self._now_ms(conn))))
        await asyncio.to_thread(self.issue_due)

    def issue_due(self) -> int:
        """Issue the statements of months that are over and settled. Returns how many."""
        count, after = 0, ""
        while True:

            def look(conn: Connection, after: str = after) -> tuple[list[tuple[str, str]], str]:
                return _due(conn, after, self._now_ms(conn))

            due, after = self._database.read_sync(look)
            for tenant_id, period in due:
                self.issue(tenant_id, period)
            count += len(due)
            if not after:
                return count

    def issue(self, tenant_id: str, period: str, *, actor: str = "gateway") -> Statement:
        """Return the statement of a month, issuing it if it is not issued.

        Raises Conflict if the month is not over.
        """
        figures = StatementFigures()
        while self._database.read_sync(lambda c: _add_page(c, tenant_id, period, figures)):
            pass
        return self._database.write_sync(
            lambda conn: self._insert(conn, tenant_id, period, figures.copy(), actor)
        )

    def _insert(
        self,
        conn: Connection,
        tenant_id: str,
        period: str,
        figures: StatementFigures,
        actor: str,
    ) -> Statement:
        """Lock the ledger, add the receipts posted since the reads, and insert the statement."""
        lock_ledger(conn)
        now_ms = self._now_ms(conn)
        if now_ms < end_of(period):
            # Its figures still change.
            message = f"{period} is not over; its statement can be issued after its last day."
            raise Conflict(message, code="period_not_over", param="period")
        if (issued := get_statement(conn, tenant_id, period)) is not None:
            return issued
        while _add_page(conn, tenant_id, period, figures):
            pass
        opening, document = opening_balance(conn, tenant_id), figures.document()
        values = {
            "schema": SCHEMA,
            "tenant_id": tenant_id,
            "period": period,
            "issued_at": rfc3339(now_ms),
            "currency": "USD",
            **_addressee(conn, tenant_id),
            "adapter_names": _adapter_names(conn, document["lines"]),
            "opening_balance_nanousd": opening,
            **document,
            "closing_balance_nanousd": opening + figures.total_nanousd,
            "signing_key": self._signer.key_id,
        }
        sha256 = sha256_of(values)
        statement = Statement(
            tenant_id=tenant_id,
            period=period,
            issued_at_ms=now_ms,
            num_entries=figures.num_entries,
            total_nanousd=figures.total_nanousd,
            document=canonical(values).decode(),
            sha256=sha256,
            signing_key=self._signer.key_id,
            signature=self._signer.sign(sha256),
        )
        row = {name: getattr(statement, name) for name in Statement.__slots__}
        conn.execute(sa.insert(statements).values(**row))
        detail = f"{period}, sha256 {sha256}"
        record_audit(conn, tenant_id, "statement.issue", detail, at_ms=now_ms, actor=actor)
        return statement


def get_statement(conn: Connection, tenant_id: str, period: str) -> Statement | None:
    of = statements.c
    query = sa.select(statements).where(of.tenant_id == tenant_id, of.period == period)
    row = conn.execute(query).first()
    return Statement(**row._mapping) if row else None


def list_statements(
    conn: Connection, tenant_id: str, limit: int, before: str | None = None
) -> list[Statement]:
    """List a tenant's statements, newest month first.   before: a month, to list those of older."""
    query = sa.select(statements).where(statements.c.tenant_id == tenant_id)
    if before is not None:
        query = query.where(statements.c.period < before)
    rows = conn.execute(query.order_by(statements.c.period.desc()).limit(limit))
    return [Statement(**row._mapping) for row in rows]


def open_periods(conn: Connection, tenant_id: str) -> list[str]:
    """Return the months in which a tenant has entries but no statement, oldest first."""
    query = sa.select(statements.c.period).where(statements.c.tenant_id == tenant_id)
    issued = set(conn.scalars(query.limit(MAX_PERIODS)))
    # The query steps from month to month in the index; a plain DISTINCT would read every entry.
    months = sa.select(_first_after(tenant_id, "").label("period")).cte(recursive=True)
    following = _first_after(tenant_id, months.c.period)
    months = months.union_all(sa.select(following).where(months.c.period.is_not(None)))
    found = conn.scalars(sa.select(months.c.period).limit(MAX_PERIODS))
    return [period for period in found if period is not None and period not in issued]


def open_period(conn: Connection, tenant_id: str, period: str) -> OpenPeriod:
    """Return the figures so far of a month without a statement."""
    of = entries.c
    query = (
        sa.select(of.kind, sa.func.count(), sa.func.sum(SIGNED_AMOUNT))
        .group_by(of.kind)
        .order_by(of.kind)
    )
    query = query.where(of.tenant_id == tenant_id, of.period == period)
    # PostgreSQL sums integers as decimals.
    totals = {kind: (count, int(total)) for kind, count, total in conn.execute(query)}
    return OpenPeriod(tenant_id, period, totals, opening_balance(conn, tenant_id))


def opening_balance(conn: Connection, tenant_id: str) -> int:
    """Return the amount owed after all issued statements: the last one's closing balance."""
    total = sa.func.coalesce(sa.func.sum(statements.c.total_nanousd), 0)
    return int(conn.scalar(sa.select(total).where(statements.c.tenant_id == tenant_id)) or 0)


def tenants_with(conn: Connection, period: str, tenant_id: str | None, limit: int) -> list[str]:
    """Return tenants that have entries in a month but no statement of it, at most `limit`.

    tenant_id: look at that tenant only.
    """
    account = tenant_accounts.c.tenant_id
    query = sa.select(account).where(
        is_tenants(account), _has(entries, account, period), ~_has(statements, account, period)
    )
    if tenant_id is not None:
        query = query.where(account == tenant_id)
    return list(conn.scalars(query.order_by(account).limit(limit)))


def overdue(conn: Connection, now_ms: int) -> tuple[str, list[str]]:
    """Return the last month that should be closed, and tenants without its statement: at most
    _MAX_OVERDUE.
    """
    period = month_before(month_of(now_ms - MAX_GRACE_MS))
    return period, tenants_with(conn, period, None, _MAX_OVERDUE)


def _look(conn: Connection, now_ms: int) -> dict[str, float]:
    """Return what waits too long, by the names of the metrics."""
    first_ms = conn.scalar(sa.select(sa.func.min(holds.c.expires_at_ms)).where(IS_OPEN))
    return {
        "waits_last_look_timestamp_seconds": now_ms / 1000,
        "oldest_expired_hold_seconds": max(0, now_ms - (first_ms or now_ms)) / 1000,
        "overdue_statements": len(overdue(conn, now_ms)[1]),
    }


def _due(conn: Connection, after_tenant_id: str, now_ms: int) -> tuple[list[tuple[str, str]], str]:
    """Return the due (tenant, month) of a page of tenants, and the next page's place or ""."""
    account = tenant_accounts.c.tenant_id
    query = sa.select(account).where(account > after_tenant_id, is_tenants(account))
    tenant_ids = list(conn.scalars(query.order_by(account).limit(_TENANTS_PER_PAGE)))
    due = [
        (tenant_id, period)
        for tenant_id in tenant_ids
        for period in open_periods(conn, tenant_id)
        if _is_settled(conn, tenant_id, end_of(period), now_ms)
    ]
    return due, tenant_ids[-1] if len(tenant_ids) == _TENANTS_PER_PAGE else ""


def _is_settled(conn: Connection, tenant_id: str, end_ms: int, now_ms: int) -> bool:
    """Whether no more entries of a month are expected.

    Every request has an open hold until its engine's journal is settled past the request's end, or
    past any time at which it could end. So all requests of a month are posted when no hold from
    before its end is open. Storage of the last day is posted after that day, by another chore.
    After MAX_GRACE_MS neither is waited for.
    """
    if now_ms < end_ms + GRACE_MS:
        return False
    query = sa.select(holds.c.request_id).where(
        holds.c.tenant_id == tenant_id, IS_OPEN, holds.c.created_at_ms < end_ms
    )
    if now_ms >= end_ms + MAX_GRACE_MS:
        return True
    kept_ms = posted_until_ms(conn)
    return (kept_ms is None or kept_ms >= end_ms) and conn.scalar(query.limit(1)) is None


def _add_page(conn: Connection, tenant_id: str, period: str, figures: StatementFigures) -> bool:
    """Add the next page of a month's receipts. Returns whether there were any."""
    of, last_seq = entries.c, figures.last_receipt_seq or 0
    query = select_receipts().where(
        of.tenant_id == tenant_id, of.period == period, of.receipt_seq > last_seq
    )
    receipts = read_receipts(conn, query.limit(PAGE_SIZE))
    for receipt in receipts:
        figures.add(receipt)
    return bool(receipts)


def _addressee(conn: Connection, tenant_id: str) -> dict[str, str | None]:
    """Return a tenant's legal name and address as they are now."""
    query = sa.select(tenants.c.legal_name, tenants.c.address)
    row = conn.execute(query.where(tenants.c.tenant_id == tenant_id)).mappings().first()
    return dict(row) if row else {"legal_name": None, "address": None}


def _adapter_names(conn: Connection, lines: Sequence[JsonObject]) -> dict[str, str]:
    """Return the names that the adapters on lines without a model have now, by id."""
    ids = {line["adapter_id"] for line in lines if line["model"] is None} - {None}
    query = sa.select(adapters.c.adapter_id, adapters.c.name).order_by(adapters.c.adapter_id)
    rows = conn.execute(query.where(adapters.c.adapter_id.in_(ids)))
    return {adapter_id: name for adapter_id, name in rows}


def _first_after(tenant_id: str, period: Any) -> sa.ScalarSelect[Any]:
    of = entries.c
    query = sa.select(sa.func.min(of.period)).where(of.tenant_id == tenant_id, of.period > period)
    return query.scalar_subquery()


def _has(table: sa.Table, account: sa.Column[str], period: str) -> sa.Exists:
    return sa.exists().where(table.c.tenant_id == account, table.c.period == period)
