"""The operator's endpoints: tenants, the usage of all tenants, and where adapters are."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends
from pydantic import Field
from sqlalchemy import Connection

from engine.wire.messages import Tier
from server.accounts import tenants
from server.accounts.tenants import Tenant, TenantLimits, TenantStatus
from server.api.answer import Answer, ListAnswer
from server.api.bodies import BodyFields, json_body
from server.api.deps import BasesDep, DatabaseDep, IdentitiesDep, PriceTagsDep, operators_router
from server.api.endpoints.budgets import Dollars, put_budget
from server.api.endpoints.usage import GroupBy, UsageList, usage_list
from server.api.times import Time
from server.billing import budgets
from server.billing.rating import format_usd
from server.database.clock import now_ms

router = operators_router()


class _Limits(BodyFields):
    """The limits of a tenant.

    requests_per_minute: the most requests a minute; null for no limit.
    tokens_per_minute: the most tokens of prompts and answers a minute; null for no limit.
    max_concurrency: the most requests under way at once; null for no limit.
    max_queue_share: the share of the places for waiting requests that it may take; null for the
    server's default.
    weight: its share of a busy engine, beside the weights of others: with 2 twice that of 1.
    max_adapters: the most adapters that it may have; null for 100.
    max_adapter_bytes_total: the most bytes of all its adapters; null for 20 GiB.
    monthly_budget: dollars that it may spend in a month of UTC, after which its requests are
    refused, in digits such as 12.5; null for no such budget.
    """

    requests_per_minute: int | None = Field(None, ge=1, lt=2**31)
    tokens_per_minute: int | None = Field(None, ge=1, lt=2**31)
    max_concurrency: int | None = Field(None, ge=1, lt=2**31)
    max_queue_share: float | None = Field(None, gt=0, le=1)
    weight: float = Field(1.0, gt=0, le=1000)
    max_adapters: int | None = Field(None, ge=0, lt=2**31)
    max_adapter_bytes_total: int | None = Field(None, ge=0, lt=2**63)
    monthly_budget: Dollars | None = None


class _Changes(_Limits):
    """Changes to a tenant. plan: whose prices the tenant pays, unless it has prices of its own.

    ignore_unknown_fields: whether fields that no request has are left out of its requests, and
    named by a header of the answer, not refused.
    legal_name, address: what statements that are issued from now on are addressed to; null for
    nothing.
    """

    plan: str | None = Field(None, max_length=64)
    ignore_unknown_fields: bool | None = None
    legal_name: str | None = Field(None, max_length=256, pattern=r"^[^\x00]*$")
    address: str | None = Field(None, max_length=1024, pattern=r"^[^\x00]*$")


_ADDRESSEE = {"legal_name", "address"}
_DETAILS = {"ignore_unknown_fields", "plan", *_ADDRESSEE}
"""Changes that are about neither a tenant's limits nor its budget."""


class _NewTenant(_Limits):
    """A new tenant. name: small letters, digits, `.`, `_` and `-`; no other tenant may have it.

    plan: whose prices the tenant pays, unless it has prices of its own.
    """

    name: str = Field(min_length=1, max_length=64)
    plan: str = Field(tenants.STANDARD, max_length=64)


class TenantAnswer(Answer):
    """A tenant with its limits; a limit that is null is none.

    max_queue_share: what it may take of the places of waiting requests, above 0 and at most 1.
    weight: its share of an engine that is full, beside the weights of others.
    monthly_budget: in dollars.   created_at: Unix seconds.
    ignore_unknown_fields: whether fields that no request has are left out of its requests.
    legal_name, address: what its statements are addressed to.
    """

    object: Literal["tenant"] = "tenant"
    tenant_id: str = Field(examples=["ten_5f0c1d2e3a4b5968"])
    name: str = Field(examples=["acme"])
    status: TenantStatus
    plan: str = Field(examples=["standard"])
    requests_per_minute: int | None = Field(examples=[600])
    tokens_per_minute: int | None = Field(examples=[200_000])
    max_concurrency: int | None = Field(examples=[16])
    max_queue_share: float | None = Field(examples=[0.25])
    weight: float = Field(examples=[1.0])
    max_adapters: int | None = Field(examples=[100])
    max_adapter_bytes_total: int | None = Field(examples=[20_000_000_000])
    monthly_budget: str | None = Field(examples=["250.000000000"])
    ignore_unknown_fields: bool = Field(examples=[False])
    legal_name: str | None = Field(examples=["Acme Ltd."])
    address: str | None = Field(examples=["1 Main Street, Springfield"])
    created_at: int = Field(examples=[1_794_787_200])


class TenantList(ListAnswer[TenantAnswer]):
    """All tenants."""


class ResidencyAnswer(Answer):
    """An adapter of an engine. tier: the memory that it is in, or on its way to.

    base_model: the name of the engine's.   size_bytes: what it takes there.
    error: the fault of its last load.
    """

    engine: str = Field(examples=["engine-1"])
    base_model: str = Field(examples=["base"])
    object_key: str = Field(examples=[f"ten_5f0c1d2e3a4b5968/{'3c' * 32}"])
    digest: str = Field(examples=["3c" * 32])
    tier: Tier = Field(examples=["device"])
    size_bytes: int = Field(examples=[54_525_952])
    error: str | None = Field(examples=[None])


class ResidencyList(ListAnswer[ResidencyAnswer]):
    """The adapters that engines know of."""


@dataclass(frozen=True, slots=True)
class _Writing:
    """Makes changes to tenants that this gateway's next request sees."""

    database: DatabaseDep
    identities: IdentitiesDep
    price_tags: PriceTagsDep

    async def write(self, write: Callable[[Connection], Tenant]) -> TenantAnswer:
        def write_and_show(conn: Connection) -> TenantAnswer:
            return _shown(conn, [write(conn)])[0]

        shown = await self.database.write(write_and_show)
        self.identities.forget(shown.tenant_id)
        self.price_tags.forget()  # the plan may be another
        return shown

    async def change_status(self, tenant: str, change: Callable[..., None]) -> TenantAnswer:
        def write(conn: Connection) -> Tenant:
            tenant_id = tenants.get_tenant(conn, tenant).tenant_id
            change(conn, tenant_id, now_ms=now_ms())
            return tenants.get_tenant(conn, tenant_id)

        return await self.write(write)


_WritingDep = Annotated[_Writing, Depends()]


@router.post("/tenants", status_code=201)
async def create_tenant(
    body: Annotated[_NewTenant, json_body(_NewTenant)], writing: _WritingDep
) -> TenantAnswer:
    """Create a tenant with its limits, its plan and its monthly budget."""
    limits = TenantLimits(**body.model_dump(exclude={"name", "plan", "monthly_budget"}))

    def create(conn: Connection) -> Tenant:
        made = tenants.create_tenant(
            conn, body.name, now_ms=now_ms(), limits=limits, plan=body.plan
        )
        if body.monthly_budget is not None:
            put_budget(conn, made.tenant_id, "monthly", "hard", body.monthly_budget)
        return made

    return await writing.write(create)


@router.get("/tenants")
async def list_tenants(database: DatabaseDep) -> TenantList:
    """List all tenants."""
    return TenantList(
        data=await database.read(lambda conn: _shown(conn, tenants.list_tenants(conn)))
    )


@router.get("/tenants/{tenant}")
async def get_tenant(tenant: str, database: DatabaseDep) -> TenantAnswer:
    """Get a tenant by id or name."""
    found = await database.read(lambda conn: _shown(conn, [tenants.get_tenant(conn, tenant)]))
    return found[0]


@router.patch("/tenants/{tenant}")
async def change_tenant(
    tenant: str, body: Annotated[_Changes, json_body(_Changes)], writing: _WritingDep
) -> TenantAnswer:
    """Change a tenant; fields that are left out stay as they are."""
    named = body.model_dump(exclude_unset=True, exclude={*_DETAILS, "monthly_budget"})
    details = body.model_dump(exclude_unset=True, include=_DETAILS)
    changes = {k: v for k, v in details.items() if v is not None or k in _ADDRESSEE}

    def change(conn: Connection) -> Tenant:
        found = tenants.get_tenant(conn, tenant)
        if named:
            limits = dataclasses.replace(found, **named)
            tenants.set_limits(conn, found.tenant_id, limits, now_ms=now_ms())
        tenants.set_details(conn, found.tenant_id, changes, now_ms=now_ms())
        if "monthly_budget" in body.model_fields_set:
            put_budget(conn, found.tenant_id, "monthly", "hard", body.monthly_budget)
        return tenants.get_tenant(conn, found.tenant_id)

    return await writing.write(change)


@router.post("/tenants/{tenant}/suspend")
async def suspend_tenant(tenant: str, writing: _WritingDep) -> TenantAnswer:
    """Suspend a tenant: its requests are refused until it is resumed."""
    return await writing.change_status(tenant, tenants.suspend_tenant)


@router.post("/tenants/{tenant}/resume")
async def resume_tenant(tenant: str, writing: _WritingDep) -> TenantAnswer:
    """Resume a suspended tenant."""
    return await writing.change_status(tenant, tenants.resume_tenant)


@router.get("/usage", response_model_exclude_unset=True)
async def get_usage(
    database: DatabaseDep,
    start: Time = None,
    end: Time = None,
    group_by: GroupBy = None,
) -> UsageList:
    """Sum up the usage of all tenants, by tenant unless `group_by` names other dimensions."""
    return await usage_list(database, None, start, end, group_by or ["tenant"])


@router.get("/residency")
async def residency(bases: BasesDep) -> ResidencyList:
    """List every adapter that an engine knows of, with where it is now."""
    data = [
        ResidencyAnswer(engine=engine.name, base_model=base.model_id, **dataclasses.asdict(it))
        for base in bases
        for engine in base.engines
        for it in engine.residency.values()
    ]
    return ResidencyList(data=data)


def _shown(conn: Connection, found: Sequence[Tenant]) -> list[TenantAnswer]:
    """Tenants with their hard monthly budgets, in dollars."""
    tenant_ids = [tenant.tenant_id for tenant in found] if len(found) == 1 else None
    monthly = {
        budget.tenant_id: format_usd(budget.amount_nanousd)
        for budget in budgets.get_budgets(conn, tenant_ids)
        if (budget.kind, budget.enforcement) == ("monthly", "hard")
    }
    return [TenantAnswer.of_record(it, monthly_budget=monthly.get(it.tenant_id)) for it in found]
