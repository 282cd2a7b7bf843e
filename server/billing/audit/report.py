"""The report of an audit: how many rows it looked at, and each difference that it found."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.engine import Connection

from engine.journal.lines import Position
from server.text.json_object import JsonObject

MAX_FINDINGS = 1000
"""Findings that a report keeps of one check; the rest are only counted."""

UNREADABLE = (ValueError, OverflowError, OSError, TypeError)
"""Exceptions that an impossible value may raise, such as a date in the year 33714."""

Progress = Callable[[str, int], None]
"""Callback that takes (check, rows looked at so far)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A value that is kept in two places and differs.

    subject: the row, such as `entry 12` or `hold r7`.
    detail: the difference, in words that stay the same from audit to audit while it lasts.
    difference_nanousd: the price of the row's event less the amount that was charged.
    """

    check: str
    subject: str
    detail: str
    expected: Any = None
    found: Any = None
    difference_nanousd: int = 0

    def __str__(self) -> str:
        return f"{self.check}: {self.subject}: {self.detail}"

    @property
    def finding_id(self) -> str:
        """Name of the difference: it lasts while two numbers grow alike, and changes with it."""
        gap: object = (self.expected, self.found)
        if isinstance(self.expected, int) and isinstance(self.found, int):
            gap = self.expected - self.found
        return hashlib.sha256(f"{self}: {gap} {self.difference_nanousd}".encode()).hexdigest()[:12]


@dataclass(slots=True)
class CheckResult:
    """Result of one check. findings: the first MAX_FINDINGS of num_findings."""

    num_rows: int = 0
    num_findings: int = 0
    findings: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """Results of one audit, by check.

    difference_nanousd: sum over all findings, amounts not charged less amounts charged too much.
    known: ids of findings that an operator acknowledged.   acknowledged: those that last; they are
    in no other figure.
    incidents: number of incidents of each kind that the ledger has on record.
    notes: sentences for the operator about things that are no difference.
    """

    at_ms: int
    known: frozenset[str] = frozenset()
    acknowledged: list[Finding] = field(default_factory=list)
    checks: dict[str, CheckResult] = field(default_factory=dict)
    incidents: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    difference_nanousd: int = 0

    @property
    def num_findings(self) -> int:
        return sum(result.num_findings for result in self.checks.values())

    @property
    def findings(self) -> list[Finding]:
        return [finding for result in self.checks.values() for finding in result.findings]

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            result = self.checks.setdefault(finding.check, CheckResult())
            if finding.finding_id in self.known:
                self.acknowledged.append(finding)
                continue
            result.num_findings += 1
            self.difference_nanousd += finding.difference_nanousd
            if len(result.findings) < MAX_FINDINGS:
                result.findings.append(finding)


@dataclass(slots=True)
class Scope:
    """Input of a check: one snapshot of the database, and the report that it adds to.

    since_ms: checks that look at single rows leave out older ones.
    starts: where the journals of local engines begin, by engine id.
    """

    conn: Connection
    report: Report
    now_ms: int
    since_ms: int = 0
    progress: Progress = lambda check, num_rows: None
    starts: Mapping[str, Position] = field(default_factory=dict)

    def count(self, check: str, num_rows: int) -> None:
        """Add to the number of rows that the check has looked at."""
        result = self.report.checks.setdefault(check, CheckResult())
        result.num_rows += num_rows
        self.progress(check, result.num_rows)


def differences(check: str, subject: str, pairs: dict[str, tuple[Any, Any]]) -> Iterable[Finding]:
    """Yield a finding for each (expected, found) that differ. pairs: by the detail to report."""
    for name, (expected, found) in pairs.items():
        if expected != found:
            yield Finding(check, subject, name, expected, found)


def report_body(report: Report) -> JsonObject:
    """Return the report as plain JSON."""
    return {
        "at": report.at_ms // 1000,
        "difference_nanousd": report.difference_nanousd,
        "num_findings": report.num_findings,
        "checks": [
            {
                "check": name,
                "num_rows": result.num_rows,
                "num_findings": result.num_findings,
                "findings": [_finding(finding) for finding in result.findings],
            }
            for name, result in report.checks.items()
        ],
        "acknowledged": [_finding(finding) for finding in report.acknowledged],
        "incidents": report.incidents,
        "notes": report.notes,
    }


def _finding(finding: Finding) -> JsonObject:
    def plain(value: Any) -> Any:
        return value if isinstance(value, int | str | bool | None) else str(value)

    return {
        "finding_id": finding.finding_id,
        "subject": finding.subject,
        "detail": finding.detail,
        "expected": plain(finding.expected),
        "found": plain(finding.found),
        "difference_nanousd": finding.difference_nanousd,
    }
