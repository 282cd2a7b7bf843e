"""The result of the last audit, for the operator."""

from fastapi import APIRouter

from server.api.deps import AuditorDep
from server.billing.audit.report import report_body
from server.text.json_object import JsonObject

router = APIRouter()


@router.get("/audit")
async def get_audit(auditor: AuditorDep) -> JsonObject:
    """Get the report of this gateway's last audit.

    `report` is null in a gateway that has made none yet: one gateway audits for all.
    """
    last = auditor.last
    return {"object": "audit", "report": None if last is None else report_body(last)}
