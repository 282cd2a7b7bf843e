"""What an audit found: the rows it looked at, and each difference by its name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.engine import Connection

from server.text.json_object import JsonObject

MAX_FINDINGS = 1000
"""Of one check, by name; the rest are counted."""

UNREADABLE = (ValueError, OverflowError, OSError, TypeError)
"""What a value that nobody could have posted may raise, such as a date of the year 33714."""

Progress = Callable[[str, int], None]
"""(check, rows looked at so far)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is in two places and is not the same.

    subject: which row, such as `entry 12` or `hold r7`.   detail: what does not fit, in words that
    do not change while it lasts.   difference_nanousd: what its event is worth by its price, less
    what was charged.
    """

    check: str
    subject: str
    detail: str
    expected: Any = None
    found: Any = None
    difference_nanousd: int = 0


@dataclass(slots=True)
class CheckResult:
    """findings: the first MAX_FINDINGS of num_findings."""

    num_rows: int = 0
    num_findings: int = 0
    findings: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """difference_nanousd: of all findings, what was not charged less what was charged too much.

    incidents: how many of each kind the ledger has on record.   notes: what is no difference.
    """

    at_ms: int
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
            result.num_findings += 1
            self.difference_nanousd += finding.difference_nanousd
            if len(result.findings) < MAX_FINDINGS:
                result.findings.append(finding)


@dataclass(slots=True)
class Scope:
    """What a check works with: one snapshot of the database, and the report for what it counts.

    since_ms: rows of before are left out where rows are looked at one by one.
    """

    conn: Connection
    report: Report
    now_ms: int
    since_ms: int = 0
    progress: Progress = lambda check, num_rows: None

    def count(self, check: str, num_rows: int) -> None:
        """These rows were looked at."""
        result = self.report.checks.setdefault(check, CheckResult())
        result.num_rows += num_rows
        self.progress(check, result.num_rows)


def differences(check: str, subject: str, pairs: dict[str, tuple[Any, Any]]) -> Iterable[Finding]:
    """A finding for each pair (expected, found) that is none. pairs: by what they are called."""
    for name, (expected, found) in pairs.items():
        if expected != found:
            yield Finding(check=check, subject=subject, detail=name, expected=expected, found=found)


def report_body(report: Report) -> JsonObject:
    """Plain JSON."""
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
        "incidents": report.incidents,
        "notes": report.notes,
    }


def _finding(finding: Finding) -> JsonObject:
    def plain(value: Any) -> Any:
        return value if isinstance(value, int | str | bool | None) else str(value)

    return {
        "subject": finding.subject,
        "detail": finding.detail,
        "expected": plain(finding.expected),
        "found": plain(finding.found),
        "difference_nanousd": finding.difference_nanousd,
    }
