"""The auditor on a small ledger with a row of every kind, unchanged and with one change."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.journal.lines import encode
from engine.steps.meter import TokenMeter
from engine.wire.messages import PROOF_TENANT
from engine.wire.records import ProgressRecord, RequestProgress, ResidencyItem, ResidencyRecord
from registry.errors import Conflict, Invalid, NotFound
from registry.tables import audit_log
from server.api.metrics import Metrics
from server.billing.audit.acknowledgements import acknowledge
from server.billing.audit.auditor import Auditor
from server.billing.audit.report import Report
from server.billing.audit.run import audit, audit_sums
from server.billing.credits import post_correction
from server.billing.holds import void_refused
from server.billing.tables import (
    entries,
    holds,
    incidents,
    journal_positions,
    kept_events,
    ledger_head,
    monthly_spend,
    price_versions,
    signing_keys,
    statements,
    tenant_accounts,
    usage_days,
    usage_events,
    usage_rollups,
)
from server.database.clock import now_ms
from server.database.database import DEFAULT_FILE, Database
from tests.server.audited_ledger import HOUR_MS, fill_ledger, make_ends, write_engine_dir
from tests.server.bases import figures_only
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

MONEY = (
    entries, usage_events, kept_events, holds, journal_positions, ledger_head, price_versions,
    signing_keys, statements, tenant_accounts, usage_rollups, usage_days,
    monthly_spend,
)  # fmt: skip
NO_MONEY = {
    "holds.cancelled_at_ms": "a wish of the tenant; what ran is paid all the same",
    "entries.idempotency_key": "says which later call would be a repeat; nothing is owed by it",
    "kept_events.source": "says which later report would be a repeat",
    "kept_events.source_id": "likewise",
    "holds.base_model": "says under which limits the request counts; nothing is priced by it",
    "holds.created_at_ms": "when it was made; nothing is priced by it",
    "holds.expires_at_ms": "of a hold that has ended, it decides nothing any more",
    "holds.traceparent": "where the request is shown in its trace; nothing is priced by it",
    "journal_positions.updated_at_ms": "when it was written",
    "usage_events.load_ms": "what the request waited for; nothing is priced by it",
    "usage_events.load_tier": "likewise",
    "usage_events.queue_ms": "likewise",
    "signing_keys.key_id": "the key itself says it",
    "signing_keys.created_at_ms": "the order of a list",
    "price_versions.scope": "which version a request is priced by is decided when it is held, and "
    "its hold, event, entry and receipt name that version",
    "price_versions.scope_id": "likewise",
    "price_versions.base_model": "likewise",
    "price_versions.effective_at_ms": "likewise",
    "price_versions.until_ms": "likewise",
    "price_versions.created_at_ms": "likewise",
}
ENDS = make_ends(24, seed=1)
FREE = {end.request_id for end in ENDS if end.stop_cause == "engine_failure"}


@dataclass(frozen=True)
class Audited:
    database: Database
    engine_dir: Path

    def audit(self) -> Report:
        return self.database.read_sync(lambda conn: audit(conn, engine_dirs=[self.engine_dir]))


@pytest.fixture(scope="module")
def shared(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    """A ledger for tests that do not change it."""
    folder = tmp_path_factory.mktemp("audited")
    shutil.copy(migrated_sqlite, folder / DEFAULT_FILE)
    with closing(Database(data_dir=folder)) as database:
        fill_ledger(database, ENDS)
    with closing(Database(data_dir=folder)) as database:
        yield Audited(database, write_engine_dir(folder / "engine", ENDS))


@pytest.fixture
def ledger_of(shared: Audited, tmp_path: Path) -> Iterator[Audited]:
    """A copy of the ledger, for one test to change."""
    shutil.copytree(shared.engine_dir.parent, tmp_path, dirs_exist_ok=True)
    with closing(Database(data_dir=tmp_path)) as database:
        yield Audited(database, tmp_path / "engine")


def shown(report: Report) -> list[str]:
    return [str(finding) for finding in report.findings]


def count(audited: Audited, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
    query = sa.select(sa.func.count()).select_from(table).where(*where)
    return audited.database.read_sync(lambda conn: conn.execute(query).scalar_one())


# ---- a healthy ledger ----


def test_a_healthy_ledger_has_no_finding_and_every_row_was_looked_at(ledger_of):
    report = ledger_of.audit()
    assert (shown(report), report.difference_nanousd) == ([], 0)
    rows = {name: result.num_rows for name, result in report.checks.items()}
    assert rows["receipts"] == rows["entry ids"] == count(ledger_of, entries)
    num_events = count(ledger_of, usage_events) + count(ledger_of, kept_events)
    assert rows["events"] == rows["rating"] == num_events
    assert rows["roll-ups"] == count(ledger_of, usage_rollups)
    assert rows["days"] == count(ledger_of, usage_days)
    assert rows["holds"] == count(ledger_of, holds)
    assert rows["months"] == count(ledger_of, monthly_spend)
    assert rows["accounts"] == count(ledger_of, tenant_accounts)
    assert rows["corrections"] > 0
    assert rows["open holds"] == 2
    assert rows["journal files"] == len(ENDS)
    unsettled, unpaid = report.notes
    assert unsettled == "1 end records are not settled yet."
    assert "preemption" not in unpaid, "only what was free is told, as proofs"


def test_nothing_is_found_while_others_post(ledger_of):
    """A request is posted between any two statements of the audit, until five are posted."""
    database, price = ledger_of.database, make_price(ledger_of.database)
    names = iter([f"late{number}" for number in range(5)])

    def post_one(*_: object) -> None:
        if (name := next(names, None)) is not None:
            insert_holds(database, make_hold(price, name))
            post_ends(database, make_end(1, name, number=1), engine_id=f"of {name}")

    before = ledger_of.audit()
    during = database.read_sync(lambda conn: audit(conn, progress=post_one))
    after = ledger_of.audit()
    assert shown(before) == shown(during) == []
    receipts = [report.checks["receipts"].num_rows for report in (before, during, after)]
    assert receipts[0] == receipts[1] == receipts[2] - 5


def test_an_audit_since_a_time_looks_at_what_was_posted_since_then(ledger_of):
    since_ms = NOW_MS + 2 * HOUR_MS
    report = ledger_of.database.read_sync(lambda conn: audit(conn, since_ms=since_ms))
    first = sa.select(sa.func.min(entries.c.entry_id)).where(entries.c.posted_at_ms >= since_ms)
    posted = count(ledger_of, entries, entries.c.entry_id >= first.scalar_subquery())
    assert shown(report) == []
    assert 0 < report.checks["receipts"].num_rows == posted < report.checks["entry ids"].num_rows
    assert report.checks["accounts"].num_rows == 4, "sums cover all time"


# ---- one change ----


@dataclass(frozen=True)
class Change:
    """A change of one row. column: None deletes the row, or copies it with the keys in `value`."""

    table: sa.Table
    row: dict[str, Any]
    column: str | None
    value: Any = None

    def apply(self, conn: sa.Connection) -> None:
        """Make the change. Raises IntegrityError where the database refuses it."""
        is_it = [self.table.c[c.name] == self.row[c.name] for c in self.table.primary_key]
        if self.column is not None:
            conn.execute(sa.update(self.table).where(*is_it).values({self.column: self.value}))
        elif self.value is None:
            conn.execute(sa.delete(self.table).where(*is_it))
        else:
            conn.execute(sa.insert(self.table).values(self.row | self.value))

    def names(self) -> set[str]:
        """Names that a finding may use for the row, as it was or as it is."""
        now = self.row | ({self.column: self.value} if self.column else self.value or {})
        names = NAMES.get(self.table.name, ("entry ",))
        return {name.format(**row) for row in (self.row, now) for name in names}


NAMES = {
    "entries": ("entry {entry_id}", "receipt {tenant_id}/{receipt_seq}"),
    "usage_events": ("(request {request_id})", "hold {request_id}"),
    "kept_events": ("entry {event_id}", "event {event_id}"),
    "holds": ("hold {request_id}",),
    "tenant_accounts": ("tenant {tenant_id}",),
    "monthly_spend": ("month {tenant_id} {month}",),
    "usage_rollups": ("roll-up {tenant_id} {hour_ms} {kind}",),
    "usage_days": ("day {tenant_id} {day_ms} {dimension}",),
    "statements": ("statement {tenant_id}/{period}",),
    "journal_positions": ("engine {engine_id}",),
    "ledger_head": ("ledger head", "entry ", "entries "),
}
"""Names that a finding may use for a row, by table; of a price or a key, any entry that uses it."""


def rows_of(conn: sa.Connection, table: sa.Table) -> list[dict[str, Any]]:
    query = sa.select(table).order_by(*table.primary_key)
    if table is holds:  # Those that were never posted have nothing to be compared with.
        query = query.where(holds.c.state == "posted")
    return [dict(row) for row in conn.execute(query).mappings()]


def changes_of(table: sa.Table, row: dict[str, Any]) -> Iterator[Change]:
    """Every change of one row that the auditor must find."""
    # Old holds may go; a deleted statement could be issued again, unless a later one follows it.
    is_first = (row.get("tenant_id"), row.get("period")) == ("ten_1", "2026-02")
    if table is not holds and (table is not statements or is_first):
        yield Change(table, row, None)
    if (twin := TWINS.get(table.name)) is not None:
        yield Change(table, row, None, twin)
    for column in table.c:
        if f"{table.name}.{column.name}" in NO_MONEY or _is_unused(table, row, column.name):
            continue
        for value in _other_values(column, row[column.name]):
            yield Change(table, row, column.name, value)


TWINS: dict[str, dict[str, Any]] = {
    "entries": {
        "entry_id": 10**6, "receipt_seq": 10**6, "reverses_entry_id": None, "idempotency_key": None,
    },
    "usage_events": {"event_id": 10**6, "journal_seq": 10**6, "request_id": "twin"},
    "kept_events": {"event_id": 10**6, "source_id": "twin"},
    "holds": {"request_id": "twin"},
    "tenant_accounts": {"tenant_id": "twin"},
    "monthly_spend": {"month": "2001-01"},
    "usage_rollups": {"model": "twin"},
    "usage_days": {"name": "twin"},
    "statements": {"period": "2001-01"},
    "journal_positions": {"engine_id": "twin"},
}  # fmt: skip
"""Keys of a duplicate of a row, by table; another price, key or head moves no money."""


def _is_unused(table: sa.Table, row: dict[str, Any], column: str) -> bool:
    if table is price_versions and row["price_version"] == 1:
        return column in ("storage_nanousd", "pinned_nanousd", "resident_nanousd")
    # The time of a failure does not matter, nor does the failure of a request that is free anyway.
    if table is holds and column == "failed_at_ms":
        return row[column] is not None or row["request_id"] in FREE
    return table is price_versions and column == "price_version"


def _other_values(column: sa.Column[Any], value: Any) -> list[Any]:
    if isinstance(column.type, sa.Boolean):
        return [not value]
    if isinstance(column.type, sa.Integer):
        values = [1] if value is None else [value + 1, value - 1, value + 10**15]
    elif value is None:
        values = ["x"]
    else:
        digit = "1" if value[:1] != "1" else "2"
        values = [digit + value[1:], value[:-1] + ("A" if value[-1:] != "A" else "B")]
    return values if value is None or not column.nullable else [*values, None]


class _Undone(Exception):
    pass


def check_found(audited: Audited, change: Change) -> None:
    """Check that the auditor finds the change and names its row, and roll the change back."""
    try:
        with suppress(_Undone), audited.database.begin() as conn:
            change.apply(conn)
            report = audit(conn, engine_dirs=[audited.engine_dir])
            raise _Undone
    except sa.exc.IntegrityError:
        return  # the database refuses it
    subjects = [finding.subject for finding in report.findings]
    found = [name for name in change.names() if any(name in subject for subject in subjects)]
    assert found, (change, shown(report))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_change_of_any_row_is_found_and_named(shared: Audited, data: st.DataObject) -> None:
    filled = [t for t in MONEY if shared.database.read_sync(lambda c, t=t: rows_of(c, t))]
    table = data.draw(st.sampled_from(filled))
    rows = shared.database.read_sync(lambda conn: rows_of(conn, table))
    row = data.draw(st.sampled_from(rows))
    check_found(shared, data.draw(st.sampled_from(list(changes_of(table, row)))))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("table", MONEY, ids=str)
def test_every_change_of_every_row_is_found_and_named(shared: Audited, table: sa.Table) -> None:
    for row in shared.database.read_sync(lambda conn: rows_of(conn, table)):
        for change in changes_of(table, row):
            check_found(shared, change)


# ---- single faults and their names ----


def change(audited: Audited, query: sa.UpdateBase) -> Report:
    audited.database.write_sync(lambda conn: conn.execute(query))
    return audited.audit()


def test_a_lost_event_is_named_by_its_number_and_what_it_cost(ledger_of):
    lost = ENDS[3]
    query = sa.select(usage_events.c.amount_nanousd).filter_by(request_id=lost.request_id)
    amount = ledger_of.database.read_sync(lambda conn: conn.scalar(query))
    report = change(ledger_of, sa.delete(usage_events).filter_by(request_id=lost.request_id))
    assert 0 < amount == -report.difference_nanousd
    found = shown(report)
    assert any(f"end 4 of engine {ENGINE}, before request" in line for line in found)
    assert any(f"(request {lost.request_id}): is settled and has no event" in x for x in found)
    assert f"holds: hold {lost.request_id}: event" in found


def test_where_adapters_were_is_in_the_ledger_as_the_engine_wrote_it(ledger_of, tmp_path):
    """One record, the only settled one, holds three tiers, of which one has a price."""
    items = tuple(
        ResidencyItem(
            digest="d" * 64, object_key=f"adapters/ten_1/{'d' * 64}", adapter_id="ada_1", version=3,
            tier=tier, size_bytes=4096, slabs=slabs, duration_ms=1000, is_pinned=False,
        )
        for tier, slabs in (("device", 3), ("host", 0), ("disk", 0))
    )  # fmt: skip
    record = ResidencyRecord(seq=9, at=NOW_MS / 1000, started_at=NOW_MS / 1000 - 1, items=items)
    end = make_end(12, number=1, total_prompt_tokens=7, total_completion_tokens=5)
    engine_dir = write_engine_dir(tmp_path / "another", [record, end])
    (engine_dir / "identity").write_text("another 0000000001\n")
    audited = Audited(ledger_of.database, engine_dir)
    post_ends(audited.database, record, engine_id="another")
    assert shown(audited.audit()) == []
    longer = sa.update(kept_events).values(duration_ms=2000).filter_by(source_id="9/0")
    [stay] = [line for line in shown(change(audited, longer)) if "stay" in line]
    assert stay == "journal files: stay 9/0 of engine another: duration_ms"
    lost = shown(change(audited, sa.delete(kept_events).filter_by(source_id="9/0")))
    assert "journal files: stay 9/0 of engine another: is settled and has no event" in lost


def test_the_same_is_found_on_postgresql(postgres_database, tmp_path):
    """The test makes one change of each kind; the tests on SQLite make all changes."""
    fill_ledger(postgres_database, ENDS)
    audited = Audited(postgres_database, write_engine_dir(tmp_path / "engine", ENDS))
    assert shown(audited.audit()) == []
    for query, check in [
        (sa.update(tenant_accounts).values(balance_nanousd=5), "accounts"),
        (sa.update(usage_rollups).values(kept_mb_s=usage_rollups.c.kept_mb_s + 1), "roll-ups"),
        (sa.update(usage_days).values(prompt_tokens=usage_days.c.prompt_tokens + 1), "days"),
        (sa.delete(monthly_spend), "months"),
        (sa.delete(usage_events).filter_by(request_id="r4"), "events"),
        (sa.update(statements).values(total_nanousd=0), "statements"),
        (sa.update(entries).values(amount_nanousd=entries.c.amount_nanousd + 1), "rating"),
        (sa.update(journal_positions).values(prompt_tokens=5), "journals"),
        (sa.update(holds).values(amount_nanousd=0), "holds"),
    ]:
        assert change(audited, query).checks[check].num_findings > 0, check


def test_what_the_settler_knew_to_be_strange_is_on_record_and_no_finding(ledger_of):
    """One hold names the wrong engine, and another was voided too early."""
    database = ledger_of.database
    price = make_price(database)
    insert_holds(database, make_hold(price, "x1", engine_id="other"), make_hold(price, "x2"))
    database.write_sync(lambda conn: void_refused(conn, "x2", NOW_MS))
    records = [
        make_end(n, f"x{n}", number=n, total_prompt_tokens=7 * n, total_completion_tokens=5 * n)
        for n in (1, 2)
    ]
    post_ends(database, *records, engine_id="another")
    report = ledger_of.audit()
    assert shown(report) == []
    assert report.incidents == {"engine_differs": 2, "hold_voided": 1}


def test_a_hold_that_nothing_can_use_any_more_is_named_and_others_are_not(ledger_of):
    """A hold is named once its engine's journal is settled past its expiry, or a day after it."""
    database, price = ledger_of.database, make_price(ledger_of.database)
    now = now_ms()
    old = {"created_at_ms": NOW_MS, "expires_at_ms": now - 3_600_000}
    insert_holds(
        database,
        make_hold(price, "stuck", engine_id="e2", **old),
        make_hold(price, "waiting", engine_id="e3", **old),
        make_hold(price, "fresh", engine_id="e2", created_at_ms=NOW_MS, expires_at_ms=now),
        make_hold(price, "forgotten", engine_id="e3", created_at_ms=NOW_MS, expires_at_ms=NOW_MS),
    )
    totals = {"number": 1, "total_prompt_tokens": 7, "total_completion_tokens": 5}
    end = make_end(1, "stray", at=now / 1000, tenant_id=PROOF_TENANT, **totals)
    post_ends(database, end, engine_id="e2", now_ms=now)
    assert shown(ledger_of.audit()) == [
        "open holds: hold forgotten: is open past its expiry, at engine e3",
        "open holds: hold stuck: is open past its expiry, at engine e2",
    ]


def test_a_journal_that_cannot_be_read_is_a_finding(ledger_of):
    [path] = (ledger_of.engine_dir / "journal").iterdir()
    path.write_bytes(path.read_bytes().replace(b'"r1"', b'"r0"', 1))
    [line] = shown(ledger_of.audit())
    assert line.startswith(f"journal files: engine {ENGINE}: {path}, byte ")


def is_broken(end):
    return end.finish_reason == "error" and end.stop_cause != "deadline"


def tokens_of(ends):
    """Prompt tokens that were computed, and tokens that were sampled."""
    prompt = sum(end.num_prompt_tokens - end.num_cached_tokens for end in ends)
    return prompt, sum(end.num_completion_tokens for end in ends)


def test_more_counted_than_computed_is_a_finding_and_less_is_said_with_reasons(ledger_of):
    """The meter is that of a killed engine, and then of one that computed less than it counted."""
    path, last = ledger_of.engine_dir / "meter", ENDS[-1]
    TokenMeter(path).count(30, 4)
    report = change(ledger_of, sa.update(holds).values(state=holds.c.state))
    assert shown(report) == [], "a killed engine may have computed a step more"
    TokenMeter(path).count(1, 1)
    report = ledger_of.audit()
    assert shown(report) == []
    proofs = [end for end in ENDS[:-1] if end.tenant_id == PROOF_TENANT]
    broken = [end for end in ENDS[:-1] if end.tenant_id != PROOF_TENANT and is_broken(end)]
    parts = [(30, 4), *map(tokens_of, (proofs, broken))]
    prompt, sampled = (sum(part[i] for part in parts) for i in (0, 1))
    assert report.notes[-1] == (
        f"{prompt:,} prompt tokens were computed and {sampled:,} sampled that nobody pays for: "
        f"{parts[1][0]:,} and {parts[1][1]:,} in {len(proofs)} proofs, "
        f"{parts[2][0]:,} and {parts[2][1]:,} in {len(broken)} requests that failed, "
        "30 and 4 again after a preemption, or in steps whose requests were cancelled or whose "
        "engine was killed."
    )
    path.unlink()
    TokenMeter(path).count(10**6, last.total_completion_tokens)
    assert shown(ledger_of.audit()) == []
    # The runner's meter lacks the token of a request that is under way.
    progress = RequestProgress(f"open-{last.seq - 1}", 1, (7,))
    line = encode(ProgressRecord(seq=last.seq + 1, at=0.0, step=1, requests=(progress,)))
    with next((ledger_of.engine_dir / "journal").iterdir()).open("ab") as journal:
        journal.write(line)
    [line] = shown(ledger_of.audit())
    assert line.endswith("more sampled tokens were counted than computed")


# ---- acknowledged ----


def accept(audited: Audited, report: Report, finding_id: str) -> Any:
    return audited.database.write_sync(
        lambda c: acknowledge(c, SIGNER, report, finding_id, reason="fire", now_ms=NOW_MS)
    )


def test_ends_that_a_restored_ledger_lacks_are_found_before_a_start_and_until_acknowledged(
    ledger_of, tmp_path
):
    """The engine served on after the backup: ends 24 to 27 were settled and deleted."""
    ends = make_ends(30, seed=1)
    assert ends[:24] == ENDS
    newer = write_engine_dir(tmp_path / "newer", ends[27:], behind=ends[26])
    restored = Audited(ledger_of.database, newer)
    [found] = (report := restored.audit()).findings
    assert (found.check, found.subject) == ("journals", f"engine {ENGINE}")
    counts = ("num_prompt_tokens", "num_cached_tokens", "num_completion_tokens")
    assert found.found == (4, *(sum(getattr(e, name) for e in ends[23:27]) for name in counts))
    receipt = accept(restored, report, found.finding_id)
    assert (receipt["kind"], receipt["amount_nanousd"]) == ("difference", 0)
    assert receipt["memo"].endswith(": no price is known; fire")
    query = sa.select(audit_log.c.actor, audit_log.c.target).filter_by(action="audit.acknowledge")
    line = restored.database.read_sync(lambda conn: conn.execute(query).one())
    assert tuple(line) == ("operator", found.finding_id)
    with pytest.raises(Conflict):
        accept(restored, report, found.finding_id)
    post_ends(restored.database, *ends[27:29])
    report = restored.audit()
    assert (shown(report), report.acknowledged) == ([], [found])
    auditor, metrics = make_auditor(restored.database)
    asyncio.run(auditor.turn())
    assert figures(metrics)['findings{check="journals"}'] == 0
    report = change(restored, sa.delete(usage_events).filter_by(request_id="r5"))
    [larger] = [finding for finding in report.findings if finding.detail == found.detail]
    assert larger.found[0] == 5, "a larger gap is a finding again"


def test_an_acknowledgement_books_what_the_finding_differs_by_and_was_not_booked(ledger_of):
    """An entry is dearer than its event, and later even dearer."""
    charged = {"amount_nanousd": entries.c.amount_nanousd + 7}
    dearer = sa.update(entries).values(**charged).where(entries.c.entry_id == 4)
    for difference in (-7, -14):
        report = change(ledger_of, dearer)
        [found] = [finding for finding in report.findings if finding.difference_nanousd]
        assert found.difference_nanousd == difference
        receipt = accept(ledger_of, report, found.finding_id)
        assert (receipt["debit_account"], receipt["amount_nanousd"]) == ("tenant/books", 7)
        report = ledger_of.audit()
        assert (report.difference_nanousd, report.acknowledged) == (0, [found])
        assert not any("books" in line for line in shown(report)), "the new entry is in order"
    with pytest.raises(NotFound):
        accept(ledger_of, report, "0" * 12)
    asked = {"memo": None, "idempotency_key": "one", "now_ms": NOW_MS}
    with pytest.raises(Invalid, match="is a difference and stays"):
        ledger_of.database.write_sync(
            lambda c: post_correction(c, SIGNER, receipt["entry_id"], **asked)
        )


# ---- in the gateway ----


def make_auditor(
    database: Database, first: Callable[[], object] = lambda: None
) -> tuple[Auditor, Metrics]:
    """Make an auditor. first: called when it waits for the settler."""

    async def wait_settled(timeout_s: float) -> None:
        first()

    settler = SimpleNamespace(lags={}, wait_settled=wait_settled)
    metrics = Metrics(figures_only(), settler)
    return Auditor(database, settler, metrics.note_audit), metrics


def test_the_gateway_audits_when_what_lay_in_the_journals_is_posted(ledger_of):
    database, account = ledger_of.database, tenant_accounts.c.balance_nanousd

    def move(nanousd):
        moved = sa.update(tenant_accounts).values(balance_nanousd=account + nanousd)
        database.write_sync(lambda conn: conn.execute(moved))

    move(5)
    auditor, _ = make_auditor(database, first=lambda: move(-5))
    asyncio.run(auditor.turn())
    assert auditor.last.findings == []


def figures(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("chorale_audit"))
    return {name.removeprefix("chorale_audit_"): float(value) for name, value in pairs}


def test_the_gateways_audit_is_of_sums_and_its_findings_become_incidents_once(ledger_of, caplog):
    database = ledger_of.database
    auditor, metrics = make_auditor(database)
    asyncio.run(auditor.turn())
    assert figures(metrics)['findings{check="accounts"}'] == 0
    succeeded_at = figures(metrics)["last_success_timestamp_seconds"]
    assert succeeded_at > 0
    broken = sa.update(tenant_accounts).values(balance_nanousd=5).filter_by(tenant_id="ten_2")
    database.write_sync(lambda conn: conn.execute(broken))
    for _ in range(2):
        asyncio.run(auditor.turn())
    assert figures(metrics)['findings{check="accounts"}'] == 1
    assert figures(metrics)["last_success_timestamp_seconds"] == succeeded_at
    assert figures(metrics)["timestamp_seconds"] >= succeeded_at
    query = sa.select(incidents.c.kind, incidents.c.detail)
    assert database.read_sync(lambda conn: [tuple(row) for row in conn.execute(query)]) == [
        ("audit_accounts", "tenant ten_2: balance_nanousd")
    ]
    assert "audit: tenant ten_2: balance_nanousd" in caplog.text


def test_a_sum_that_is_off_is_found_by_the_gateway_too(ledger_of):
    """The gateway checks roll-ups of two days only, which this ledger lacks, and all other sums."""
    for query, check in [
        (sa.update(journal_positions).values(num_ends=5), "journals"),
        (sa.delete(entries).where(entries.c.entry_id == 4), "entry ids"),
        (sa.update(statements).values(num_entries=1), "statements"),
        (sa.delete(entries), "entry ids"),
    ]:
        ledger_of.database.write_sync(lambda conn, query=query: conn.execute(query))
        report = ledger_of.database.read_sync(audit_sums)
        assert report.checks[check].num_findings > 0, check
