"""Routes for operators: list engines and suspects of their deaths, void holds of a lost engine."""

import contextlib
import dataclasses
from typing import Annotated, Literal

from fastapi import Path
from pydantic import Field
from sqlalchemy import Connection

from engine.wire.messages import EngineStats
from registry.catalog.audit import record_audit
from registry.errors import Conflict, NotFound
from server.api.answer import Answer, ListAnswer
from server.api.deps import BasesDep, DatabaseDep, operators_router
from server.billing.holds import MAX_VOIDED_AT_ONCE, engines_with_holds, void_lost
from server.billing.settler import LEASE, SILENT_MS
from server.database.clock import now_ms
from server.database.database import LedgerUnavailable
from server.database.leases import MACHINE, forget, list_held
from server.pool.engines import EngineFigures, EngineState

router = operators_router()


class TierFigures(Answer):
    """A tier of an engine's adapters: counters since the engine's start, and bytes of now.

    hits, misses: requests whose adapter was there on their arrival, or was not.
    loads: adapters that came into the tier.   limit_bytes: 0 where there is none.
    """

    tier: Literal["device", "host", "disk", "store"]
    hits: int = Field(examples=[9120])
    misses: int = Field(examples=[37])
    loads: int = Field(examples=[41])
    load_bytes: int = Field(examples=[2_235_564_032])
    load_seconds: float = Field(examples=[1.734])
    used_bytes: int = Field(examples=[1_090_519_040])
    limit_bytes: int = Field(examples=[8_589_934_592])


class GrammarFigures(Answer):
    """Counters of structured output since the engine's start; seconds are processor time.

    forced_tokens: tokens that a grammar left no choice about.   masks_late: steps that an answer
    missed.   masks_failed: answers that needed too much work.   tenants: the ten with most seconds.
    """

    compiles: int = Field(examples=[31])
    compiles_failed: int = Field(examples=[0])
    compile_seconds: float = Field(examples=[0.094])
    masks: int = Field(examples=[48_120])
    mask_seconds: float = Field(examples=[3.61])
    forced_tokens: int = Field(examples=[9_733])
    masks_late: int = Field(examples=[12])
    masks_failed: int = Field(examples=[0])
    tenants: dict[str, float] = Field(examples=[{"ten_91f0c2a4d3b8e675": 3.704}])


class DraftFigures(Answer):
    """Counters of drafted tokens since the engine's start, and the pools of drafts of now.

    drafted_tokens: those that steps computed.   accepted_tokens: those of them that answers got.
    verified_rows: times that an answer had drafts in a step.
    """

    drafted_tokens: int = Field(examples=[61_440])
    accepted_tokens: int = Field(examples=[40_112])
    verified_rows: int = Field(examples=[15_730])
    pools: int = Field(examples=[3])
    pool_bytes: int = Field(examples=[2_097_152])


class EngineStatsAnswer(Answer):
    """Figures of an engine: gauges of now, and counters since the engine's start.

    batch_requests, batch_tokens, batch_adapters: the largest step since the figures before.
    free_slabs, total_slabs, adapter_slabs, prefix_slabs, pinned_slabs: slabs of device memory.
    unsettled_records: lines of the journal that are not in the ledger yet.
    tiers: the nearest first.
    step_seconds: seconds of all steps, by phase.
    is_leaving: whether the engine takes no new requests, and exits when those it has are settled.
    silence_s: seconds of silence after which gateways treat the engine as hung.
    """

    running: int = Field(examples=[24])
    waiting: int = Field(examples=[3])
    batch_requests: int = Field(examples=[24])
    batch_tokens: int = Field(examples=[536])
    batch_adapters: int = Field(examples=[17])
    free_slabs: int = Field(examples=[1210])
    total_slabs: int = Field(examples=[4096])
    adapter_slabs: int = Field(examples=[520])
    steps: int = Field(examples=[184_230])
    prompt_tokens: int = Field(examples=[5_120_400])
    completion_tokens: int = Field(examples=[1_932_118])
    cached_tokens: int = Field(examples=[2_204_672])
    preemptions: int = Field(examples=[2])
    swapped: int = Field(examples=[0])
    prefix_slabs: int = Field(examples=[1980])
    prefix_evictions: int = Field(examples=[614])
    prefill_tokens_per_s: float = Field(examples=[21_450.5])
    copy_bytes_per_s: float = Field(examples=[12_400_000_000.0])
    adapter_evictions: int = Field(examples=[9])
    pinned_slabs: int = Field(examples=[26])
    unsettled_records: int = Field(examples=[5])
    tiers: tuple[TierFigures, ...]
    grammars: GrammarFigures
    drafts: DraftFigures
    step_seconds: dict[str, float] = Field(examples=[{"schedule": 3.6, "compute": 401.5}])
    is_leaving: bool
    silence_s: float = Field(examples=[30.0])


class EngineAnswer(Answer):
    """An engine of the pool; what only the engine can say is null until it is there.

    An engine of another machine is "elsewhere", or "silent" when none has had it for 5 minutes;
    only machine, engine_id and seen_s, the age of the machine's last sign, are known of it.
    base_model: the name of the base model that it has, null for one that is gone.
    starts: how often it has started.   max_num_seqs: the most requests that it runs at once.
    requests_here: answers that this gateway waits for.   figures: null while it is away.
    """

    object: Literal["engine"] = "engine"
    name: str | None = Field(examples=["engine-1"])
    base_model: str | None = Field(examples=["base"])
    machine: str = Field(examples=["chorale-1"])
    seen_s: int = Field(examples=[0])
    state: EngineState | Literal["elsewhere", "silent"] = Field(examples=["ready"])
    engine_id: str | None = Field(examples=["engine-1"])
    starts: int = Field(examples=[3])
    device: str | None = Field(examples=["cuda"])
    tensor_parallel_size: int | None = Field(examples=[1])
    max_num_seqs: int | None = Field(examples=[256])
    requests_here: int = Field(examples=[12])
    figures: EngineStatsAnswer | None


class EngineList(ListAnswer[EngineAnswer]):
    """The engines of the pool."""


class EngineLost(Answer):
    """The answer to the voiding of a lost engine's holds.

    num_open: holds that have not expired, and are not voided.
    """

    object: Literal["engine.lost"] = "engine.lost"
    engine_id: str = Field(examples=["engine-1"])
    num_voided: int = Field(examples=[3])
    num_open: int = Field(examples=[0])


class SuspectAnswer(Answer):
    """A request that engines may have died of, by its fingerprint.

    state: "suspect" is tried where nobody else is served, "held" waits since an engine died in such
    a trial that others had joined, "refused" since one died of it alone.
    deaths: starts of engines that died while they had it.   expires_at: Unix seconds.
    """

    object: Literal["engine.suspect"] = "engine.suspect"
    fingerprint: str = Field(examples=["6f1c0d7be2a94b35a0c7f8d1e2b3a495"])
    tenant_id: str = Field(examples=["ten_91f0c2a4d3b8e675"])
    base_model: str = Field(examples=["base"])
    state: Literal["suspect", "held", "refused"]
    deaths: int = Field(examples=[2])
    expires_at: int = Field(examples=[1_798_761_600])


class SuspectList(ListAnswer[SuspectAnswer]):
    """Requests that engines may have died of, as this gateway saw it."""


@router.get("/engines")
async def engines(bases: BasesDep, database: DatabaseDep) -> EngineList:
    """List the engines of all base models, as this gateway sees them, and those elsewhere."""
    found = [_engine(base, figures) for base, figures in bases.figures()]
    here = {engine.engine_id for engine in found}
    with contextlib.suppress(LedgerUnavailable):  # those that are here are shown in any case
        held = await database.read(lambda conn: list_held(conn, LEASE))
        found += [_elsewhere(*lease) for lease in held if lease[0] not in here]
    return EngineList(data=found)


@router.get("/engines/suspects")
async def suspects(bases: BasesDep) -> SuspectList:
    """List the requests that engines may have died of, without their texts."""
    return SuspectList(
        data=[
            SuspectAnswer.of_record(
                it,
                base_model=base.model_id,
                deaths=len(it.deaths),
                expires_at=int(it.expires_at),
            )
            for base in bases
            for it in base.engines.suspects.all()
        ]
    )


@router.delete("/engines/suspects/{fingerprint}")
async def clear_suspect(
    bases: BasesDep, database: DatabaseDep, fingerprint: Annotated[str, Path(max_length=32)]
) -> SuspectList:
    """Clear a suspect, so that it is served like any other request; the others are listed."""
    owners = {it.fingerprint: it.tenant_id for it in (await suspects(bases)).data}
    if fingerprint not in owners:
        message = f"This gateway suspects no request with the fingerprint {fingerprint}."
        raise NotFound(message, code="not_found", param="fingerprint")

    def write(conn: Connection) -> None:
        tenant_id, action = owners[fingerprint], "engine.suspect.cleared"
        record_audit(conn, tenant_id, action, target=fingerprint, at_ms=now_ms(), actor="operator")

    await database.write(write)
    for base in bases:
        base.engines.suspects.clear(fingerprint)
    return await suspects(bases)


@router.post("/engines/{engine_id}/lost")
async def lost(
    database: DatabaseDep, bases: BasesDep, engine_id: Annotated[str, Path(max_length=64)]
) -> EngineLost:
    """Void the holds of an engine whose journal is lost: the requests that it ran are free.

    Only holds that have expired are voided. num_open counts the others, whose requests might still
    run: ask again later for these.
    """
    if engine_id in bases.engine_ids():
        message = f"{engine_id} is in the pool: its holds are settled from its journal."
        raise Conflict(message, code="engine_is_there")
    known = await database.read(_known_engines)
    if engine_id not in known:
        there = ", ".join(sorted(known.difference(bases.engine_ids()))) or "none"
        message = f"There is no engine {engine_id!r} that has open holds; there are: {there}."
        raise NotFound(message, code="engine_not_found", param="engine_id")
    num_voided, voided = 0, MAX_VOIDED_AT_ONCE
    while voided == MAX_VOIDED_AT_ONCE:
        voided, num_open = await database.write(
            lambda conn: void_lost(conn, engine_id, actor="operator", now_ms=now_ms())
        )
        num_voided += voided
    await database.write(lambda conn: forget(conn, LEASE + engine_id))
    return EngineLost(engine_id=engine_id, num_voided=num_voided, num_open=num_open)


def _known_engines(conn: Connection) -> set[str]:
    """Ids of the engines that have leases or open holds."""
    return {engine_id for engine_id, *_ in list_held(conn, LEASE)} | engines_with_holds(conn)


def _elsewhere(engine_id: str, machine: str, age_ms: int) -> EngineAnswer:
    known: dict[str, object] = {"object": "engine", "engine_id": engine_id, "machine": machine}
    known |= {"state": "silent" if age_ms > SILENT_MS else "elsewhere", "seen_s": age_ms // 1000}
    known |= {"starts": 0, "requests_here": 0}
    return EngineAnswer.model_validate(dict.fromkeys(EngineAnswer.model_fields) | known)


def _engine(base: str, figures: EngineFigures) -> EngineAnswer:
    welcome, stats = figures.welcome, figures.stats
    return EngineAnswer(
        name=figures.name,
        base_model=base or None,
        machine=MACHINE,
        seen_s=0,
        state=figures.state,
        engine_id=welcome.engine_id if welcome else None,
        starts=welcome.epoch if welcome else 0,
        device=welcome.device if welcome else None,
        tensor_parallel_size=welcome.tensor_parallel_size if welcome else None,
        max_num_seqs=welcome.max_num_seqs if welcome else None,
        requests_here=figures.num_own,
        figures=_figures(stats) if stats else None,
    )


def _figures(stats: EngineStats) -> EngineStatsAnswer:
    grammars = dataclasses.asdict(stats.grammars) | {"tenants": dict(stats.grammars.tenants)}
    changed = {"grammars": grammars, "step_seconds": dict(stats.step_seconds)}
    return EngineStatsAnswer(**dataclasses.asdict(stats) | changed)
