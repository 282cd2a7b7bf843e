"""Compares the sums that the ledger keeps with new sums over its entries, a page at a time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from server.billing.audit.entries import id_windows
from server.billing.audit.report import UNREADABLE, Finding, Scope, differences
from server.billing.months import month_of
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.receipts.rows import SIGNED_AMOUNT
from server.billing.tables import (
    USAGE_SUMS,
    entries,
    ledger_head,
    monthly_spend,
    tenant_accounts,
    usage_days,
    usage_rollups,
)
from server.billing.usage import Dimension, Selection, Span, entry_rows
from server.database.pages import pages
from server.text.times import DAY_MS

_DIMENSIONS_OF_DAYS = ("kind", "key", "model")
_DIMENSIONS = ("hour_ms", "kind", "key_id", "model", "adapter_digest")


def check_entry_ids(scope: Scope) -> Iterator[Finding]:
    """Check that entries are numbered without a gap up to the ledger's head."""
    entry_id, last_id = entries.c.entry_id, 0
    for first, last in id_windows(scope.conn, entry_id):
        is_here = entry_id.between(first, last)
        count = scope.conn.execute(sa.select(sa.func.count()).where(is_here)).scalar_one()
        scope.count("entry ids", count)
        if count < last - first + 1:
            before = first - 1
            for found in scope.conn.scalars(sa.select(entry_id).where(is_here).order_by(entry_id)):
                yield from _gap(before + 1, found - 1)
                before = found
        last_id = last
    head = scope.conn.scalar(sa.select(ledger_head.c.last_entry_id).filter_by(name="ledger")) or 0
    yield from _gap(last_id + 1, head)
    yield from differences(
        "entry ids", "ledger head", {"last_entry_id": (max(last_id, head), head)}
    )


def _gap(first: int, last: int) -> Iterator[Finding]:
    if first <= last:
        name = f"entry {first}" if first == last else f"entries {first} to {last}"
        yield Finding("entry ids", name, "missing below the ledger's head")


def check_accounts(scope: Scope) -> Iterator[Finding]:
    """Compare each account's balance, count and end of chain with the tenant's entries."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # balance, entries, last seq
    entry = entries.c
    for first, last in id_windows(scope.conn, entry.entry_id):
        query = sa.select(
            entry.tenant_id,
            integer_sum(SIGNED_AMOUNT),
            sa.func.count(),
            sa.func.max(entry.receipt_seq),
        )
        query = query.where(entry.entry_id.between(first, last)).group_by(entry.tenant_id)
        for tenant_id, amount, count, seq in scope.conn.execute(query):
            found = sums[tenant_id]
            found[:] = [found[0] - amount, found[1] + count, max(found[2], seq)]
    account = tenant_accounts.c
    end = sa.and_(entry.tenant_id == account.tenant_id, entry.receipt_seq == account.receipt_seq)
    query = sa.select(tenant_accounts, entry.sha256).outerjoin(entries, end)
    for page in pages(scope.conn, query, account.tenant_id):
        for row in page:
            balance, count, seq = sums.pop(row["tenant_id"], [0, 0, 0])
            pairs = {
                "balance_nanousd": (balance, row["balance_nanousd"]),
                "receipt_seq": (seq, row["receipt_seq"]),
                "number of receipts": (row["receipt_seq"], count),
                "receipt_sha256": (row["sha256"], row["receipt_sha256"]),
            }
            yield from differences("accounts", f"tenant {row['tenant_id']}", pairs)
        scope.count("accounts", len(page))
    for tenant_id in sums:
        yield Finding("accounts", f"tenant {tenant_id}", "has entries and no account")


def check_months(scope: Scope) -> Iterator[Finding]:
    """Compare the amount that each tenant was charged for each month, which budgets rely on."""
    expected: dict[tuple[str, str], int] = defaultdict(int)
    entry = entries.c
    # Sums are made by day, since the databases share no function for months; a day has one month.
    day = entry.at_ms.op("/")(sa.literal_column(str(DAY_MS)))
    charged = sa.case(
        (entry.credit_account.startswith("revenue/"), entry.amount_nanousd),
        (entry.debit_account.startswith("revenue/"), -entry.amount_nanousd),
        else_=0,
    )
    for first, last in id_windows(scope.conn, entry.entry_id):
        query = sa.select(entry.tenant_id, day, integer_sum(charged))
        query = query.where(entry.entry_id.between(first, last)).group_by(entry.tenant_id, day)
        for tenant_id, number, amount in scope.conn.execute(query):
            with suppress(*UNREADABLE):  # An impossible date: the receipt's seal is broken.
                expected[tenant_id, month_of(number * DAY_MS)] += amount
    rows = scope.conn.execute(sa.select(monthly_spend))
    found = {(row.tenant_id, row.month): row.amount_nanousd for row in rows}
    scope.count("months", len(found))
    for key in sorted(expected.keys() | found.keys()):
        pair = (expected.get(key, 0), found.get(key, 0))
        yield from differences("months", f"month {key[0]} {key[1]}", {"amount_nanousd": pair})


def check_rollups(scope: Scope) -> Iterator[Finding]:
    """Compare the sums of each hour and day with its entries; one without entries is a finding."""
    # All that have an account or a sum.
    tables = (tenant_accounts, usage_rollups, usage_days)
    all_ids = sa.union(*(sa.select(table.c.tenant_id) for table in tables)).subquery()
    for tenant_id in scope.conn.scalars(sa.select(all_ids).order_by(all_ids.c.tenant_id)).all():
        begin = _next_day(scope, tenant_id, scope.since_ms - scope.since_ms % DAY_MS)
        while begin is not None:
            end = begin + DAY_MS
            hours = _sums_of_entries(scope, tenant_id, (begin, end))
            found = _read(scope, usage_rollups, _DIMENSIONS, tenant_id, (begin, end))
            scope.count("roll-ups", len(found))
            yield from _compare("roll-ups", f"roll-up {tenant_id}", hours, found)
            is_known = usage_days.c.dimension.in_(_DIMENSIONS_OF_DAYS)  # for the index
            key = ("day_ms", "dimension", "name")
            found = _read(scope, usage_days, key, tenant_id, (begin, end), is_known)
            scope.count("days", len(found))
            yield from _compare("days", f"day {tenant_id}", _sums_of_day(begin, hours), found)
            begin = _next_day(scope, tenant_id, end)


# ---- roll-ups ----

_Sums = dict[tuple[Any, ...], tuple[int, ...]]


def _compare(check: str, subject: str, expected: _Sums, found: _Sums) -> Iterator[Finding]:
    for key in sorted(expected.keys() | found.keys()):
        name = " ".join(str(part) for part in (subject, *key) if part != "")
        yield from differences(check, name, {"sums": (expected.get(key), found.get(key))})


def _next_day(scope: Scope, tenant_id: str, begin: int) -> int | None:
    """Return the first day at or after `begin` that has an entry or a sum."""
    days = usage_days.c
    times: list[tuple[sa.Column[Any], sa.ColumnElement[bool]]] = [
        (entries.c.at_ms, sa.true()),
        (usage_rollups.c.hour_ms, sa.true()),
        *((days.day_ms, days.dimension == name) for name in _DIMENSIONS_OF_DAYS),
    ]
    firsts = [
        scope.conn.scalar(
            sa.select(sa.func.min(at)).where(at.table.c.tenant_id == tenant_id, is_one, at >= begin)
        )
        for at, is_one in times
    ]
    first = min((at_ms for at_ms in firsts if at_ms is not None), default=None)
    return None if first is None else first - first % DAY_MS


def _sums_of_entries(scope: Scope, tenant_id: str, span: Span) -> _Sums:
    keys: tuple[Dimension, ...] = ("hour", "kind", "key", "model", "adapter_digest")
    rows = entry_rows(span, keys, Selection(tenant_ids=[tenant_id])).subquery().c
    key = [rows[name] for name in keys]
    values = [integer_sum(sa.func.coalesce(rows[name], 0)) for name in USAGE_SUMS]
    query = sa.select(*key, *values).group_by(*key)
    return {tuple(row[:5]): tuple(row[5:]) for row in scope.conn.execute(query)}


def _read(
    scope: Scope,
    table: sa.Table,
    key: Sequence[str],
    tenant_id: str,
    span: Span,
    *where: sa.ColumnElement[bool],
) -> _Sums:
    """Read a tenant's sums of a day, by the columns of `key`, of which the first is a time."""
    columns, at_ms, size = table.c, table.c[key[0]], len(key)
    query = sa.select(*(columns[name] for name in (*key, *USAGE_SUMS))).where(*where)
    query = query.where(columns.tenant_id == tenant_id, at_ms >= span[0], at_ms < span[1])
    return {tuple(row[:size]): tuple(row[size:]) for row in scope.conn.execute(query)}


def _sums_of_day(day_ms: int, hours: _Sums) -> _Sums:
    """Add up the sums of a day's hours, by dimension and name."""
    sums: _Sums = {}
    for (_, kind, key_id, model, _), added in hours.items():
        for dimension, name in zip(_DIMENSIONS_OF_DAYS, (kind, key_id, model), strict=True):
            if dimension == "kind" or kind in SPEND_KINDS:
                key = (day_ms, dimension, name)
                before = sums.get(key, (0,) * len(added))
                sums[key] = tuple(a + b for a, b in zip(before, added, strict=True))
    return sums


def integer_sum(value: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    # PostgreSQL sums bigints to a numeric.
    return sa.cast(sa.func.sum(value), sa.BigInteger)
