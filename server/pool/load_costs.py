"""How long it takes to bring an adapter to an engine's arena, learned from the pool's engines."""

from collections.abc import Mapping
from typing import Literal

from engine.wire.messages import EngineStats, Tier

_Move = Literal["disk", "host", "device"]

_MOVES: dict[Tier, tuple[_Move, ...]] = {
    "device": (),
    "loading": ("device",),
    "host": ("device",),
    "disk": ("host", "device"),
    "fetching": ("disk", "host", "device"),
    "remote": ("disk", "host", "device"),
    "failed": ("disk", "host", "device"),
}
"""Moves that an adapter still needs, by its tier; a move is named for the tier that it ends in."""
_FIRST_GUESS_S_PER_BYTE: dict[_Move, float] = {"disk": 5e-9, "host": 1e-9, "device": 1e-9}
_MEMORY = 0.98
"""Share of the former sums that is kept each time that an engine reports more loads."""


class LoadCosts:
    """Seconds per byte of each move; the slow loads of an engine's first minute are forgotten."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(_FIRST_GUESS_S_PER_BYTE, 0.0)
        self._bytes = dict.fromkeys(_FIRST_GUESS_S_PER_BYTE, 0.0)
        self._s_by_tier: Mapping[Tier, float] = {}
        self._sum_up()

    def note(self, before: EngineStats | None, stats: EngineStats) -> None:
        """Learn from one engine's figures and from those that it sent before."""
        known = {tier.tier: tier for tier in before.tiers} if before else {}
        for tier in stats.tiers:
            if tier.tier == "store":
                continue
            old = known.get(tier.tier)
            new_bytes = tier.load_bytes - (old.load_bytes if old else 0)
            new_seconds = tier.load_seconds - (old.load_seconds if old else 0.0)
            if new_bytes > 0:  # fewer than before if the engine was started again
                self._seconds[tier.tier] = _MEMORY * self._seconds[tier.tier] + new_seconds
                self._bytes[tier.tier] = _MEMORY * self._bytes[tier.tier] + new_bytes
        self._sum_up()

    def load_s(self, tier: Tier, size_bytes: int) -> float:
        """Seconds until an adapter that is in this tier can be used."""
        return size_bytes * self._s_by_tier[tier]

    def _sum_up(self) -> None:
        self._s_by_tier = {
            tier: sum(self._s_per_byte(move) for move in moves) for tier, moves in _MOVES.items()
        }

    def _s_per_byte(self, move: _Move) -> float:
        if not self._bytes[move]:
            return _FIRST_GUESS_S_PER_BYTE[move]
        return max(self._seconds[move], 0.0) / self._bytes[move]
