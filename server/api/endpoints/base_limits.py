"""How much of each base model a tenant may use, which the operator sets."""

from typing import Annotated, Literal

from fastapi import Path
from pydantic import Field
from sqlalchemy import Connection

from server.api.accounts import AccountEndpoints, RowsDep
from server.api.answer import ListAnswer
from server.api.bodies import json_body
from server.api.deps import BasesDep
from server.api.endpoints.limits import AmountsAnswer, LimitFields
from server.billing.base_revisions import check_base
from server.database.clock import now_ms
from server.limits import base_limits
from server.limits.amounts import Amounts

_of_tenants = AccountEndpoints()
router = _of_tenants.admin_router

BaseName = Annotated[str, Path(min_length=1, max_length=256)]


class BaseLimitsAnswer(AmountsAnswer):
    """The limits of a tenant on a base model.   A limit of null is none."""

    object: Literal["base.limits"] = "base.limits"
    tenant_id: str = Field(examples=["ten_5f0c1d2e3a4b5968"])
    base_model: str = Field(examples=["smollm2"])


class BaseLimitsList(ListAnswer[BaseLimitsAnswer]):
    """The limits of a tenant on base models, by their names."""


@_of_tenants.operators("GET", "/limits")
async def list_base_limits(rows: RowsDep) -> BaseLimitsList:
    """List the base models on which a tenant has limits."""

    def read(conn: Connection, tenant_id: str) -> list[BaseLimitsAnswer]:
        found = base_limits.get_base_limits(conn, tenant_id)
        return [_limits(tenant_id, *item) for item in found.items()]

    return BaseLimitsList(data=await rows.read(read))


@_of_tenants.operators("GET", "/limits/{base_model:path}")
async def get_base_limits(base_model: BaseName, rows: RowsDep) -> BaseLimitsAnswer:
    """Get the limits of a tenant on a base model."""

    def read(conn: Connection, tenant_id: str) -> BaseLimitsAnswer:
        found = base_limits.get_base_limits(conn, tenant_id)
        return _limits(tenant_id, base_model, found.get(base_model, Amounts()))

    return await rows.read(read)


@_of_tenants.operators("PUT", "/limits/{base_model:path}")
async def set_base_limits(
    base_model: BaseName,
    bases: BasesDep,
    rows: RowsDep,
    body: Annotated[LimitFields, json_body(LimitFields)],
) -> BaseLimitsAnswer:
    """Set the limits of a tenant on a base model; a limit that is left out is removed.

    They count the tenant's requests on the base model and on all adapters of it together.
    """
    amounts = Amounts(**body.model_dump())

    def write(conn: Connection, tenant_id: str) -> BaseLimitsAnswer:
        if amounts != Amounts():  # what is left of a name can be removed
            check_base(conn, base_model, [entry.name for entry in bases.entries])
        base_limits.set_base_limits(
            conn, tenant_id, base_model, amounts, now_ms=now_ms(), actor="operator"
        )
        return _limits(tenant_id, base_model, amounts)

    return await rows.write(write)


def _limits(tenant_id: str, base_model: str, amounts: Amounts) -> BaseLimitsAnswer:
    return BaseLimitsAnswer.of_record(amounts, tenant_id=tenant_id, base_model=base_model)
