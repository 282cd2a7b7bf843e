"""Entries: only this module adds to the ledger, its balances, roll-ups and chains of receipts.

An entry moves an amount from one account to another, so all entries together sum to zero. Posting
locks the ledger's head: one poster works at a time, and entries are numbered in commit order.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.accounts.tables import tenants
from server.billing.months import month_of, next_month
from server.billing.rating import FREE, TokenAmounts
from server.billing.receipts.receipt import (
    GENESIS,
    SPEND_KINDS,
    EntryKind,
    Receipt,
    int_of,
    sha256_of,
    tenant_account,
)
from server.billing.receipts.rows import NO_EVENT, receipt_of
from server.billing.receipts.signing import Signer
from server.billing.tables import (
    entries,
    ledger_head,
    monthly_spend,
    statements,
    tenant_accounts,
    usage_days,
    usage_rollups,
)
from server.database.upsert import upsert
from server.text.times import DAY_MS, HOUR_MS

_MB_S = 10**6 * 1000
"""Bytes times milliseconds in a megabyte-second (10^6 bytes for a second)."""


# Built once, since building a statement takes as long as running it.
_LOCKED_HEAD = (
    sa.select(ledger_head.c.last_entry_id).where(ledger_head.c.name == "ledger").with_for_update()
)
_MOVE_HEAD = (
    sa.update(ledger_head)
    .where(ledger_head.c.name == "ledger")
    .values(last_entry_id=sa.bindparam("last_id"))
)
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_CHAINS = sa.select(tenant_accounts).where(tenant_accounts.c.tenant_id.in_(_IDS))
_NAMES = sa.select(tenants.c.tenant_id, tenants.c.name).where(tenants.c.tenant_id.in_(_IDS))
_ISSUED = (
    sa.select(statements.c.tenant_id, sa.func.max(statements.c.period).label("period"))
    .where(statements.c.tenant_id.in_(_IDS))
    .group_by(statements.c.tenant_id)
)
_INSERT_ENTRY = sa.insert(entries)


@functools.cache
def _write_accounts(dialect: str) -> sa.Executable:
    insert = upsert(dialect, tenant_accounts)
    names = ("balance_nanousd", "receipt_seq", "receipt_sha256")
    return insert.on_conflict_do_update(
        index_elements=["tenant_id"], set_={name: insert.excluded[name] for name in names}
    )


@functools.cache
def _add(dialect: str, table: sa.Table) -> sa.Executable:
    """An INSERT of rows whose sums are added to those of the rows with their keys."""
    insert = upsert(dialect, table)
    sums = [column for column in table.c if not column.primary_key]
    return insert.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={column.name: column + insert.excluded[column.name] for column in sums},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An entry before it has a number.

    at_ms: end of the request or stretch of storage that is charged. A correction has the time of
    the entry that it reverses, a credit or payment the time of its posting.
    event: columns of the usage or kept event that is charged, and of its price, by the names that
    `receipts.rows.receipt_of` reads.
    parts: the parts of a usage event's amount.
    """

    kind: EntryKind
    tenant_id: str
    debit_account: str
    credit_account: str
    amount_nanousd: int
    at_ms: int
    price_version: int | None = None
    reverses_entry_id: int | None = None
    memo: str | None = None
    idempotency_key: str | None = None
    event: Mapping[str, Any] = field(default_factory=dict)
    parts: TokenAmounts = FREE

    @classmethod
    def charge(cls, kind: EntryKind, tenant_id: str, amount_nanousd: int, **fields: Any) -> "Draft":
        """Draft an entry for an amount that a tenant owes."""
        return cls(
            kind=kind,
            tenant_id=tenant_id,
            debit_account=tenant_account(tenant_id),
            credit_account=f"revenue/{kind}",
            amount_nanousd=amount_nanousd,
            **fields,
        )


_OF_DRAFT = tuple(field.name for field in fields(Draft) if field.name in entries.c)


def post_entries(
    conn: Connection, signer: Signer, drafts: Sequence[Draft], now_ms: int
) -> list[Receipt]:
    """Number, chain, sign and insert entries, and update all sums. Returns receipts in that order.

    Locks the ledger's head until the transaction ends.
    """
    if not drafts:
        return []
    last_id = lock_ledger(conn)
    conn.execute(_MOVE_HEAD, {"last_id": last_id + len(drafts)})
    tenant_ids = sorted({draft.tenant_id for draft in drafts})
    chains = _chains(conn, tenant_ids)
    names = {row.tenant_id: row.name for row in conn.execute(_NAMES, {"ids": tenant_ids})}
    issued = conn.execute(_ISSUED, {"ids": tenant_ids})
    first_open = {row.tenant_id: next_month(row.period) for row in issued}
    receipts: list[Receipt] = []
    rows: list[dict[str, Any]] = []
    for number, draft in enumerate(drafts, start=last_id + 1):
        chain = chains[draft.tenant_id]
        row = {
            **{name: getattr(draft, name) for name in _OF_DRAFT},
            "entry_id": number,
            "tenant_name": names.get(draft.tenant_id),
            "posted_at_ms": now_ms,
            # Its own month's statement, or the first after all that are issued.
            "period": max(month_of(draft.at_ms), first_open.get(draft.tenant_id, "")),
            "receipt_seq": chain["receipt_seq"] + 1,
            "prev_sha256": chain["receipt_sha256"],
            "signing_key": signer.key_id,
        }
        receipt = receipt_of({**NO_EVENT, **draft.event, **row, "ended_at_ms": draft.at_ms})
        sha256 = sha256_of(receipt)
        chain["balance_nanousd"] -= int_of(receipt, "amount_nanousd")
        chain |= {"receipt_seq": row["receipt_seq"], "receipt_sha256": sha256}
        seal = {"sha256": sha256, "signature": signer.sign(sha256)}
        receipts.append(receipt | seal)
        rows.append(row | seal)
    conn.execute(_INSERT_ENTRY, rows)
    conn.execute(_write_accounts(conn.dialect.name), list(chains.values()))
    _add_to_spend(conn, receipts, drafts)
    _add_to_rollups(conn, list(zip(receipts, drafts, strict=True)))
    return receipts


def insert_events(
    conn: Connection,
    table: sa.Table,
    drafts: Sequence[Draft],
    receipts: Sequence[Receipt],
    now_ms: int,
) -> None:
    """Insert the events of entries that the same transaction has just posted."""
    rows = [
        {
            **draft.event,
            "event_id": receipt["entry_id"],
            "amount_nanousd": draft.amount_nanousd,
            "posted_at_ms": now_ms,
        }
        for draft, receipt in zip(drafts, receipts, strict=True)
    ]
    if rows:
        names = table.c.keys()
        conn.execute(sa.insert(table), [{name: row[name] for name in names} for row in rows])


def lock_ledger(conn: Connection) -> int:
    """Lock out all other posters until the transaction ends, and return the last entry id."""
    last_id: int | None = conn.scalar(_LOCKED_HEAD)
    if last_id is None:
        insert = upsert(conn.dialect.name, ledger_head).values(name="ledger", last_entry_id=0)
        conn.execute(insert.on_conflict_do_nothing())
        last_id = conn.scalar(_LOCKED_HEAD)
        assert last_id is not None
    return last_id


def _chains(conn: Connection, tenant_ids: list[str]) -> dict[str, dict[str, Any]]:
    """Return rows of tenant_accounts by tenant, of those without one the row before an entry."""
    new = {"balance_nanousd": 0, "receipt_seq": 0, "receipt_sha256": GENESIS}
    chains = {tenant_id: {"tenant_id": tenant_id, **new} for tenant_id in tenant_ids}
    rows = conn.execute(_CHAINS, {"ids": tenant_ids}).mappings()
    return chains | {row["tenant_id"]: dict(row) for row in rows}


def _add_to_spend(conn: Connection, receipts: Sequence[Receipt], drafts: Sequence[Draft]) -> None:
    """Add entries to what was spent in the months that they are for."""
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for receipt, draft in zip(receipts, drafts, strict=True):
        if draft.kind in SPEND_KINDS:
            sums[draft.tenant_id, month_of(draft.at_ms)] += int_of(receipt, "amount_nanousd")
    spent = {key: {"amount_nanousd": amount} for key, amount in sums.items() if amount}
    _add_sums(conn, monthly_spend, spent)


def _add_to_rollups(conn: Connection, posted: Sequence[tuple[Receipt, Draft]]) -> None:
    """Add entries to the roll-ups of their hours and to the sums of their days."""
    sums: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for receipt, draft in posted:
        key = (
            draft.tenant_id,
            draft.at_ms - draft.at_ms % HOUR_MS,
            draft.kind,
            receipt["key_id"] or "",
            receipt["model"] or "",
            receipt["adapter_digest"] or "",
        )
        sums[key].update(rollup_values(receipt, draft.parts))
    _add_sums(conn, usage_rollups, sums)
    _add_to_days(conn, sums)


def _add_to_days(conn: Connection, rollups: Mapping[tuple[Any, ...], Counter[str]]) -> None:
    """Add sums of hours to those of their days. rollups: by the key of usage_rollups."""
    days: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for (tenant_id, hour_ms, kind, key_id, model, _), sums in rollups.items():
        names = {"kind": kind}
        if kind in SPEND_KINDS:
            names |= {"key": key_id, "model": model}
        for dimension, name in names.items():
            days[tenant_id, dimension, hour_ms - hour_ms % DAY_MS, name].update(sums)
    _add_sums(conn, usage_days, days)


def _add_sums(
    conn: Connection, table: sa.Table, sums: Mapping[tuple[Any, ...], Mapping[str, int]]
) -> None:
    """Add sums to those of a table's rows. sums: by the columns of its primary key."""
    names = [column.name for column in table.primary_key]
    # The rows are sorted, so that posters lock them in the same order and cannot deadlock.
    rows = [dict(zip(names, key, strict=True)) | dict(sums[key]) for key in sorted(sums)]
    if rows:
        conn.execute(_add(conn.dialect.name, table), rows)


def rollup_values(receipt: Receipt, parts: TokenAmounts) -> dict[str, int]:
    """Return the numbers that one entry adds to its roll-up."""
    return {
        "num_requests": int(receipt["kind"] == "usage" and not receipt["is_failed"]),
        "num_failed_requests": int(bool(receipt["is_failed"])),
        "prompt_tokens": int_of(receipt, "prompt_tokens"),
        "cached_tokens": int_of(receipt, "cached_tokens"),
        "completion_tokens": int_of(receipt, "completion_tokens"),
        "kept_mb_s": int_of(receipt, "size_bytes") * int_of(receipt, "duration_ms") // _MB_S,
        "cached_amount_nanousd": parts.cached,
        "completion_amount_nanousd": parts.completion,
        "amount_nanousd": int_of(receipt, "amount_nanousd"),
    }
