"""Journal, ledger and receipts agree wherever gateway and engine are killed, again and again.

CRASH_SEED=n replays one run.
"""

import os
from collections import Counter
from collections.abc import Callable

import pytest

from tests.crash.conftest import CarryOut
from tests.crash.plans import CYCLE, Plan, make_plan, make_plan_of_two
from tests.crash.points import GATEWAY_POINTS, POINTS
from tests.crash.run import Result

NUM_SOAKED = 2000
SEED = os.environ.get("CRASH_SEED")
MOST_TRIES = 5


def seeds(database: str, first: int, count: int) -> list[int]:
    """Return the seeds for a database: half of a cycle, and in the next cycle the other half."""
    wanted = [int(SEED)] if SEED else range(first, first + count)
    is_odd = database == "postgresql"
    return [seed for seed in wanted if (seed + seed // CYCLE) % 2 == is_odd]


def sweep(carry_out: CarryOut, database: str, first: int, count: int) -> list[Result]:
    """Carry out runs and return their results; assert that nothing was wrong after any."""
    return checked(carry_out, seeds(database, first, count), database)


def checked(
    carry_out: CarryOut,
    wanted: list[int],
    database: str,
    make: Callable[[int], Plan] = make_plan,
) -> list[Result]:
    results = carry_out([make(seed) for seed in wanted], database)
    wrong = [f"CRASH_SEED={result.seed}: {each}" for result in results for each in result.wrong]
    assert not wrong, "\n".join(wrong)
    return results


@pytest.fixture(scope="module")
def on_sqlite(carry_out: CarryOut) -> list[Result]:
    return sweep(carry_out, "sqlite", 0, CYCLE)


@pytest.fixture(scope="module")
def on_postgresql(carry_out: CarryOut) -> list[Result]:
    return sweep(carry_out, "postgresql", 0, CYCLE)


def killed_at(results: list[Result]) -> Counter[str]:
    return Counter(point for result in results for point in result.killed_at)


def test_after_any_crash_journal_ledger_and_receipts_agree_on_sqlite(
    on_sqlite: list[Result],
) -> None:
    assert SEED or len(on_sqlite) == CYCLE // 2


def test_after_any_crash_journal_ledger_and_receipts_agree_on_postgresql(
    on_postgresql: list[Result],
) -> None:
    assert SEED or len(on_postgresql) == CYCLE // 2


@pytest.mark.skipif(SEED is not None, reason="one seed visits few failpoints")
def test_the_sweeps_on_sqlite_and_postgresql_die_at_every_failpoint(
    carry_out: CarryOut, on_sqlite: list[Result], on_postgresql: list[Result]
) -> None:
    results = [*on_sqlite, *on_postgresql]
    for _ in range(MOST_TRIES):
        missed = set(POINTS) - set(killed_at(results))
        if not missed:
            return
        # A busy machine settles late, so a run may end before it reaches the point: run it again.
        results += checked(carry_out, [POINTS.index(point) for point in missed], "sqlite")
    raise AssertionError(f"nobody died at {missed}")


def test_after_a_crash_of_one_of_two_gateways_on_postgresql_they_agree(
    carry_out: CarryOut,
) -> None:
    """Both serve at once. Killed are one behind each commit, send and answer of a gateway, and at
    random moments the engine, one gateway, or both.
    """
    points = [point for point in GATEWAY_POINTS if point.endswith(".after")]
    timed = range(len(POINTS), len(POINTS) + 3)
    wanted = [*map(POINTS.index, points), *timed]
    results = checked(carry_out, [int(SEED)] if SEED else wanted, "postgresql", make_plan_of_two)
    missed = set() if SEED else set(points) - set(killed_at(results))
    for _ in range(MOST_TRIES):
        again = [POINTS.index(point) for point in missed]
        missed -= set(killed_at(checked(carry_out, again, "postgresql", make_plan_of_two)))
    assert not missed, "nobody died there"


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_after_any_of_2000_crashes_on_sqlite_and_postgresql_they_agree(
    carry_out: CarryOut,
) -> None:
    counts: Counter[str] = Counter()
    for first in range(0, NUM_SOAKED, CYCLE):
        for database in ("sqlite", "postgresql"):
            count = min(CYCLE, NUM_SOAKED - first)
            counts += killed_at(sweep(carry_out, database, first, count))
    assert SEED or min(counts[point] for point in POINTS) >= 10, counts
