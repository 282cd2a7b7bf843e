"""The operator's page names each problem with what to do, and does not name what is well."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.messages import Residency
from registry.free_space import FreeSpace
from server.billing.audit.report import CheckResult, Report
from server.billing.settler import EngineLag
from server.console.operator import problems
from server.database.clock import now_ms
from tests.registry.fake_disk import FakeDisk
from tests.server.console.browsing import Visitor, serve, shown
from tests.server.factories import NOW_MS
from tests.server.fake_engines import FakeEngines
from tests.server.in_process import InProcess, User

HOME = "/console/operator"
QUIET = "Nothing that this gateway can see"
GB = 10**9


@pytest.fixture
def well(product: InProcess) -> Iterator[InProcess]:
    """A gateway on a disk with room."""
    before = product.gateway
    product.gateway = replace(before, space=FreeSpace(GB, FakeDisk(90 * GB, size_bytes=100 * GB)))
    product.app.state.gateway = product.gateway
    yield product
    product.gateway = product.app.state.gateway = before


def swap(product: InProcess, **parts: Any) -> None:
    product.gateway = product.app.state.gateway = replace(product.gateway, **parts)


def test_a_gateway_that_is_well_has_no_problems(well: InProcess, operator: Visitor) -> None:
    assert QUIET in shown(operator, HOME)


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
        ({"limiter": Degraded()}, "Limits are not the shared ones", "Look at Redis"),
        ({"settler": Lagging(600_000)}, "7 records are not in it", "Look at the database"),
        (
            {"space": FreeSpace(GB, FakeDisk(2 * GB, size_bytes=100 * GB))},
            "1 GB are left for uploads and caches", "Make room",
        ),
        (
            {"space": FreeSpace(3 * GB, FakeDisk(GB, size_bytes=100 * GB))},
            "2 GB of the reserve are taken", "Make room",
        ),
    ],
)  # fmt: skip
def test_a_problem_of_a_part_is_named_with_what_to_do(
    well: InProcess,
    operator: Visitor,
    parts: dict[str, Any],
    found: str,
    todo: str,
) -> None:
    swap(well, **parts)
    text = shown(operator, HOME)
    assert found in text
    assert todo in text
    assert QUIET not in text


@pytest.mark.parametrize(("since_ms", "num_records"), [(60_000, 7), (600_000, 0)])
def test_a_journal_that_is_settled_or_was_a_moment_ago_is_no_problem(
    well: InProcess,
    operator: Visitor,
    since_ms: int,
    num_records: int,
) -> None:
    swap(well, settler=Lagging(since_ms, num_records))
    assert QUIET in shown(operator, HOME)


def test_adapters_that_failed_are_counted_with_an_error_of_one(
    well: InProcess,
    operator: Visitor,
) -> None:
    class Failing(FakeEngines):
        def all_residency(self) -> list[tuple[str, Residency]]:
            digests = ("a" * 64, "b" * 64)
            failed = [
                Residency(
                    object_key=f"tenants/ten_1/{digest}", digest=digest, tier="failed",
                    size_bytes=0, error="the store <gone> is away",
                )
                for digest in digests
            ]  # fmt: skip
            return [("engine-1", it) for it in failed]

    space = well.gateway.space
    well.use(Failing())
    swap(well, space=space)
    text = shown(operator, HOME)
    assert "last asked for: 2. One of them: the store <gone> is away" in text
    assert "Look at the object store" in text


def test_the_last_audits_differences_are_counted(well: InProcess, operator: Visitor) -> None:
    report = Report(NOW_MS)
    report.checks["accounts"] = CheckResult(9, 3, [])
    well.gateway.auditor.last = report
    try:
        assert "Differences that the last audit found: 3. See Incidents" in shown(operator, HOME)
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
    operator: Visitor,
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
    text = shown(operator, HOME)
    assert "2 of the newest 3 first tokens took more than 2 s" in text
    assert f"most of it for: {phase}. See Slow requests." in text
    assert todo in text
    for number in range(3):
        serve(well, acme, f"{number}-{acme.name}", **in_time)
    assert "first tokens took more than" not in shown(operator, HOME)


def test_requests_of_an_hour_ago_are_not_looked_at(
    well: InProcess, operator: Visitor, acme: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "_MOST_RECENT", 1)
    for age_s, is_shown in ((3600, False), (0, True)):
        at_s = now_ms() / 1000 - age_s
        late = {"started_at": at_s - 9, "first_token_at": at_s - 1, "at": at_s}
        serve(well, acme, f"{age_s}-{acme.name}", **late)
        assert ("first tokens took more than" in shown(operator, HOME)) is is_shown
