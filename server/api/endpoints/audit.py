"""The result of the last audit, and acknowledgements of its findings, for the operator."""

from typing import Annotated, Literal

from pydantic import Field

from server.api.answer import Answer
from server.api.bodies import BodyFields, json_body
from server.api.deps import AuditorDep, DatabaseDep, SignerDep, operators_router
from server.api.receipt_models import LedgerEntry
from server.billing.audit.acknowledgements import acknowledge
from server.billing.audit.report import report_body
from server.database.clock import now_ms

router = operators_router()


class _Acknowledgement(BodyFields):
    """The acknowledgement of a finding.

    finding_id: the finding's name in the audit's report.   reason: the text that the ledger keeps.
    """

    finding_id: str = Field(max_length=16)
    reason: str = Field(min_length=1, max_length=400, pattern=r"^[^\x00]*$")


class AuditFinding(Answer):
    """A difference. finding_id: its name, while it lasts.

    subject: the row that it is about.   detail: what does not fit.

    expected, found: the two values, where there are two.
    difference_nanousd: what the row is worth by its price, less what was charged.
    """

    finding_id: str = Field(examples=["9c1f0be2a7d4"])
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

    acknowledged: findings that last, and are in no other figure here.
    incidents: how many of each kind the ledger has on record.   notes: what is no difference.
    """

    at: int = Field(examples=[1_796_083_200])
    difference_nanousd: int = Field(examples=[0])
    num_findings: int = Field(examples=[1])
    checks: list[AuditCheck]
    acknowledged: list[AuditFinding]
    incidents: dict[str, int] = Field(examples=[{"amount_over_hold": 1}])
    notes: list[str] = Field(examples=[["12 end records are not settled yet."]])


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


@router.post("/audit/acknowledgements", status_code=201)
async def acknowledge_finding(
    body: Annotated[_Acknowledgement, json_body(_Acknowledgement)],
    auditor: AuditorDep,
    database: DatabaseDep,
    signer: SignerDep,
) -> LedgerEntry:
    """Acknowledge a finding of an audit made now; an entry of no tenant books its difference.

    From then on the finding is in no metric; if the difference grows, it is a finding again.
    """
    report = await auditor.audit()
    finding_id, reason = body.finding_id, body.reason
    receipt = await database.write(
        lambda conn: acknowledge(conn, signer, report, finding_id, reason=reason, now_ms=now_ms())
    )
    await auditor.audit()
    return LedgerEntry.model_validate(receipt)
