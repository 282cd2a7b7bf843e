"""Invariants after every run: journal, ledger, receipts and what clients got and paid agree.

Each check yields a sentence for each violation.
"""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from engine.drafts.speculation import MOST_DRAFTS
from engine.journal.lines import Record
from engine.steps.meter import TokenMeter
from engine.wire.records import EndRecord, ProgressRecord, StartRecord
from server.billing.audit.run import audit
from server.billing.receipts.check import ReceiptCheck
from server.billing.receipts.receipt import Receipt
from server.billing.receipts.rows import iterate_receipts, select_receipts
from server.billing.receipts.signing_keys import list_keys
from server.billing.tables import (
    entries,
    holds,
    incidents,
    journal_positions,
    ledger_head,
    tenant_accounts,
    usage_events,
    usage_rollups,
)
from tests.crash.load import Seen
from tests.crash.world import World

_SAME_COUNTS = {
    "prompt_tokens": "num_prompt_tokens",
    "cached_tokens": "num_cached_tokens",
    "completion_tokens": "num_completion_tokens",
}
_SAME = ("number", "adapter_digest", "base_revision", "finish_reason", "stop_cause",
         "output_sha256")  # fmt: skip


@dataclass
class Books:
    """The records that a run left: the journal's records, the ledger's rows, the receipts."""

    records: Sequence[Record]
    events: list[dict[str, Any]] = field(default_factory=list)
    holds: list[dict[str, Any]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)

    @classmethod
    def of(cls, world: World) -> "Books":
        books = cls(world.records())

        def read(conn: Connection) -> None:
            books.events = _rows(conn, usage_events)
            books.holds = _rows(conn, holds)
            books.entries = _rows(conn, entries)
            books.receipts = list(iterate_receipts(conn, select_receipts()))

        world.database.read_sync(read)
        return books

    @property
    def ends(self) -> list[EndRecord]:
        return [record for record in self.records if isinstance(record, EndRecord)]

    def paid(self, request_id: str) -> int:
        """Return the amount charged for a request, less the amount given back."""
        ids = [r["entry_id"] for r in self.receipts if r["request_id"] == request_id]
        reversing = [e["entry_id"] for e in self.entries if e["reverses_entry_id"] in ids]
        amounts = [r["amount_nanousd"] for r in self.receipts if r["entry_id"] in ids + reversing]
        return sum(int(amount or 0) for amount in amounts)

    def hold_of(self, seen: Seen) -> dict[str, Any] | None:
        return next((h for h in self.holds if h["token_lease"] == seen.max_tokens), None)

    def event_of(self, request_id: str) -> dict[str, Any] | None:
        return next((e for e in self.events if e["request_id"] == request_id), None)


def all_wrong(world: World, books: Books, seen: Sequence[Seen]) -> list[str]:
    """Return a sentence for each violation; empty if there is none."""
    wrong = [*_journal(books), *_events(books), *_meter(world, books), *_holds(books)]
    wrong += [*_receipts(world, books), *_sums(world, books), *_audited(world)]
    for one in seen:
        wrong += _client(world, books, one)
    return wrong


def _journal(books: Books) -> Iterator[str]:
    """Every started request ends once, and its end agrees with the progress before it."""
    outputs: dict[str, list[int]] = defaultdict(list)
    started, ended = set(), set()
    for record in books.records:
        match record:
            case StartRecord():
                if record.request_id in started:
                    yield f"{record.request_id} started twice"
                started.add(record.request_id)
            case ProgressRecord():
                for progress in record.requests:
                    outputs[progress.request_id] += progress.new_token_ids
            case EndRecord(request_id=request_id):
                ids = outputs[request_id]
                packed = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
                if (len(ids), packed) != (record.num_completion_tokens, record.output_sha256):
                    yield f"{request_id} ended with {record}, its progress was {ids}"
                if request_id in ended:
                    yield f"{request_id} ended twice"
                ended.add(request_id)
    if started != ended:
        yield f"started and not ended, or the reverse: {started ^ ended}"


def _events(books: Books) -> Iterator[str]:
    """The ledger has every end of the journal once, with its counts, and no other usage."""
    by_seq = {event["journal_seq"]: event for event in books.events}
    if len(by_seq) != len(books.events):
        yield "an end was posted twice"
    for end in books.ends:
        event = by_seq.pop(end.seq, None)
        if event is None:
            yield f"the ledger lacks {end}"
            continue
        said = {name: event[name] for name in (*_SAME_COUNTS, *_SAME, "request_id")}
        due = {name: getattr(end, _SAME_COUNTS.get(name, name)) for name in said}
        if said != due:
            yield f"the ledger says {said}, the journal {due}"
        if end.stop_cause in ("engine_failure", "gateway_lost") and event["amount_nanousd"]:
            yield f"{end.request_id} ended by {end.stop_cause} and was charged"
    for event in by_seq.values():
        yield f"the journal lacks {event}"


def _meter(world: World, books: Books) -> Iterator[str]:
    """The journal has all tokens that the runner computed, except the last step before each death
    of the engine.
    """
    prompt, sampled, _, _ = TokenMeter.read(world.meter)
    counted = sum(end.num_prompt_tokens - end.num_cached_tokens for end in books.ends)
    missing = prompt - counted, sampled - sum(end.num_completion_tokens for end in books.ends)
    possible = {
        (sum(step[0] for step in cut), sum(step[1] for step in cut))
        for size in range(len(world.cut_steps) + 1)
        for cut in combinations(world.cut_steps, size)
    }
    if missing not in possible:
        yield f"{missing} tokens were computed and not counted; the cut steps: {world.cut_steps}"


def _holds(books: Books) -> Iterator[str]:
    """Holds are posted where the engine ended the request, voided where it never had it; no hold is
    open.
    """
    posted = {event["request_id"] for event in books.events}
    started = {r.request_id for r in books.records if isinstance(r, StartRecord)}
    for hold in books.holds:
        request_id = hold["request_id"]
        due = "posted" if request_id in posted else "voided"
        if hold["state"] != due or (due == "voided" and request_id in started):
            yield f"hold {request_id} is {hold['state']}, and should be {due}"
    if lost := posted - {hold["request_id"] for hold in books.holds}:
        yield f"usage without a hold: {lost}"


def _receipts(world: World, books: Books) -> Iterator[str]:
    """Every entry has a receipt: one whole chain for each tenant, signed, with true amounts."""
    keys = world.database.read_sync(list_keys)
    check = ReceiptCheck({known.public.key_id: known.public for known in keys}, is_complete=True)
    for row, receipt in enumerate(books.receipts, start=1):
        check.add(row, receipt)
    check.finish()
    for finding in check.findings:
        yield f"receipts: {finding}"
    if len(books.receipts) != len(books.entries):
        yield "there are entries without a receipt"
    usage = {receipt["entry_id"] for receipt in books.receipts if receipt["kind"] == "usage"}
    if usage != {event["event_id"] for event in books.events}:
        yield "usage events and receipts of usage differ"


def _sums(world: World, books: Books) -> Iterator[str]:
    """Entries are numbered without gaps; balances and roll-ups are their sums; no incident."""
    ids = sorted(entry["entry_id"] for entry in books.entries)
    if ids != list(range(1, len(ids) + 1)):
        yield f"the entries are numbered {ids}"
    reversed_ids = [e["reverses_entry_id"] for e in books.entries if e["reverses_entry_id"]]
    if len(set(reversed_ids)) != len(reversed_ids):
        yield "an entry was reversed twice"
    owed: dict[object, int] = defaultdict(int)
    for receipt in books.receipts:
        owed[receipt["tenant_id"]] += int(receipt["amount_nanousd"] or 0)

    def read(conn: Connection) -> list[list[dict[str, Any]]]:
        tables = (tenant_accounts, usage_rollups, ledger_head, journal_positions, incidents)
        return [_rows(conn, table) for table in tables]

    accounts, rollups, heads, positions, found = world.database.read_sync(read)
    balances = {row["tenant_id"]: -row["balance_nanousd"] for row in accounts}
    if balances != owed:
        yield f"accounts owe {balances}, their receipts {dict(owed)}"
    if sum(row["amount_nanousd"] for row in rollups) != sum(owed.values()):
        yield "roll-ups and receipts differ"
    requests = sum(row["num_requests"] + row["num_failed_requests"] for row in rollups)
    if requests != len(books.ends):
        yield f"roll-ups have {requests} requests of {len(books.ends)}"
    if [row["last_entry_id"] for row in heads] != [len(ids)][: len(heads)]:
        yield f"the ledger's head is {heads}"
    engine_ids = {event["engine_id"] for event in books.events}
    settled = sum(row["num_ends"] for row in positions if row["engine_id"] in engine_ids)
    if len(engine_ids) > 1 or settled != len(books.ends):
        yield f"{len(books.ends)} ends, and the ledger's positions are {positions}"
    for incident in found:
        yield f"incident: {incident}"


def _audited(world: World) -> Iterator[str]:
    """The auditor finds nothing wrong in the ledger or in the journal with all its segments."""
    report = world.database.read_sync(
        lambda conn: audit(conn, engine_dirs=[world.folder / "engine"])
    )
    for finding in report.findings:
        yield f"audit: {finding}"


def _client(world: World, books: Books, seen: Seen) -> Iterator[str]:
    """The client got no more than was counted; an error or a broken answer costs nothing.

    A whole answer costs something, unless its gateway died before it noted that.
    """
    hold = books.hold_of(seen)
    event = books.event_of(hold["request_id"]) if hold else None
    counted = event["completion_tokens"] if event else 0
    paid = books.paid(hold["request_id"]) if hold else 0
    if seen.num_tokens > counted:
        yield f"more than the {counted} tokens that were counted: {seen}"
    if seen.fate in ("error", "reset") and paid:
        yield f"no whole answer, but it costs {paid}: {seen}"
    has_gateway_died = any(process != "engine" for process in world.deaths)
    is_due = paid or has_gateway_died
    if seen.fate == "done" and (seen.num_tokens != counted or not is_due):
        yield f"{counted} tokens were counted, for {paid}: {seen}"
    # If the gateway lived, all that the engine had sent came through. (When the engine is killed at
    # a random moment, ZMQ's thread may be behind: on a busy machine 13 steps were journaled, handed
    # to it, and not sent.)
    is_named = len(world.killed_at()) == len(world.deaths) and not has_gateway_died
    is_cut = seen.fate == "error" and seen.num_tokens > 0
    if is_named and is_cut and counted - seen.num_tokens > 1 + MOST_DRAFTS:
        yield f"more than a step less than the {counted} tokens that were counted: {seen}"


def _rows(conn: Connection, table: sa.Table) -> list[dict[str, Any]]:
    return [dict(row) for row in conn.execute(sa.select(table)).mappings()]
