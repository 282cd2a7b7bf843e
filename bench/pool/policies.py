"""Ways to choose an engine: the product's own, and those it is compared with.

All policies get the same views of the same moment; only their choices differ.
"""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from server.pool import router
from server.pool.router import EngineView


class Policy(Protocol):
    def choose(self, key: str, views: Sequence[EngineView]) -> EngineView: ...


class Product:
    def choose(self, key: str, views: Sequence[EngineView]) -> EngineView:
        return router.choose(key, views)


class Random:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, key: str, views: Sequence[EngineView]) -> EngineView:
        return self._random.choice(views)


class RoundRobin:
    def __init__(self, first: int) -> None:
        self._next = first

    def choose(self, key: str, views: Sequence[EngineView]) -> EngineView:
        self._next += 1
        return views[self._next % len(views)]


class LeastLoaded:
    """Chooses the engine with the fewest requests; among equals a random one, since otherwise all
    gateways would choose the same.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, key: str, views: Sequence[EngineView]) -> EngineView:
        fewest = min(view.num_requests for view in views)
        return self._random.choice([view for view in views if view.num_requests == fewest])


class ConsistentHash:
    """Chooses the same engine for an adapter every time, however busy it is."""

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}

    def choose(self, key: str, views: Sequence[EngineView]) -> EngineView:
        if key not in self._homes:
            self._homes[key] = max(views, key=lambda view: router.rank(key, view.name)).name
        return next(view for view in views if view.name == self._homes[key])


POLICIES: dict[str, Callable[[int], Policy]] = {
    "product": lambda number: Product(),
    "random": Random,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "consistent_hash": lambda number: ConsistentHash(),
}
"""Makers of policies by name; each is called with the number of a gateway."""
