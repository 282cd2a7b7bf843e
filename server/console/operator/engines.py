"""The page of engines: what each does now, its memory, who waits, and where adapters are."""

import heapq
from collections import Counter

from fastapi import Response

from engine.wire.messages import Residency, Tier
from registry.catalog.adapter_rows import tenant_of
from server.accounts.tenants import names_of
from server.api.deps import BasesDep, DatabaseDep, FollowerDep
from server.api.endpoints.base_models import list_base_models
from server.api.endpoints.engines import EngineStatsAnswer, engines, suspects
from server.api.endpoints.problems import ProblemsDep
from server.console.formats import bars
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import OperatorViewer
from server.database.clock import now_ms
from server.inference.bases import Bases
from server.inference.served_base import ServedBase
from server.pool.keeper import Decision

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
    pools = [(model, bases.at(model.home)) for model in models]
    queue = [
        (number, model.name, load)
        for number, (model, base) in enumerate(pools)
        if base
        for load in base.running.by_tenant()[:_MOST_TENANTS]
    ]
    stays = [_stays(base) for base in bases]
    suspected = (await suspects(bases)).data
    tenant_ids = {suspect.tenant_id for suspect in suspected}
    tenant_ids |= {load.tenant_id for *_, load in queue}
    tenant_ids |= {tenant_id for *_, here in stays for _, _, tenant_id, *_ in here}
    return render(
        "operator_engines.html",
        viewer,
        at_ms=now_ms(),
        problems=problems,
        pools=pools,
        queue=queue,
        engines=[(engine, _arena(engine.figures)) for engine in found],
        stays=stays,
        suspects=suspected,
        decisions=_decisions(bases),
        names=await database.read(lambda conn: names_of(conn, tenant_ids)),
    )


def _arena(figures: EngineStatsAnswer | None) -> list[tuple[str, int, float, float]]:
    """The parts that make up an arena, as `bars` draws them; none of an engine that is away."""
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
    return bars(slabs.items(), figures.total_slabs)


_Stay = tuple[str, int, str, str, Residency]
"""An adapter at an engine: why it is shown, its place among those, tenant, engine, residency."""


def _stays(base: ServedBase) -> tuple[str, list[tuple[Tier, int, int]], list[_Stay]]:
    """The base model, (tier, adapters, bytes) of its engines, the fullest first, and some adapters.

    These are some of those whose last load failed, and the largest.
    """
    found = [(engine.name, it) for engine in base.engines for it in engine.residency.values()]
    numbers: Counter[Tier] = Counter()
    sizes: Counter[Tier] = Counter()
    for _, residency in found:
        numbers[residency.tier] += 1
        sizes[residency.tier] += residency.size_bytes
    shown = {
        "failed": [pair for pair in found if pair[1].error][:_MOST_ADAPTERS],
        "largest": heapq.nlargest(_MOST_ADAPTERS, found, key=lambda pair: pair[1].size_bytes),
    }
    stays = [
        (title, index, tenant_of(it.object_key), engine, it)
        for title, pairs in shown.items()
        for index, (engine, it) in enumerate(pairs)
    ]
    tiers = [(tier, numbers[tier], size) for tier, size in sizes.most_common()]
    return base.model_id, tiers, stays


def _decisions(bases: Bases) -> list[tuple[str, Decision]]:
    """(base model, decision) of the newest decisions of all pools, the newest first."""
    found = [(base.model_id, it) for base in bases for it in base.keeper.decisions]
    return sorted(found, key=lambda pair: -pair[1].at_ms)[:_MOST_DECISIONS]
