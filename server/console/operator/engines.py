"""The page of engines: what each does now, its memory, who waits, and where adapters are."""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import Response

from engine.messages import Residency, Tier
from registry.build import tenant_of
from server.accounts.tenants import names_of
from server.api.deps import BasesDep, DatabaseDep, FollowerDep
from server.api.routes.base_models import BaseModelAnswer, list_base_models
from server.api.routes.engines import EngineStatsAnswer, engines, suspects
from server.api.routes.problems import ProblemsDep
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import OperatorViewer
from server.database.clock import now_ms
from server.inference.bases import Bases
from server.inference.served_base import ServedBase
from server.pool.keeper import Decision
from server.pool.running import TenantLoad

router = pages_router("/operator")

_MOST_TENANTS = 50
_MOST_ADAPTERS = 10
_MOST_DECISIONS = 20


@router.get("")
async def show(
    viewer: OperatorViewer,
    problems: ProblemsDep,
    bases: BasesDep,
    follower: FollowerDep,
    database: DatabaseDep,
) -> Response:
    """Show what is wrong, the base models and their engines, as this gateway sees them."""
    found = (await engines(bases, database)).data
    models = (await list_base_models(bases, follower)).data
    pools = [_Pool.of(model, bases.at(model.home)) for model in models]
    stays = [_stays(base) for base in bases]
    suspected = (await suspects(bases)).data
    tenant_ids = {suspect.tenant_id for suspect in suspected}
    tenant_ids |= {load.tenant_id for pool in pools for load in pool.queue}
    tenant_ids |= {stay.tenant_id for here in stays for stay in (*here.largest, *here.failed)}
    return render(
        "operator_engines.html",
        viewer,
        at_ms=now_ms(),
        problems=problems,
        pools=pools,
        engines=[(engine, _arena(engine.figures)) for engine in found],
        stays=stays,
        suspects=suspected,
        decisions=_decisions(bases),
        names=await database.read(lambda conn: names_of(conn, tenant_ids)),
    )


@dataclass(frozen=True, slots=True)
class _Pool:
    """A base model and the work that it has in this gateway.

    wait_s: until the last waiting answer is expected to begin, 0 if that is unknown.
    num_deaths: of its engines since the gateway's start.   queue: the first _MOST_TENANTS.
    """

    model: BaseModelAnswer
    wait_s: float = 0.0
    num_deaths: int = 0
    queue: tuple[TenantLoad, ...] = ()

    @classmethod
    def of(cls, model: BaseModelAnswer, base: ServedBase | None) -> "_Pool":
        if base is None:
            return cls(model)
        return cls(
            model,
            base.load.wait_s(base.running.num_queued),
            base.engines.num_deaths,
            tuple(base.running.by_tenant()[:_MOST_TENANTS]),
        )


# ---- an engine's memory ----


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an arena.   begin, width: of its bar, in hundredths of the whole."""

    name: str
    num_slabs: int
    begin: float
    width: float


def _arena(figures: EngineStatsAnswer | None) -> list[_Part]:
    """The parts that make up an arena, in the order of the picture; none of an engine away."""
    if figures is None or not figures.total_slabs:
        return []
    pinned = min(figures.pinned_slabs, figures.adapter_slabs)
    kept = figures.free_slabs + figures.prefix_slabs + figures.adapter_slabs
    slabs = {
        "KV in use": max(figures.total_slabs - kept, 0),
        "prefix cache": figures.prefix_slabs,
        "adapters": figures.adapter_slabs - pinned,
        "pinned adapters": pinned,
        "free": figures.free_slabs,
    }
    parts, begin = [], 0.0
    for name, number in slabs.items():
        width = 100 * number / figures.total_slabs
        parts.append(_Part(name, number, round(begin, 2), round(width, 2)))
        begin += width
    return parts


# ---- where adapters are ----


@dataclass(frozen=True, slots=True)
class _Stay:
    """An adapter at an engine."""

    engine: str
    tenant_id: str
    digest: str
    tier: Tier
    size_bytes: int
    error: str | None


@dataclass(frozen=True, slots=True)
class _Stays:
    """Adapters of a base model's engines.   tiers: (tier, number, bytes), the fullest first.

    failed: some of those whose last load failed.
    """

    base_model: str
    tiers: list[tuple[Tier, int, int]]
    largest: list[_Stay]
    failed: list[_Stay]


def _stays(base: ServedBase) -> _Stays:
    found = base.engines.all_residency()
    numbers: Counter[Tier] = Counter()
    sizes: Counter[Tier] = Counter()
    for _, residency in found:
        numbers[residency.tier] += 1
        sizes[residency.tier] += residency.size_bytes
    largest = heapq.nlargest(_MOST_ADAPTERS, found, key=lambda pair: pair[1].size_bytes)
    failed = [pair for pair in found if pair[1].error][:_MOST_ADAPTERS]
    tiers = [(tier, numbers[tier], size) for tier, size in sizes.most_common()]
    return _Stays(base.model_id, tiers, _named(largest), _named(failed))


def _named(pairs: Iterable[tuple[str, Residency]]) -> list[_Stay]:
    return [
        _Stay(
            engine,
            tenant_of(it.object_key),
            it.digest,
            it.tier,
            it.size_bytes,
            it.error,
        )
        for engine, it in pairs
    ]


def _decisions(bases: Bases) -> list[tuple[str, Decision]]:
    """(base model, decision) of the newest decisions of all pools, the newest first."""
    found = [(base.model_id, it) for base in bases for it in base.keeper.decisions]
    return sorted(found, key=lambda pair: -pair[1].at_ms)[:_MOST_DECISIONS]
