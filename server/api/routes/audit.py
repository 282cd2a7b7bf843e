"""The result of the last audit, for the operator."""

from typing import Literal

from fastapi import APIRouter
from pydantic import Field

from server.api.answer import Answer
from server.api.deps import AuditorDep
from server.billing.audit.report import report_body

router = APIRouter()


class AuditFinding(Answer):
    """A difference. subject: the row that it is about.   detail: what does not fit.

    expected, found: the two values, where there are two.
    difference_nanousd: what the row is worth by its price, less what was charged.
    """

    subject: str = Field(examples=["tenant ten_5f0c1d2e3a4b5968"])
    detail: str = Field(examples=["balance_nanousd"])
    expected: int | str | bool | None = Field(examples=[12_250_120_000])
    found: int | str | bool | None = Field(examples=[12_250_000_000])
    difference_nanousd: int = Field(examples=[0])


class AuditCheck(Answer):
    """A check. num_rows: rows that it looked at.   findings: the first ones of num_findings."""

    check: str = Field(examples=["accounts"])
    num_rows: int = Field(examples=[118])
    num_findings: int = Field(examples=[1])
    findings: list[AuditFinding]


class AuditReport(Answer):
    """An audit's report. at: Unix seconds.   difference_nanousd: the sum of all findings.

    incidents: how many of each kind the ledger has on record.   notes: what is no difference.
    """

    at: int = Field(examples=[1_796_083_200])
    difference_nanousd: int = Field(examples=[0])
    num_findings: int = Field(examples=[1])
    checks: list[AuditCheck]
    incidents: dict[str, int] = Field(examples=[{"amount_over_hold": 1}])
    notes: list[str] = Field(
        examples=[["1,024 prompt tokens were computed and 3 sampled that nobody pays for."]]
    )


class AuditAnswer(Answer):
    """The last audit. report: null in a gateway that has made none."""

    object: Literal["audit"] = "audit"
    report: AuditReport | None


@router.get("/audit")
async def get_audit(auditor: AuditorDep) -> AuditAnswer:
    """Get the report of this gateway's last audit.

    `report` is null in a gateway that has made none yet: one gateway audits for all.
    """
    last = auditor.last
    return AuditAnswer(report=None if last is None else AuditReport(**report_body(last)))
