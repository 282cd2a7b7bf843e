"""The gateway's own audit of the ledger's sums, every hour and after a start."""

import logging
from collections.abc import Callable

from sqlalchemy.engine import Connection

from server.billing.audit.report import Finding, Report
from server.billing.audit.run import audit_sums
from server.billing.incidents import record_incident
from server.billing.settler import Settler
from server.database.database import Database

logger = logging.getLogger(__name__)

INTERVAL_S = 3600.0
_SETTLE_WAIT_S = 60.0
"""Longest wait for the first settling, so that records still in the journals are no difference."""
_MAX_INCIDENTS = 100
"""Incidents that one audit may record: a thousand broken sums have one cause."""


class Auditor:
    """The chore that audits the sums.

    last: the newest report, for the operator; None until this gateway has made one.
    note_report: called with every report, for the metrics.
    """

    def __init__(
        self, database: Database, settler: Settler, note_report: Callable[[Report], None]
    ) -> None:
        self._database = database
        self._settler = settler
        self._note_report = note_report
        self.last: Report | None = None

    async def turn(self) -> None:
        """Audit once the journals are settled. Raises LedgerUnavailable."""
        await self._settler.wait_settled(_SETTLE_WAIT_S)
        await self.audit()

    async def audit(self) -> Report:
        """Audit, and record each new finding as an incident. Raises LedgerUnavailable."""
        report = await self._database.read(audit_sums)
        self.last = report
        self._note_report(report)
        for finding in report.findings:
            logger.error("audit: %s: %s", finding.subject, finding.detail)
        found = report.findings[:_MAX_INCIDENTS]
        if found:
            await self._database.write(lambda conn: _record(conn, found, report.at_ms))
        return report


def _record(conn: Connection, findings: list[Finding], at_ms: int) -> None:
    for finding in findings:
        kind, detail = f"audit_{finding.check}", f"{finding.subject}: {finding.detail}"
        record_incident(conn, at_ms=at_ms, kind=kind, detail=detail, same=("kind", "detail"))
