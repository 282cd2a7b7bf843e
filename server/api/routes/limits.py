"""Limits as they stand, each with the requests that take of it; and the limits of an adapter."""

import dataclasses
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from server.api.bodies import json_body
from server.api.deps import (
    AdaptersReadKey,
    AdaptersWriteKey,
    CatalogDep,
    DatabaseDep,
    IdentityDep,
    LimiterDep,
    LoadDep,
)
from server.database.clock import now_ms
from server.limits.adapter_limits import (
    AdapterLimits,
    get_adapter_limits,
    limits_of_adapters,
    set_adapter_limits,
)
from server.limits.rules import Standing
from server.text.json_object import JsonObject

router = APIRouter()

_MAX_LIMIT = 10**9
"""The most that a limit may be: nothing reaches a larger one in a minute."""


class _Limits(BaseModel):
    model_config = ConfigDict(extra="forbid")
    requests_per_minute: int | None = Field(None, ge=1, le=_MAX_LIMIT)
    tokens_per_minute: int | None = Field(None, ge=1, le=_MAX_LIMIT)
    max_concurrency: int | None = Field(None, ge=1, le=_MAX_LIMIT)


@router.get("/limits")
async def get_limits(
    database: DatabaseDep, limiter: LimiterDep, load: LoadDep, identity: IdentityDep
) -> JsonObject:
    """Get the limits of the tenant, of the asking key and of the tenant's adapters, with their use.

    held_by: the requests that take of a limit, and when each of them frees its part.
    """
    adapters = await database.read(lambda c: limits_of_adapters(c, identity.tenant_id))
    names = {adapter_id: name for name, adapter_id, _ in adapters}
    limits = [*identity.limits, *(limit for *_, found in adapters for limit in found)]
    standings = await limiter.standings(limits)
    return {
        "object": "list",
        "data": [_standing(standing, names) for standing in standings],
        "has_more": False,
        "limiter_degraded": limiter.is_degraded,
        "queue": load.explain(identity),
    }


@router.get("/adapters/{name}/limits")
async def get_limits_of_adapter(
    name: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersReadKey
) -> JsonObject:
    """Get the limits of an adapter."""

    def read(conn: Connection) -> AdapterLimits:
        adapter = catalog.get_adapter(conn, identity.tenant_id, name)
        return get_adapter_limits(conn, adapter.adapter_id)

    return _adapter_limits(name, await database.read(read))


@router.put("/adapters/{name}/limits")
async def set_limits_of_adapter(
    name: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    identity: AdaptersWriteKey,
    body: Annotated[_Limits, json_body(_Limits)],
) -> JsonObject:
    """Set the limits of an adapter; a limit that is left out is removed.

    A limit counts all requests for the adapter together, whoever sends them.
    """
    limits = AdapterLimits(**body.model_dump())

    def write(conn: Connection) -> None:
        adapter = catalog.get_adapter(conn, identity.tenant_id, name)
        set_adapter_limits(conn, adapter.adapter_id, limits, now_ms=now_ms(), actor=identity.actor)

    await database.write(write)
    return _adapter_limits(name, limits)


def _adapter_limits(name: str, limits: AdapterLimits) -> JsonObject:
    return {"object": "adapter.limits", "id": name, **dataclasses.asdict(limits)}


def _standing(standing: Standing, names: dict[str, str]) -> JsonObject:
    limit = standing.limit
    return {
        "object": "limit",
        "metric": limit.metric,
        "scope": limit.scope,
        "id": names.get(limit.scope_id, limit.scope_id),
        "limit": limit.amount,
        "window_s": None if limit.metric == "concurrency" else 60,
        "used": limit.amount - standing.remaining,
        "remaining": standing.remaining,
        "reset_s": standing.reset_ms / 1000,
        "held_by": [
            {
                "request_id": holder.request_id,
                "units": holder.units,
                "frees_in_s": holder.expires_ms / 1000,
            }
            for holder in standing.holders
        ],
    }
