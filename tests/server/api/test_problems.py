"""Each problem is named with what to do, and what is well is not named."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.wire.messages import Residency
from registry.storage.faults import StorageFaults
from registry.storage.free_space import FreeSpace
from server.api.endpoints import problems
from server.billing.audit.report import CheckResult, Report
from server.billing.holds import resolve
from server.billing.settler import EngineLag
from server.database.clock import now_ms
from server.pool.engines import EngineFigures
from tests.registry.fake_disk import FakeDisk
from tests.server.api.test_metrics import make_stats
from tests.server.console.browsing import serve
from tests.server.factories import NOW_MS, insert_holds, make_hold, make_price
from tests.server.fake_engines import FakeEngines
from tests.server.in_process import InProcess, User, product_of_file

GB = 10**9

product = product_of_file


@pytest.fixture
def well(product: InProcess) -> Iterator[InProcess]:
    """A gateway on a disk with room."""
    before = product.gateway
    product.gateway = replace(before, space=FreeSpace(GB, FakeDisk(90 * GB, size_bytes=100 * GB)))
    product.app.state.gateway = product.gateway
    yield product
    product.gateway = product.app.state.gateway = before


def told(product: InProcess) -> str:
    """Ask as the operator what is wrong and what to do."""
    answer = product.operator.call("GET", "/admin/v1/problems").json()
    assert (answer["object"], answer["has_more"]) == ("list", False)
    return "\n".join(f"{problem['found']} {problem['todo']}" for problem in answer["data"])


def swap(product: InProcess, **parts: Any) -> None:
    product.gateway = product.app.state.gateway = replace(product.gateway, **parts)


def test_a_gateway_that_is_well_has_no_problems(well: InProcess) -> None:
    assert told(well) == ""


class Unwritable:
    async def is_writable(self) -> bool:
        return False


class Degraded:
    is_degraded = True


class Lagging:
    def __init__(self, since_ms: int, num_records: int = 7) -> None:
        at_ms = now_ms() - since_ms
        self.lags = {"engine-7": EngineLag(5, 5 + num_records, complete_at_ms=at_ms)}


@pytest.mark.parametrize(
    ("parts", "found", "todo"),
    [
        ({"ledger_probe": Unwritable()}, "The ledger cannot be written", "Look at the database"),
        (
            {"limiter": Degraded()}, "The gateway before this one was killed",
            "full again within a minute",
        ),
        ({"settler": Lagging(600_000)}, "7 records are not in it", "Look at the database"),
        (
            {"space": FreeSpace(GB, FakeDisk(2 * GB, size_bytes=100 * GB))},
            "1.0 GB are left for uploads and caches", "Make room",
        ),
        (
            {"space": FreeSpace(3 * GB, FakeDisk(GB, size_bytes=100 * GB))},
            "2.0 GB of the reserve are taken", "Make room",
        ),
    ],
)  # fmt: skip
def test_a_problem_of_a_part_is_named_with_what_to_do(
    well: InProcess,
    parts: dict[str, Any],
    found: str,
    todo: str,
) -> None:
    swap(well, **parts)
    text = told(well)
    assert found in text
    assert todo in text


def test_redis_is_to_be_looked_at_where_there_is_one(well: InProcess) -> None:
    swap(well, limiter=Degraded())
    assert "Redis" not in told(well)
    settings = well.gateway.settings.model_copy(update={"redis_url": "redis://here"})
    swap(well, limiter=Degraded(), settings=settings)
    assert "Limits are not the shared ones, so they may refuse too early. Look at Redis" in told(
        well
    )


@pytest.mark.parametrize(("since_ms", "num_records"), [(60_000, 7), (600_000, 0)])
def test_a_journal_that_is_settled_or_was_a_moment_ago_is_no_problem(
    well: InProcess,
    since_ms: int,
    num_records: int,
) -> None:
    swap(well, settler=Lagging(since_ms, num_records))
    assert told(well) == ""


@pytest.mark.parametrize("more", [0, 1])
def test_an_engine_whose_journal_another_gateway_settles_is_named_by_what_it_says(
    well: InProcess, more: int
) -> None:
    stats = make_stats(unsettled_records=20_000 + more)
    away = EngineFigures("engine-2", "starting", None, None, 0)
    space = well.gateway.space
    well.use(FakeEngines(seen=[EngineFigures("engine-1", "ready", None, stats, 0), away]))
    swap(well, space=space)
    found = "20,001 ended requests of engine-1 are not in the ledger. Look at the database"
    assert (found in told(well)) is bool(more)


def test_holds_are_named_by_their_engine_when_they_expired_long_ago(
    well: InProcess, acme: User
) -> None:
    database = well.gateway.database
    price = make_price(database)
    for number, age_ms in enumerate((14 * 60_000, 16 * 60_000)):
        engine_id, expires_at_ms = f"engine-{number}", now_ms() - age_ms
        times = {"created_at_ms": expires_at_ms - 1, "expires_at_ms": expires_at_ms}
        hold = {"tenant_id": acme.tenant_id, "engine_id": engine_id, **times}
        insert_holds(database, make_hold(price, engine_id, **hold))
    text = told(well)
    ids = ["engine-0", "engine-1"]
    database.write_sync(lambda conn: resolve(conn, ids, "voided", now_ms()))
    assert text == (
        "Holds of engine-1 that are open long after they expired: 1. "
        "Bring back the machine that has this engine's journal."
    )
    assert told(well) == ""


def test_adapters_that_failed_are_counted_with_an_error_of_one(
    well: InProcess,
) -> None:
    failed = [
        Residency(
            object_key=f"tenants/ten_1/{digest}", digest=digest, tier="failed",
            size_bytes=0, error="the store <gone> is away",
        )
        for digest in ("a" * 64, "b" * 64)
    ]  # fmt: skip
    space = well.gateway.space
    well.use(FakeEngines(residency={"engine": failed}))
    swap(well, space=space)
    text = told(well)
    assert "last asked for: 2. One of them: the store <gone> is away" in text
    assert "Look at the object store" in text


@pytest.mark.parametrize(
    ("reason", "todo"),
    [("NoSuchBucket", "Make the bucket"), ("[Errno 5] a bad disk", "Look at the object store")],
)
def test_a_store_that_failed_is_named_with_its_reason_for_an_hour(
    well: InProcess, monkeypatch: pytest.MonkeyPatch, reason: str, todo: str
) -> None:
    now_s = 0.0
    faults = StorageFaults(clock=lambda: now_s)
    monkeypatch.setattr(well.gateway.storage, "faults", faults)
    faults.error("tenants/ten_1/abc", reason)
    now_s = 3600.0
    text = told(well)
    assert f"The object store failed 60 min ago: {reason}. {todo}" in text
    assert "ten_1" not in text
    now_s = 4000.0
    assert told(well) == ""


def test_the_last_audits_differences_are_counted(well: InProcess) -> None:
    report = Report(NOW_MS)
    report.checks["accounts"] = CheckResult(9, 3, [])
    well.gateway.auditor.last = report
    try:
        assert "Differences that the last audit found: 3. See Incidents" in told(well)
    finally:
        well.gateway.auditor.last = None


@pytest.mark.parametrize(
    ("waits", "phase", "todo"),
    [
        ({"queue_s": 2.5}, "queue", "Add engines"),
        ({"load_s": 2.5, "load_tier": "store"}, "adapter from store", "Give adapters more memory"),
        ({}, "prefill", "the engine itself is slow"),
    ],
)
def test_late_first_tokens_are_counted_with_what_most_of_them_waited_for(
    well: InProcess,
    acme: User,
    waits: dict[str, Any],
    phase: str,
    todo: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(problems, "_MOST_RECENT", 3)
    at_s = now_ms() / 1000
    late = {"started_at": at_s - 4, "first_token_at": at_s - 1, "at": at_s} | waits
    in_time = {"started_at": at_s - 4, "first_token_at": at_s - 3, "at": at_s}
    for number in range(2):
        serve(well, acme, f"late-{number}-{acme.name}", **late)
    serve(well, acme, f"in-time-{acme.name}", **in_time)
    text = told(well)
    assert "2 of the newest 3 first tokens took more than 2 s" in text
    assert f"most of it for: {phase}. See Slow requests in the console." in text
    assert todo in text
    for number in range(3):
        serve(well, acme, f"{number}-{acme.name}", **in_time)
    assert "first tokens took more than" not in told(well)


def test_requests_of_an_hour_ago_are_not_looked_at(
    well: InProcess, acme: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "_MOST_RECENT", 1)
    for age_s, is_shown in ((3600, False), (0, True)):
        at_s = now_ms() / 1000 - age_s
        late = {"started_at": at_s - 9, "first_token_at": at_s - 1, "at": at_s}
        serve(well, acme, f"{age_s}-{acme.name}", **late)
        assert ("first tokens took more than" in told(well)) is is_shown
