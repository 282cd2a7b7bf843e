"""What the gateway's own audit found last, for the operator."""

from fastapi import APIRouter

from server.api.deps import AuditorDep
from server.billing.audit.report import report_body
from server.text.json_object import JsonObject

router = APIRouter()


@router.get("/audit")
async def get_audit(auditor: AuditorDep) -> JsonObject:
    """`report` is null in a gateway that has done none yet: one of them does it for all."""
    last = auditor.last
    return {"object": "audit", "report": None if last is None else report_body(last)}
