"""A small ledger with a row of every kind, made by the gateway's own functions."""

import random
from pathlib import Path

from sqlalchemy import Connection

from engine.journal.lines import encode
from engine.steps.meter import TokenMeter
from engine.wire.messages import PROOF_TENANT
from engine.wire.records import CheckpointRecord, EndRecord, ResidencyRecord, StartRecord
from server.billing import holds, ledger
from server.billing.credits import post_credit
from server.billing.months import end_of
from server.billing.prices import add_price, ensure_price
from server.billing.rating import Prices
from server.billing.receipts.signing_keys import record_key
from server.billing.statements import Statements
from server.billing.storage_stretches import Stretch, post_stretches
from server.database.database import Database
from tests.server.factories import ENGINE, NOW_MS, SIGNER, make_end, make_hold

HOUR_MS = 3_600_000
NEXT_MONTH_MS = end_of("2026-02")
TENANTS = ("ten_1", "ten_2", "ten_3")
_ENDS = (
    ("stop", "eos"), ("length", "max_tokens"), ("error", "engine_failure"), ("stop", "stop_string"),
    ("cancelled", "disconnect"), ("error", "deadline"),
)  # fmt: skip
"""(finish reason, stop cause) of the requests, in turn."""


def make_ends(count: int, seed: int) -> list[EndRecord]:
    """End records of an engine over some hours, with numbers, totals and gaps between seqs."""
    chance, seq, ends = random.Random(seed), 0, []
    totals = [0, 0, 0]
    for number in range(1, count + 1):
        prompt = chance.randrange(1, 99)
        counts = (prompt, chance.randrange(prompt + 1), chance.randrange(1, 33))
        totals = [total + tokens for total, tokens in zip(totals, counts, strict=True)]
        seq += chance.randrange(2, 5)
        reason, cause = _ENDS[number % len(_ENDS)]
        is_canary = number % 9 == 0
        ends.append(
            make_end(
                seq,
                f"canary-{number}" if is_canary else f"r{number}",
                tenant_id=PROOF_TENANT if is_canary else chance.choice(TENANTS),
                at=NOW_MS / 1000 + number * 400,
                number=number,
                total_prompt_tokens=totals[0],
                total_cached_tokens=totals[1],
                total_completion_tokens=totals[2],
                num_prompt_tokens=counts[0],
                num_cached_tokens=counts[1],
                num_completion_tokens=counts[2],
                adapter_digest=None if is_canary or number % 2 else "d" * 64,
                finish_reason=reason,
                stop_cause=cause,
            )
        )
    return ends


def write_engine_dir(
    folder: Path, posted: list[EndRecord | ResidencyRecord], behind: EndRecord | None = None
) -> Path:
    """Write an engine's folder; start records of open requests fill the gaps between seqs.

    behind: end before which all of the journal is deleted; None: the journal has no such part.
    """
    (folder / "journal").mkdir(parents=True)
    (folder / "identity").write_text(f"{ENGINE} 0000000001\n")
    names = ("number", "total_prompt_tokens", "total_cached_tokens", "total_completion_tokens")
    totals = {name: getattr(behind, name, 0) for name in names}
    records = [CheckpointRecord(seq=behind.seq if behind else 0, at=0.0, **totals)]
    for record in posted:
        records += [_start(seq) for seq in range(records[-1].seq + 1, record.seq)]
        records.append(record)
    lines = b"".join(map(encode, records))
    (folder / "journal" / f"{1:020d}.journal").write_bytes(lines)
    meter = TokenMeter(folder / "meter")
    last = [record for record in posted if isinstance(record, EndRecord)][-1]
    computed = last.total_prompt_tokens - last.total_cached_tokens
    meter.count(computed, last.total_completion_tokens)
    return folder


def _start(seq: int) -> StartRecord:
    return StartRecord(
        seq=seq, at=0.0, request_id=f"open-{seq}", tenant_id="ten_1", adapter_digest=None,
        num_prompt_tokens=1, token_lease=1,
    )  # fmt: skip


def fill_ledger(database: Database, ends: list[EndRecord]) -> None:
    """Settle all ends but the last; issue two statements for one tenant and one for another."""
    database.write_sync(lambda conn: _settle(conn, ends))
    clock = [NEXT_MONTH_MS]
    statements = Statements(database, SIGNER, now_ms=lambda _: clock[0])
    for tenant_id in TENANTS[:2]:
        statements.issue(tenant_id, "2026-02")
    # These charges are of the month but late, so the next statement has them.
    late = NEXT_MONTH_MS + HOUR_MS
    database.write_sync(lambda conn: _keep(conn, NOW_MS + 9 * HOUR_MS, late))
    clock[0] = NEXT_MONTH_MS + 31 * 24 * HOUR_MS
    statements.issue(TENANTS[0], "2026-03")


def _settle(conn: Connection, ends: list[EndRecord]) -> None:
    """Post the ends under two prices, with all other kinds of rows."""
    record_key(conn, SIGNER.public, NOW_MS)
    cheap = ensure_price(conn, NOW_MS)
    dear = add_price(
        conn,
        Prices(
            prompt_nanousd=411, cached_nanousd=97, completion_nanousd=1203,
            storage_nanousd=77_000, pinned_nanousd=50_000_001, resident_nanousd=9_000_001,
        ),
        effective_at_ms=NOW_MS,
        now_ms=NOW_MS,
    )  # fmt: skip
    for end in ends:
        if end.tenant_id == PROOF_TENANT:
            continue
        used = {} if end.adapter_digest is None else {
            "adapter_id": "ada_1", "adapter_version": 3, "adapter_digest": end.adapter_digest
        }  # fmt: skip
        hold = make_hold(
            dear if end.number % 3 else cheap,
            end.request_id,
            tenant_id=end.tenant_id,
            model="base" if end.adapter_digest is None else "pirate",
            num_prompt_tokens=end.num_prompt_tokens,
            # The last end is not settled: its hold stays open and does not expire.
            expires_at_ms=NOW_MS * 2 if end is ends[-1] else round(end.at * 1000) + 60_000,
            **used,
        )
        holds.insert_hold(conn, hold)
    _other_holds(conn, dear)
    for first in range(0, len(ends) - 1, 7):
        group = ends[first : min(first + 7, len(ends) - 1)]
        if first == 7:
            ledger.mark_failed(conn, SIGNER, group[0].request_id, NOW_MS)
        at_ms = NOW_MS + first * 400_000
        ledger.post(conn, SIGNER, ENGINE, group, at_ms + 1000)
        _keep(conn, at_ms, at_ms + HOUR_MS)
    for end in ends[:7]:
        if end.stop_cause == "eos":
            ledger.mark_failed(conn, SIGNER, end.request_id, NOW_MS + HOUR_MS)
    for tenant_id in TENANTS:
        post_credit(
            conn, SIGNER, "payment", tenant_id, 10**9,
            memo="top-up", idempotency_key=f"top-up of {tenant_id}", now_ms=NOW_MS + HOUR_MS,
        )  # fmt: skip


def _other_holds(conn: Connection, price: Prices) -> None:
    """Insert a voided hold and an open one."""
    for request_id, expires_at_ms in (("unsent", NOW_MS), ("running", NOW_MS * 2)):
        hold = make_hold(price, request_id, expires_at_ms=expires_at_ms)
        holds.insert_hold(conn, hold)
    holds.void_refused(conn, "unsent", NOW_MS)


def _keep(conn: Connection, at_ms: int, now_ms: int) -> None:
    """Charge an hour of storage, residency and pin of an adapter; other tiers are free."""
    stretches = [
        Stretch(
            kind=kind,
            source="test",
            source_id=f"{kind} {tier} {at_ms}",
            tenant_id="ten_1",
            adapter_id="ada_1",
            adapter_version=3,
            adapter_digest="d" * 64,
            tier=tier,
            size_bytes=12_345_678,
            slabs=2,
            started_at_ms=at_ms,
            at_ms=at_ms + HOUR_MS - 1,
            duration_ms=HOUR_MS - 7,
            is_free=tier == "host",
        )
        for kind, tier in (
            ("storage", "store"), ("resident", "device"), ("resident", "host"), ("pinned", "device")
        )
    ]  # fmt: skip
    post_stretches(conn, SIGNER, stretches, now_ms)
