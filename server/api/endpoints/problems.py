"""Problems are what is wrong now, as this gateway sees it, each with what to do about it.

Disk, limits and holds have the bounds of their alert rules (deploy/prometheus-rules.yaml). First
tokens are late by the service level of the settings, and a journal is late before its alert fires.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from fastapi import Depends
from pydantic import Field

from engine.wire.messages import Residency
from registry.storage.faults import REMEDIES, StorageFaults
from registry.storage.free_space import FreeSpace
from server.api.answer import Answer, ListAnswer
from server.api.deps import (
    AuditorDep,
    BasesDep,
    DatabaseDep,
    LedgerProbeDep,
    LimiterDep,
    SettingsDep,
    SettlerDep,
    SpaceDep,
    StorageDep,
    operators_router,
)
from server.billing.audit.report import Report
from server.billing.holds import expired_by_engine
from server.billing.ledger_probe import LedgerProbe
from server.billing.request_log import LoggedRequest, read_newest
from server.billing.settler import EngineLag
from server.database.clock import now_ms
from server.pool.engines import EngineFigures

router = operators_router()

_RECENT_MS = 5 * 60_000
_MOST_RECENT = 200
"""Newest requests of all tenants whose first tokens are looked at."""
_MAX_LAG_MS = 5 * 60_000
_MAX_UNSETTLED = 20_000
_MAX_HOLD_MS = 15 * 60_000
_MAX_WRITE_S = 2.0
_MAX_FAULT_S = 3900.0
"""Age of a fault of the store that may last: the sweep asks the store every hour."""

_LEDGER_TODO = (
    "Look at the database: whether it answers, and whether its disk is full. Answers under way end "
    "as usual, and are charged when it is back."
)
_LIMITS_TODO = (
    "Look at Redis, as this gateway's host reaches it. Gateways return to it by themselves."
)
_DISK_TODO = (
    "Make room, or lower what tenants may store. On a full disk uploads get 507 no_room, and "
    "adapters that are not cached get 503 adapter_loading."
)
_STORE_TODO = (
    "Look at the object store, and at the adapters that failed on the console's page Engines. "
    "Loading is tried again when an adapter is asked for."
)
_LAG_TODO = (
    "Look at the database, which is slow or away. An engine with 100,000 records that are not "
    "settled takes no more requests."
)
_HOLDS_TODO = "Bring back the machine that has this engine's journal."
_AUDIT_TODO = (
    "See Incidents in the console, or chorale audit. Change nothing in the ledger by hand."
)
_SLOW_TODO = {
    "queue": "Add engines, or see Engines for who has the requests.",
    "prefill": "See Engines for whether batches are large: the engine itself is slow, or prompts "
    "are long, for which a smaller max_num_batched_tokens is better.",
}
_SLOW_LOAD_TODO = (
    "Give adapters more memory (a larger arena_bytes), pin them, or look at the store."
)


class Problem(Answer):
    """Something that is wrong.   todo: what to do about it."""

    found: str = Field(examples=["Limits are not the shared ones, so they may refuse too early."])
    todo: str = Field(examples=[_LIMITS_TODO])


class ProblemList(ListAnswer[Problem]):
    """The problems that the gateway that answers sees now."""


async def find_problems(
    bases: BasesDep,
    ledger_probe: LedgerProbeDep,
    limiter: LimiterDep,
    space: SpaceDep,
    storage: StorageDep,
    settings: SettingsDep,
    settler: SettlerDep,
    auditor: AuditorDep,
    database: DatabaseDep,
) -> list[Problem]:
    """Look at every part, the one that most depends on first."""
    at_ms = now_ms()
    newest, expired = await database.read(
        lambda conn: (
            read_newest(conn, _MOST_RECENT, at_ms - _RECENT_MS),
            expired_by_engine(conn, at_ms - _MAX_HOLD_MS),
        )
    )
    stays = [it for base in bases for engine in base.engines for it in engine.residency.values()]
    return [
        *_of_ledger(await _is_writable(ledger_probe)),
        *_of_settlement(settler.lags, at_ms),
        *_of_journals(figures for _, figures in bases.figures()),
        *_of_holds(expired),
        *_of_audit(auditor.last),
        *_of_disk(space, settings.data_dir),
        *_of_store(stays, storage.faults),
        *_of_limits(limiter.is_degraded, has_redis=settings.redis_url is not None),
        *_of_first_tokens(newest, settings.slo_first_token_s),
    ]


ProblemsDep = Annotated[list[Problem], Depends(find_problems)]


@router.get("/problems")
async def list_problems(problems: ProblemsDep) -> ProblemList:
    """List what is wrong now, as this gateway sees it, each with what to do about it."""
    return ProblemList(data=problems)


async def _is_writable(probe: LedgerProbe) -> bool:
    """Whether the ledger is written within a moment: a locked one would keep the page waiting."""
    asking = asyncio.create_task(probe.is_writable())
    done, _ = await asyncio.wait({asking}, timeout=_MAX_WRITE_S)
    return bool(done) and asking.result()


def _of_ledger(is_writable: bool) -> Iterable[Problem]:
    if not is_writable:
        found = "The ledger cannot be written now, so requests get 503 metering_unavailable."
        yield Problem(found=found, todo=_LEDGER_TODO)


def _of_settlement(lags: Mapping[str, EngineLag], at_ms: int) -> Iterable[Problem]:
    for engine_id, lag in lags.items():
        num_records = lag.last_seq - lag.settled_seq
        since_ms = at_ms - (lag.complete_at_ms or at_ms)
        if num_records and since_ms > _MAX_LAG_MS:
            found = f"For {since_ms / 60_000:,.0f} min, the ledger has not had all of {engine_id}'s"
            found += f" journal: {num_records:,} records are not in it."
            yield Problem(found=found, todo=_LAG_TODO)


def _of_journals(engines: Iterable[EngineFigures]) -> Iterable[Problem]:
    """Yield engines with much to settle by their own word: another gateway may settle them."""
    for engine in engines:
        if engine.stats and (number := engine.stats.unsettled_records) > _MAX_UNSETTLED:
            found = f"{number:,} ended requests of {engine.name} are not in the ledger."
            yield Problem(found=found, todo=_LAG_TODO)


def _of_holds(expired: Iterable[tuple[str, int, int]]) -> Iterable[Problem]:
    for engine_id, number, _ in expired:
        found = f"Holds of {engine_id} that are open long after they expired: {number:,}."
        yield Problem(found=found, todo=_HOLDS_TODO)


def _of_audit(report: Report | None) -> Iterable[Problem]:
    if report is not None and report.num_findings:
        found = f"Differences that the last audit found: {report.num_findings:,}."
        yield Problem(found=found, todo=_AUDIT_TODO)


def _of_disk(space: FreeSpace, folder: Path) -> Iterable[Problem]:
    if not space.is_low(folder):
        return
    left_gb = space.left_bytes(folder) / 1e9
    found = f"{left_gb:,.1f} GB are left for uploads and caches on the disk of {folder}."
    if left_gb < 0:
        found = f"{-left_gb:,.1f} GB of the reserve are taken on the disk of {folder}."
    yield Problem(found=found, todo=_DISK_TODO)


def _of_store(stays: Iterable[Residency], faults: StorageFaults) -> Iterable[Problem]:
    if (age_s := faults.age_s()) < _MAX_FAULT_S:
        found = f"The object store failed {age_s / 60:,.0f} min ago: {faults.reason}."
        yield Problem(found=found, todo=REMEDIES.get(faults.reason, _STORE_TODO))
    if errors := [residency.error for residency in stays if residency.error]:
        found = f"Adapters that could not be loaded when last asked for: {len(errors):,}."
        yield Problem(found=f"{found} One of them: {errors[-1]}", todo=_STORE_TODO)


def _of_limits(is_degraded: bool, *, has_redis: bool) -> Iterable[Problem]:
    if is_degraded and has_redis:
        found = "Limits are not the shared ones, so they may refuse too early."
        yield Problem(found=found, todo=_LIMITS_TODO)
    elif is_degraded:
        found = "The gateway before this one was killed, so limits began as if they were used up."
        yield Problem(found=found, todo="Wait: they are full again within a minute.")


def _of_first_tokens(newest: Iterable[LoggedRequest], slo_s: float) -> Iterable[Problem]:
    """Yield the problem that more than one first token in ten is late."""
    timed = [(it, it.ttft_ms) for it in newest if it.ttft_ms is not None]
    late = [request for request, ttft_ms in timed if ttft_ms > 1000 * slo_s]
    if 10 * len(late) <= len(timed):
        return
    waits: Counter[str] = Counter()
    for request in late:
        waits.update({name: ms for name, ms in request.phases() if name != "decode"})
    ((phase, _),) = waits.most_common(1)
    found = f"{len(late)} of the newest {len(timed)} first tokens took more than {slo_s:g} s, "
    todo = f"See Slow requests in the console. {_SLOW_TODO.get(phase, _SLOW_LOAD_TODO)}"
    yield Problem(found=f"{found}most of it for: {phase}.", todo=todo)
