"""Figures of the tiers and of the adapters in them, as gateways are told them."""

from dataclasses import dataclass
from typing import Literal

Tier = Literal["remote", "fetching", "disk", "host", "loading", "device", "failed"]
ResidentTier = Literal["device", "host", "disk"]
LoadTier = Literal["host", "disk", "store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """An adapter moved to another tier.

    object_key: the adapter's.   size_bytes: bytes it takes in the arena once known, before that its
    object's size.   error: why it is not available, in the tier "failed".
    """

    object_key: str
    digest: str
    tier: Tier
    size_bytes: int
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class TierStats:
    """Figures of one adapter tier: counters since the engine started, and its current bytes.

    hits, misses: arriving requests that found their adapter there, or had to ask the next tier.
    loads, load_bytes, load_seconds: adapters loaded into it, their total size and loading time.
    limit_bytes: 0 if the tier has no limit.
    """

    tier: Literal["device", "host", "disk", "store"]
    hits: int = 0
    misses: int = 0
    loads: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    used_bytes: int = 0
    limit_bytes: int = 0

    def note_load(self, size_bytes: int, seconds: float) -> None:
        self.loads += 1
        self.load_bytes += size_bytes
        self.load_seconds += seconds
