"""Limits as they stand, each with the requests that take of it; and the limits of an adapter."""

from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy import Connection

from server.api.answer import Answer, ListAnswer
from server.api.bodies import BodyFields, json_body
from server.api.deps import BasesDep, DatabaseDep, IdentityDep, LimiterDep, tenants_router
from server.api.endpoints.adapters import ReaderDep, WriterDep
from server.database.clock import now_ms
from server.limits.adapter_limits import (
    get_adapter_limits,
    limits_of_adapters,
    set_adapter_limits,
)
from server.limits.amounts import Amounts
from server.limits.base_limits import tenant_and_base
from server.limits.rules import Metric, Scope, Standing

router = tenants_router()

_MAX_LIMIT = 10**9
"""The most that a limit may be: nothing reaches a larger one in a minute."""


class LimitFields(BodyFields):
    """Amounts of limits; one that is left out is none.

    requests_per_minute: the most requests a minute; null for no limit.
    tokens_per_minute: the most tokens of prompts and answers a minute; null for no limit.
    max_concurrency: the most requests under way at once; null for no limit.
    """

    requests_per_minute: int | None = Field(None, ge=1, le=_MAX_LIMIT)
    tokens_per_minute: int | None = Field(None, ge=1, le=_MAX_LIMIT)
    max_concurrency: int | None = Field(None, ge=1, le=_MAX_LIMIT)


class LimitHolder(Answer):
    """A request under way that takes of a limit."""

    request_id: str = Field(examples=["0b7e61f3c2d94a58b1f6a9d3e4c85270"])
    units: int = Field(examples=[1])
    frees_in_s: float = Field(examples=[41.5])


class LimitAnswer(Answer):
    """A limit, and its use.

    id: of the tenant or the key, of a rotated key that of the first, or the name of the adapter or
    the base model.
    window_s: null for requests at a time.
    reset_s: seconds until all of it is free again if nobody asks.   held_by: the oldest first.
    """

    object: Literal["limit"] = "limit"
    metric: Metric
    scope: Scope
    id: str = Field(examples=["ten_8c1f0a6b3e5d7942"])
    limit: int = Field(examples=[60])
    window_s: Literal[60] | None
    used: int = Field(examples=[1])
    remaining: int = Field(examples=[59])
    reset_s: float = Field(examples=[0.75])
    held_by: list[LimitHolder]


class QueueShare(Answer):
    """A tenant's share of the queue, in answers.   expected_wait_s: of one more, in seconds."""

    limit: int = Field(examples=[64])
    used: int = Field(examples=[2])
    remaining: int = Field(examples=[62])
    expected_wait_s: float = Field(examples=[0.125])


class LimitList(ListAnswer[LimitAnswer]):
    """All limits that the key's requests are under.

    limiter_degraded: the limiter has lost its state, and may refuse too early.
    queue: of the first base model.   queues: of every base model, by its name.
    """

    limiter_degraded: bool
    queue: QueueShare
    queues: dict[str, QueueShare] = Field(
        examples=[{"base": {"limit": 64, "used": 2, "remaining": 62, "expected_wait_s": 0.125}}]
    )


class AmountsAnswer(Answer):
    """Amounts of limits.   null is none."""

    requests_per_minute: int | None = Field(examples=[60])
    tokens_per_minute: int | None = Field(examples=[100_000])
    max_concurrency: int | None = Field(examples=[4])


class AdapterLimitsAnswer(AmountsAnswer):
    """The limits of an adapter.   A limit of null is none."""

    object: Literal["adapter.limits"] = "adapter.limits"
    id: str = Field(examples=["my-adapter"])


@router.get("/limits")
async def get_limits(
    database: DatabaseDep, limiter: LimiterDep, bases: BasesDep, identity: IdentityDep
) -> LimitList:
    """Get the limits of the tenant (also by base model), its adapters and the key, with their use.

    The limits of the keys above the asking key are among them: its requests count there as well.
    held_by: the requests that take of a limit, and when each of them frees its part.
    """
    adapters = await database.read(lambda c: limits_of_adapters(c, identity.tenant_id))
    names = {adapter_id: name for name, adapter_id, _ in adapters}
    names |= {limit.scope_id: tenant_and_base(limit)[1] for limit in identity.base_limits}
    limits = [*identity.limits, *identity.base_limits]
    limits += (limit for *_, found in adapters for limit in found)
    standings = await limiter.standings(limits)
    return LimitList(
        data=[_standing(standing, names) for standing in standings],
        limiter_degraded=limiter.is_degraded,
        queue=QueueShare(**bases.default.load.explain(identity)),
        queues={base.model_id: QueueShare(**base.load.explain(identity)) for base in bases.current},
    )


@router.get("/adapters/{name}/limits")
async def get_limits_of_adapter(name: str, reader: ReaderDep) -> AdapterLimitsAnswer:
    """Get the limits of an adapter."""
    found = await reader.database.read(
        lambda conn: get_adapter_limits(conn, reader.find(conn, name).adapter_id)
    )
    return AdapterLimitsAnswer.of_record(found, id=name)


@router.put("/adapters/{name}/limits")
async def set_limits_of_adapter(
    name: str, writer: WriterDep, body: Annotated[LimitFields, json_body(LimitFields)]
) -> AdapterLimitsAnswer:
    """Set the limits of an adapter; a limit that is left out is removed.

    A limit counts all requests for the adapter together, whoever sends them.
    """
    limits, actor = Amounts(**body.model_dump()), writer.identity.actor

    def write(conn: Connection) -> None:
        adapter_id = writer.find(conn, name).adapter_id
        set_adapter_limits(conn, adapter_id, limits, now_ms=now_ms(), actor=actor)

    await writer.database.write(write)
    return AdapterLimitsAnswer.of_record(limits, id=name)


def _standing(standing: Standing, names: dict[str, str]) -> LimitAnswer:
    limit = standing.limit
    return LimitAnswer.of_record(
        limit,
        id=names.get(limit.scope_id, limit.scope_id),
        limit=limit.amount,
        window_s=None if limit.metric == "concurrency" else 60,
        used=limit.amount - standing.remaining,
        remaining=standing.remaining,
        reset_s=standing.reset_ms / 1000,
        held_by=[
            LimitHolder.of_record(holder, frees_in_s=holder.expires_ms / 1000)
            for holder in standing.holders
        ],
    )
