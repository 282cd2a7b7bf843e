"""What a seed means: the load, who is killed where, and again where."""

import random
from dataclasses import dataclass

from tests.crash.load import Ask, make_asks
from tests.crash.points import ENGINE_POINTS, POINTS, Kill

CYCLE = 60
"""Seeds that visit every failpoint; what remains of them is for random moments. The first cycle
dies early, where it is sure to come.
"""
_SPREAD_S = 0.1
"""In which requests arrive."""

_LONG = 800
"""Tokens: such a request is still running when the engine gives its gateway up; it takes as long,
so only some runs have one.
"""

# The nth time at most, by the beginning of a point's name: so often it is reached in most runs.
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


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. kills: by process, of its first life, its second, and so on.

    timed: (process, seconds after the load's begin).   then: what is asked after all of that.
    waits_for_post: see Life.
    """

    seed: int
    kills: dict[str, list[Kill]]
    asks: list[Ask]
    then: list[Ask]
    timed: list[tuple[str, float]]
    waits_for_post: bool = False


def make_plan(seed: int) -> Plan:
    chance = random.Random(seed)
    number = seed % CYCLE
    point = POINTS[number] if number < len(POINTS) else ""
    # Nobody is refused where nobody has to wait.
    spread_s = 0.0 if "refused" in point else _SPREAD_S
    lengths = chance.sample(range(2, 60), 12)
    if chance.random() < 0.25:
        lengths[0] = _LONG
    asks = make_asks(chance, lengths[:9], spread_s)
    then = make_asks(chance, lengths[9:], spread_s)
    kills: dict[str, list[Kill]] = {"engine": [], "gateway": []}
    timed = []
    early = 4 if seed < CYCLE else 1
    if point:
        _add(kills, chance, point, early)
    else:
        victims = [("engine",), ("gateway",), ("engine", "gateway")][number % 3]
        at_s = 0.02 + 0.4 * chance.random()
        timed = [(victim, at_s) for victim in victims]
    if chance.random() < 0.3:
        _add(kills, chance, chance.choice(POINTS), early)
    return Plan(seed, kills, asks, then, timed)


def _add(kills: dict[str, list[Kill]], chance: random.Random, point: str, early: int) -> None:
    """One more kill, and what has to go wrong before it. early: divides how late at most."""
    if point.startswith("gateway.commit.failed"):
        kills["engine"].append(_kill(chance, "engine.send.tokens.before", early))
    if point.startswith("gateway.commit.expired"):
        kills["gateway"].append(_kill(chance, "gateway.commit.hold.after", early))
    process = "engine" if point in ENGINE_POINTS else "gateway"
    kills[process].append(_kill(chance, point, early))


def _kill(chance: random.Random, point: str, early: int) -> Kill:
    most = next((most for name, most in _NTH.items() if point.startswith(name)), 1)
    return Kill(point, chance.randint(1, max(1, most // early)))
