"""A ledger with entries of every kind and unusual texts, posted by the gateway's functions."""

import asyncio
import itertools
import random
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing import ledger
from server.billing.credits import CreditKind
from server.billing.entries import Draft, post_entries
from server.billing.exports.formats import ExportFormat, open_encoder
from server.billing.exports.pages import Place, Range, last_entry_id, place_of_entry
from server.billing.exports.stream import stream
from server.billing.receipts.receipt import UNDOING, tenant_account
from server.billing.receipts.rows import KEPT_KINDS
from server.billing.storage_stretches import Stretch, post_stretches
from server.billing.tables import entries
from server.database.database import Database
from tests.server.factories import (
    ENGINE,
    NOW_MS,
    SIGNER,
    insert_holds,
    make_end,
    make_hold,
    make_price,
    post_ends,
)

TEXTS = (
    "base", "pirate@3", "=1+1", "+1", "-1", "-1a", "@SUM(A1)", "\tx", "\rx", "'", "''quoted",
    'say "hi",\nnow', "crlf\r\nhere", "né 語 🦜", " padded ", "a,b;c", "null", "true", "0",
)  # fmt: skip
_ENDS = (
    ("stop", "eos"), ("length", "max_tokens"), ("length", "budget"), ("abort", "client"),
    ("error", "engine_failure"), ("error", "gateway_lost"), ("error", "deadline"),
)  # fmt: skip

_numbers = itertools.count()


def use(database: Database, tenant_id: str = "ten_1", count: int = 1, **fields: Any) -> None:
    """Hold and post requests that are alike. fields: as for `use_each`."""
    use_each(database, *[{"tenant_id": tenant_id, **fields}] * count)


def use_each(database: Database, *requests: Mapping[str, Any]) -> list[str]:
    """Hold and post requests, and return their ids.

    requests: fields of the end records, of which model and key_id are of the holds, and at_ms.
    """
    price = make_price(database)
    first = 1 + database.read_sync(lambda conn: ledger.settled_seq(conn, ENGINE))
    holds, records = [], []
    for seq, given in enumerate(requests, first):
        fields = {"tenant_id": "ten_1", "at_ms": NOW_MS + seq, **given}
        of_hold = {name: fields.pop(name) for name in ("model", "key_id") if name in fields}
        at = fields.pop("at_ms") / 1000
        holds.append(make_hold(price, f"r{seq}", tenant_id=fields["tenant_id"], **of_hold))
        records.append(make_end(seq, f"r{seq}", at=at, **fields))
    insert_holds(database, *holds)
    post_ends(database, *records)
    return [record.request_id for record in records]


def keep(
    database: Database, tenant_id: str = "ten_1", at_ms: int = NOW_MS, now_ms: int = NOW_MS,
    **fields: Any,
) -> None:  # fmt: skip
    """Charge for bytes of an adapter that were kept until `at_ms`, by default its storage."""
    kept = {
        "kind": "storage", "tier": "store", "adapter_digest": "d" * 64, "size_bytes": 12_345_678,
        "duration_ms": 3_599_993, **fields,
    }  # fmt: skip
    stretch = Stretch(
        source="test", source_id=str(next(_numbers)), tenant_id=tenant_id, adapter_id="ada_1",
        adapter_version=3, started_at_ms=at_ms - kept["duration_ms"], at_ms=at_ms, **kept,
    )  # fmt: skip
    database.write_sync(lambda conn: post_stretches(conn, SIGNER, [stretch], now_ms))


def give(
    database: Database, kind: CreditKind, tenant_id: str = "ten_1", amount_nanousd: int = 1000,
    at_ms: int = NOW_MS, now_ms: int = NOW_MS, memo: str | None = None,
) -> None:  # fmt: skip
    """Post a credit or a payment of any time."""
    account = {"credit": "expense/credit", "payment": "cash/payment"}[kind]
    draft = Draft(
        kind=kind, tenant_id=tenant_id, debit_account=account,
        credit_account=tenant_account(tenant_id), amount_nanousd=amount_nanousd, at_ms=at_ms,
        memo=memo,
    )  # fmt: skip
    database.write_sync(lambda conn: post_entries(conn, SIGNER, [draft], now_ms))


def fill(database: Database, seed: int, count: int) -> None:
    """Run `count` random steps, each of which posts one or a few entries."""
    chance = random.Random(seed)
    for _ in range(count):
        tenant_id = chance.choice(("ten_1", "ten_2"))
        step = chance.choice((_use, _use, _use, _keep, _give, _correct))
        step(database, chance, tenant_id)


def _use(database: Database, chance: random.Random, tenant_id: str) -> None:
    prompt = chance.choice((0, 1, 7, 4096))
    reason, cause = chance.choice(_ENDS)
    use(
        database,
        tenant_id,
        chance.randrange(1, 4),
        model=chance.choice(TEXTS),
        at_ms=NOW_MS + chance.randrange(10**9),
        num_prompt_tokens=prompt,
        num_cached_tokens=chance.randrange(prompt + 1),
        num_completion_tokens=chance.choice((0, 1, 5, 999)),
        adapter_digest=chance.choice((None, "d" * 64)),
        finish_reason=reason,
        stop_cause=cause,
        first_token_at=chance.choice((None, NOW_MS / 1000 + 0.5)),
    )


def _keep(database: Database, chance: random.Random, tenant_id: str) -> None:
    make_price(database)
    keep(
        database, tenant_id, NOW_MS + chance.randrange(10**9), kind=chance.choice(KEPT_KINDS),
        tier="device", slabs=2, size_bytes=chance.randrange(1, 10**10),
        duration_ms=chance.randrange(1, 10**7),
    )  # fmt: skip


def _give(database: Database, chance: random.Random, tenant_id: str) -> None:
    give(
        database, chance.choice(("credit", "payment")), tenant_id, chance.randrange(10**12),
        NOW_MS + chance.randrange(10**9), memo=chance.choice((None, "", *TEXTS)),
    )  # fmt: skip


def _correct(database: Database, chance: random.Random, tenant_id: str) -> None:
    """Reverse a random entry, if there is one."""

    def write(conn: Connection) -> None:
        query = sa.select(entries.c.entry_id).where(entries.c.kind.not_in(UNDOING))
        if ids := conn.scalars(query).all():
            memo, now_ms = chance.choice(TEXTS), NOW_MS + chance.randrange(10**9)
            ledger.reverse(conn, SIGNER, chance.choice(ids), memo=memo, now_ms=now_ms)

    database.write_sync(write)


def exported(
    database: Database,
    format: ExportFormat,
    tenant_id: str | None = None,
    *,
    start_ms: int = 0,
    end_ms: int = 2**62,
    after: int | None = None,
    through: int | None = None,
    page_size: int = 7,
) -> list[bytes]:
    """The chunks of an export, or of its part after the entry `after`."""

    def begin(conn: Connection) -> tuple[int, Place | None]:
        last = last_entry_id(conn, tenant_id) if through is None else through
        return last, None if after is None else place_of_entry(conn, tenant_id, after)

    last, place = database.read_sync(begin)
    within = Range.clamped(tenant_id, start_ms, end_ms, last)

    async def run() -> list[bytes]:
        chunks = stream(database, open_encoder(format), within, place, page_size=page_size)
        return [chunk async for chunk in chunks]

    return asyncio.run(run())
