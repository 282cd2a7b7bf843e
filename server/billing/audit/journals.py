"""Compares the engines' journals with the ledger, and with the runner's own meter.

Numbers and totals are compared in the database, single records only where the files are at hand.
The meter shares no code with the journal or the ledger.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from engine.journal.lines import SET_ASIDE, JournalCorrupt, Position, Record, read_records
from engine.journal.state import JournalState
from engine.steps.meter import TokenMeter
from engine.wire.records import CheckpointRecord, EndRecord, ResidencyRecord
from server.billing.audit.entries import id_windows
from server.billing.audit.report import Finding, Scope, differences
from server.billing.ledger import event_of
from server.billing.receipts.rows import is_tenants
from server.billing.storage_stretches import drafts_of, has_price, residency_stretches
from server.billing.tables import journal_positions, kept_events, usage_events
from server.database.pages import PAGE_SIZE, pages

_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_TOTALS = ("num_ends", *_COUNTS)
_BESIDE = (
    "again after a preemption, or in steps whose requests were cancelled or whose engine was killed"
)
_MISSING = "ends, prompt, cached and completion tokens without an event"


def journal_starts(engine_dirs: Iterable[Path]) -> dict[str, Position]:
    """Return where each local journal begins, by engine id; what came before was settled.

    Call it before the database's snapshot is taken: a journal then begins where the ledger is
    settled, or before, unless the ledger is an older state.
    """
    starts = {}
    for engine_dir in engine_dirs:
        with suppress(JournalCorrupt):  # `check_journal_files` reports a corrupt journal.
            first = next(read_records(engine_dir / "journal"), None)
            if isinstance(first, CheckpointRecord):
                starts[_engine_id(engine_dir)] = Position.of(first)
    return starts


def check_journals(scope: Scope) -> Iterator[Finding]:
    """Compare the sums of each engine's events with the totals in its journal.

    A journal that begins behind the ledger's position was settled with a newer ledger: its totals
    then say what is missing, also before a gateway settles it again.
    """
    usage = usage_events.c
    sums: dict[str, dict[str, int]] = {}
    for first, last in id_windows(scope.conn, usage.event_id):
        query = sa.select(
            usage.engine_id,
            sa.func.max(usage.journal_seq),
            sa.func.count(),
            *(sa.func.sum(usage[name]) for name in _COUNTS),
        )
        query = query.where(usage.event_id.between(first, last)).group_by(usage.engine_id)
        for engine_id, seq, *found in scope.conn.execute(query):
            before = sums.setdefault(engine_id, dict.fromkeys(("seq", *_TOTALS), 0))
            before["seq"] = max(before["seq"], seq)
            for name, value in zip(_TOTALS, found, strict=True):
                before[name] += int(value)
    columns = ("engine_id", "settled_seq", *_TOTALS)
    rows = scope.conn.execute(sa.select(*(journal_positions.c[name] for name in columns)))
    positions = {engine_id: Position(*at) for engine_id, *at in rows}
    for engine_id in sorted(positions.keys() | scope.starts.keys()):
        events = sums.pop(engine_id, dict.fromkeys(("seq", *_TOTALS), 0))
        position, start = (at.get(engine_id, Position()) for at in (positions, scope.starts))
        _, *totals = max(position, start, key=lambda at: at.seq)
        missing = tuple(n - events[name] for n, name in zip(totals, _TOTALS, strict=True))
        pairs: dict[str, tuple[Any, Any]] = {_MISSING: ((0, 0, 0, 0), missing)}
        if not any(missing) and start.seq > position.seq:
            pairs["records of where adapters were are missing"] = (position.seq, start.seq)
        pairs["is settled as far as its events"] = (True, position.seq >= events["seq"])
        yield from differences("journals", f"engine {engine_id}", pairs)
        scope.count("journals", 1)
    for engine_id in sums:
        yield Finding("journals", f"engine {engine_id}", "has events and no position")


def check_numbers(scope: Scope) -> Iterator[Finding]:
    """Report gaps in the numbers 1, 2, 3, ... of each engine's ends.

    Gaps of as many ends as were acknowledged to be missing are no findings of their own.
    """
    usage = usage_events.c
    missing = {f.subject: f.found[0] for f in scope.report.acknowledged if f.detail == _MISSING}
    for engine_id in scope.conn.scalars(sa.select(journal_positions.c.engine_id)).all():
        query = sa.select(usage.journal_seq, usage.number, usage.request_id)
        query = query.where(usage.engine_id == engine_id)
        if scope.since_ms:
            query = query.where(usage.posted_at_ms >= scope.since_ms)
        number = None if scope.since_ms else 0
        num_known = missing.get(f"engine {engine_id}", 0)
        for page in pages(scope.conn, query, usage.journal_seq):
            for row in page:
                expected = row["number"] if number is None else number + 1
                num_missing = row["number"] - expected
                if 0 < num_missing <= num_known:
                    num_known -= num_missing
                elif num_missing:
                    first = f"end {expected} of engine {engine_id}"
                    yield Finding(
                        "journals",
                        f"{first}, before request {row['request_id']}",
                        "has no event",
                        expected=expected,
                        found=row["number"],
                    )
                number = row["number"]


def check_journal_files(scope: Scope, engine_dir: Path) -> Iterator[Finding]:
    """Compare the records that are still on disk with their events; the newest may be unsettled.

    Call it after the database's snapshot was taken: each record that is settled in the snapshot is
    then on disk, or deleted.
    """
    engine_id = _engine_id(engine_dir)
    query = sa.select(journal_positions.c.settled_seq).filter_by(engine_id=engine_id)
    settled_seq = scope.conn.scalar(query) or 0
    num_unsettled, is_at_record = 0, settled_seq == 0
    try:
        records = read_records(engine_dir / "journal")
        while page := list(islice(records, PAGE_SIZE)):
            ends = [record for record in page if isinstance(record, EndRecord)]
            num_unsettled += sum(end.seq > settled_seq for end in ends)
            settled = [end for end in ends if end.seq <= settled_seq]
            yield from _check_ends(scope, engine_id, settled)
            for record in page:
                if isinstance(record, ResidencyRecord) and record.seq <= settled_seq:
                    yield from _check_stays(scope, engine_id, record)
            scope.count("journal files", len(ends))
            is_at_record |= any(_is_end_at(record, settled_seq) for record in page)
    except JournalCorrupt as error:
        yield Finding("journal files", f"engine {engine_id}", str(error))
        return
    if not is_at_record:
        yield Finding(
            "journal files",
            f"engine {engine_id}",
            "is settled to a position where its journal has no end or residency record",
            found=settled_seq,
        )
    if kept := list((engine_dir / "journal").glob(f"*{SET_ASIDE}")):
        scope.report.notes.append(f"{len(kept)} damaged segments of {engine_id} were set aside.")
    if num_unsettled:
        scope.report.notes.append(f"{num_unsettled:,} end records are not settled yet.")


def _engine_id(engine_dir: Path) -> str:
    return (engine_dir / "identity").read_text().split()[0]


def _is_end_at(record: Record, settled_seq: int) -> bool:
    """Whether `settled_seq` is this record's position, or lies in records deleted before it."""
    if isinstance(record, CheckpointRecord):
        return record.seq >= settled_seq
    return record.seq == settled_seq and isinstance(record, EndRecord | ResidencyRecord)


def check_meter(scope: Scope, engine_dir: Path) -> Iterator[Finding]:
    """Check that the journal did not count more tokens than the runner's meter.

    The meter is ahead by steps of killed engines that never reached the journal, by tokens that
    were computed again after a preemption, and by beams that were given up; nobody pays for those.
    """
    before = TokenMeter.read(engine_dir / "meter")
    try:
        journaled = _journaled(engine_dir / "journal")
    except JournalCorrupt:
        return  # `check_journal_files` reports a corrupt journal.
    after = TokenMeter.read(engine_dir / "meter")
    scope.count("meter", 1)
    names = ("prompt tokens", "sampled tokens")
    for name, counted, meter in zip(names, journaled, after[:2], strict=True):
        if counted > meter:
            yield Finding(
                "meter",
                f"engine in {engine_dir}",
                f"more {name} were counted than computed",
                expected=meter,
                found=counted,
            )
    # In a live engine, the runner may have counted a step that the journal has not yet.
    prompt, sampled = (max(0, before[i] - before[i + 2] - journaled[i]) for i in (0, 1))
    unpaid = [*_unpaid(scope.conn, _engine_id(engine_dir)), (prompt, sampled, _BESIDE)]
    prompt, sampled = sum(each[0] for each in unpaid), sum(each[1] for each in unpaid)
    if prompt or sampled:
        why = ", ".join(f"{p:,} and {s:,} {where}" for p, s, where in unpaid if p or s)
        scope.report.notes.append(
            f"{prompt:,} prompt tokens were computed and {sampled:,} sampled that nobody pays for: "
            f"{why}."
        )


def _unpaid(conn: sa.Connection, engine_id: str) -> Iterator[tuple[int, int, str]]:
    """Yield (prompt tokens computed, tokens sampled, where) of requests that were free."""
    usage = usage_events.c
    is_proof = ~is_tenants(usage.tenant_id)
    query = sa.select(
        sa.func.count(),
        sa.func.sum(usage.prompt_tokens - usage.cached_tokens),
        sa.func.sum(usage.completion_tokens),
    ).where(usage.engine_id == engine_id)
    is_failed = ~is_proof & usage.is_failed
    for noun, is_it in (("proofs", is_proof), ("requests that failed", is_failed)):
        number, prompt, sampled = conn.execute(query.where(is_it)).one()
        if number:
            yield int(prompt), int(sampled), f"in {number:,} {noun}"


def _check_ends(scope: Scope, engine_id: str, ends: Sequence[EndRecord]) -> Iterator[Finding]:
    seqs = [end.seq for end in ends]
    query = sa.select(usage_events).where(
        usage_events.c.engine_id == engine_id, usage_events.c.journal_seq.in_(seqs)
    )
    by_seq = {row["journal_seq"]: row for row in scope.conn.execute(query).mappings()}
    for end in ends:
        row = by_seq.get(end.seq)
        subject = f"end {end.number} of engine {engine_id} (request {end.request_id})"
        yield from _compare(subject, row, event_of(end))


def _check_stays(scope: Scope, engine_id: str, record: ResidencyRecord) -> Iterator[Finding]:
    """Compare a record of where adapters were with the events of those that had a price."""
    kept = kept_events.c
    ids = [f"{record.seq}/{index}" for index in range(len(record.items))]
    query = sa.select(kept_events).where(kept.source == engine_id, kept.source_id.in_(ids))
    by_id = {row["source_id"]: row for row in scope.conn.execute(query).mappings()}
    missing = drafts_of(scope.conn, residency_stretches(scope.conn, engine_id, [record]))
    free = {draft.event["source_id"] for draft in missing if not has_price(draft)}
    for source_id, item in zip(ids, record.items, strict=True):
        row = by_id.get(source_id)
        if source_id in free:
            continue
        subject = f"stay {source_id} of engine {engine_id}"
        same = ("tier", "size_bytes", "slabs", "duration_ms")
        of_item = {name: getattr(item, name) for name in same} | {"adapter_digest": item.digest}
        yield from _compare(subject, row, of_item)


def _compare(
    subject: str, event: sa.RowMapping | None, expected: Mapping[str, Any]
) -> Iterable[Finding]:
    if event is None:
        return [Finding("journal files", subject, "is settled and has no event")]
    pairs = {name: (value, event[name]) for name, value in expected.items()}
    return differences("journal files", subject, pairs)


def _journaled(directory: Path) -> tuple[int, int]:
    """Return (prompt tokens computed, tokens sampled) of a journal, open requests included."""
    state = JournalState(base_revision="")
    for record in read_records(directory):
        # A segment that was set aside may come before any checkpoint.
        state.has_gap = isinstance(record, CheckpointRecord)
        state.apply([record])
        state.unsettled.clear()  # the position has their sums
    now, opened = state.now, state.open.values()
    computed = sum(it.num_prompt_tokens - it.num_cached_tokens for it in opened)
    sampled = sum(len(it.output_token_ids) for it in opened)
    total = now.total_prompt_tokens - now.total_cached_tokens
    return total + computed, now.total_completion_tokens + sampled
