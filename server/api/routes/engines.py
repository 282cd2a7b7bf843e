"""The engines of the pool, for operators: those that there are, and those that are lost."""

import dataclasses
from typing import Annotated

from fastapi import APIRouter, Path

from server.api import errors
from server.api.deps import DatabaseDep, EnginesDep
from server.billing.holds import MAX_VOIDED_AT_ONCE, void_lost
from server.database.clock import now_ms
from server.pool.engines import EngineFigures
from server.text.json_object import JsonObject

router = APIRouter()


@router.get("/engines")
async def engines(engines: EnginesDep) -> JsonObject:
    """List the engines of the pool, as this gateway sees them."""
    data = [_render(figures) for figures in engines.figures()]
    return {"object": "list", "data": data, "has_more": False}


@router.post("/engines/{engine_id}/lost")
async def lost(
    database: DatabaseDep, engines: EnginesDep, engine_id: Annotated[str, Path(max_length=64)]
) -> JsonObject:
    """Void the holds of an engine whose journal is lost: the requests that it ran are free.

    Only holds that have expired are voided. num_open counts the others, whose requests might still
    run: ask again later for these.
    """
    if engine_id in engines.engine_ids():
        message = f"{engine_id} is in the pool: its holds are settled from its journal."
        raise errors.conflict(message, code="engine_is_there")
    num_voided, voided = 0, MAX_VOIDED_AT_ONCE
    while voided == MAX_VOIDED_AT_ONCE:
        voided, num_open = await database.write(
            lambda conn: void_lost(conn, engine_id, actor="operator", now_ms=now_ms())
        )
        num_voided += voided
    return {
        "object": "engine.lost",
        "engine_id": engine_id,
        "num_voided": num_voided,
        "num_open": num_open,
    }


def _render(figures: EngineFigures) -> JsonObject:
    """An engine. requests_here: answers that this gateway waits for."""
    welcome, stats = figures.welcome, figures.stats
    return {
        "object": "engine",
        "name": figures.name,
        "state": figures.state,
        "engine_id": welcome.engine_id if welcome else None,
        "starts": welcome.epoch if welcome else 0,
        "device": welcome.device if welcome else None,
        "tensor_parallel_size": welcome.tensor_parallel_size if welcome else None,
        "max_num_seqs": welcome.max_num_seqs if welcome else None,
        "requests_here": figures.num_own,
        "figures": dataclasses.asdict(stats) if stats else None,
    }
