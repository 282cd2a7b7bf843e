"""The plan of a seed: its load, and which processes are killed at which points."""

import random
from dataclasses import dataclass, replace

from tests.crash.load import Ask, make_asks
from tests.crash.points import ENGINE_POINTS, GATEWAY_POINTS, POINTS, Kill

_PAIRS = [
    *zip(GATEWAY_POINTS[::2], GATEWAY_POINTS[1::2], strict=True),
    *zip(ENGINE_POINTS[::2], ENGINE_POINTS[1::2], strict=True),
]
"""Failpoints at which the first two lives of a process end in one run."""
CYCLE = len(_PAIRS) + 3
"""Number of seeds of a cycle. The first cycle visits every failpoint once: its runs have a pair of
them. Runs of the next two have one of each pair, and so on. The last three seeds of a cycle kill
at random moments. In the first three cycles processes die at an early visit, which every run
reaches.
"""
_KINDS = (slice(0, 2), slice(0, 1), slice(1, 2))
"""Places in the pair of the failpoints of a run, cycle by cycle."""
_SPREAD_S = 0.1
"""Time within which requests arrive."""

_LONG = 800
"""Tokens of a request that is still running when the engine gives up a dead gateway. It makes a run
as long, so only some runs have such a request.
"""

# Largest nth of a kill, by the beginning of a point's name: most runs reach the point so often.
_NTH = {
    "engine.journal.progress": 30,
    "engine.journal.ends": 4,
    "engine.journal.fdatasync": 6,
    "engine.journal.segment": 4,
    "engine.journal.delete": 2,
    "engine.send.tokens": 30,
    "engine.send.last": 4,
    "engine.send.journal": 6,
    "gateway.commit.hold": 3,
    "gateway.commit.settle": 3,
    "gateway.send.add": 4,
    "gateway.send.read": 8,
    "gateway.http.start": 4,
    "gateway.http.chunk": 25,
    "gateway.http.last": 3,
}


# Points at work that one gateway does for all, by their beginning.
_FOR_BOTH = (
    "gateway.commit.settle", "gateway.commit.refused", "gateway.commit.expired",
    "gateway.send.read",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. kills: the kills of each process, in its first life, its second, and so on.

    timed: kills as (process, seconds from the start of the load).   then: requests after all kills.
    waits_for_post, has_drafts: see Life.   num_gateways: see World.
    """

    seed: int
    kills: dict[str, list[Kill]]
    asks: list[Ask]
    then: list[Ask]
    timed: list[tuple[str, float]]
    waits_for_post: bool = False
    has_drafts: bool = True
    num_gateways: int = 1


def make_plan(seed: int) -> Plan:
    chance = random.Random(seed)
    cycle, number = divmod(seed, CYCLE)
    points = _PAIRS[number][_KINDS[cycle % len(_KINDS)]] if number < len(_PAIRS) else ()
    # Requests are refused only where some have to wait, so they all arrive at once.
    spread_s = 0.0 if any("refused" in point for point in points) else _SPREAD_S
    lengths = chance.sample(range(2, 60), 12)
    if chance.random() < 0.25:
        lengths[0] = _LONG
    asks = make_asks(chance, lengths[:9], spread_s)
    then = make_asks(chance, lengths[9:], spread_s)
    kills: dict[str, list[Kill]] = {"engine": [], "gateway": []}
    timed = []
    early = 4 if cycle < len(_KINDS) else 1
    for point in points:
        _add(kills, chance, point, early)
    if not points:
        victims = [("engine",), ("gateway",), ("engine", "gateway")][number % 3]
        at_s = 0.02 + 0.4 * chance.random()
        timed = [(victim, at_s) for victim in victims]
    if len(points) < 2 and chance.random() < 0.3:
        _add(kills, chance, chance.choice(POINTS), early)
    return Plan(seed, kills, asks, then, timed)


def seed_of(point: str, turn: int = 0) -> int:
    """Return a seed whose run dies at this failpoint, and at another one at most by chance.

    turn: each has another seed, and so another load.
    """
    number = next(n for n, pair in enumerate(_PAIRS) if point in pair)
    return (len(_KINDS) * turn + 1 + _PAIRS[number].index(point)) * CYCLE + number


def make_plan_of_two(seed: int) -> Plan:
    """The plan of a seed for two gateways.

    Where it kills a gateway at work that one does for both, whichever does it dies. Elsewhere the
    first dies, alone or with the engine, and its neighbour serves on.
    """
    plan = make_plan(seed)
    second = [kill for kill in plan.kills["gateway"] if kill.point.startswith(_FOR_BOTH)]
    return replace(plan, kills=plan.kills | {"gateway-2": second}, num_gateways=2)


def _add(kills: dict[str, list[Kill]], chance: random.Random, point: str, early: int) -> None:
    """Add a kill, and the kill of another process that has to come before it. early: divisor of the
    largest nth.
    """
    if point.startswith("gateway.commit.failed"):
        kills["engine"].append(_kill(chance, "engine.send.tokens.before", early))
    if point.startswith("gateway.commit.expired") and not kills["gateway"]:
        kills["gateway"].append(_kill(chance, "gateway.commit.hold.after", early))
    process = "engine" if point in ENGINE_POINTS else "gateway"
    kills[process].append(_kill(chance, point, early))


def _kill(chance: random.Random, point: str, early: int) -> Kill:
    most = next((most for name, most in _NTH.items() if point.startswith(name)), 1)
    return Kill(point, chance.randint(1, max(1, most // early)))
