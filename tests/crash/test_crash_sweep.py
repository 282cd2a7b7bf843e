"""Journal, ledger and receipts agree wherever gateway and engine are killed, again and again.

CRASH_SEED=n replays one run.
"""

import os
from collections import Counter
from collections.abc import Callable

import pytest

from tests.crash.conftest import CarryOut
from tests.crash.plans import CYCLE, Plan, make_plan, make_plan_of_two, seed_of
from tests.crash.points import GATEWAY_POINTS, POINTS
from tests.crash.run import Result

NUM_SOAKED = 2000
SEED = os.environ.get("CRASH_SEED")
MOST_TRIES = 5
WORK_FOR_BOTH = [
    "gateway.commit.hold.after", "gateway.commit.settle.after", "gateway.commit.refused.after",
    "gateway.commit.expired.after", "gateway.send.read.after",
]  # fmt: skip
"""Failpoints at work that one of several gateways does for all, and at a hold, which others see."""


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


def killed_at(results: list[Result]) -> Counter[str]:
    return Counter(point for result in results for point in result.killed_at)


def test_after_a_crash_at_any_failpoint_journal_ledger_and_receipts_agree(
    carry_out: CarryOut,
) -> None:
    """Half of the runs are on SQLite, the others on PostgreSQL."""
    results = [
        result
        for database in ("sqlite", "postgresql")
        for result in sweep(carry_out, database, 0, CYCLE)
    ]
    missed = set() if SEED else set(POINTS) - set(killed_at(results))
    for turn in range(MOST_TRIES):
        # Not every load reaches the point twice, and a busy machine settles late: have another one.
        again = [seed_of(point, turn) for point in missed]
        missed -= set(killed_at(checked(carry_out, again, "sqlite")))
    assert not missed, "nobody died there"


@pytest.mark.parametrize(
    ("points", "times"),
    [
        (WORK_FOR_BOTH, 1),
        pytest.param(
            [point for point in GATEWAY_POINTS if point not in WORK_FOR_BOTH], 10,
            marks=pytest.mark.soak,
        ),
    ],
    ids=["work for both", "work of one"],
)  # fmt: skip
def test_after_a_crash_of_one_of_two_gateways_on_postgresql_they_agree(
    carry_out: CarryOut, points: list[str], times: int
) -> None:
    """Both serve at once, and one dies; at random moments the engine, one gateway, or both die."""
    timed = [cycle * CYCLE + CYCLE - 1 - i for cycle in range(times) for i in range(3)]
    wanted = [int(SEED)] if SEED else [*map(seed_of, points), *timed]
    results = checked(carry_out, wanted, "postgresql", make_plan_of_two)
    missed = set() if SEED else set(points) - set(killed_at(results))
    for turn in range(1, 1 + MOST_TRIES):
        again = [seed_of(point, turn) for point in missed]
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
