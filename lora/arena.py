"""Ownership of the slabs of the one arena that KV blocks and adapters share. Bookkeeping only.

Every slab is in exactly one state: free, owned, or retired behind a fence. A retired slab has no
owner any more, but is handed out again only when every step launched before its retirement has
finished. A slab that a copy still reads or writes is never retired: an adapter that is being loaded
keeps its slabs until the copy has finished, and swap copies are part of a step.
"""

from collections import Counter, deque
from collections.abc import Sequence

from lora.errors import ArenaFull
from lora.eviction import EvictionOrder


class Arena:
    """Slabs 0 .. num_slabs - 1, handed out one by one.

    Idle items (adapters, prefix blocks) stay owned until their slabs are needed, and so do spare
    slabs, which are the first to go.
    num_coming: retired slabs; they become free without an eviction, as steps finish.
    """

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self.idle = EvictionOrder()
        self.num_coming = 0
        self._free: deque[int] = deque(range(num_slabs))
        self._owner: dict[int, str] = {}
        self._num_owned: Counter[str] = Counter()
        # (fence, slabs): the newest step that may touch the slabs; fences only rise.
        self._retired: deque[tuple[int, tuple[int, ...]]] = deque()
        self._launched_step = 0
        self._fence_step = 0
        self._finished_step = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Slabs that are free, or become free as steps finish and idle items are evicted."""
        return len(self._free) + self.num_coming + self.idle.num_slabs

    def make_room(self, num_slabs: int, *, spares: bool = True) -> bool:
        """Evict idle items as needed; returns whether `num_slabs` are free now.

        Nothing is evicted if all idle slabs would be too few, or if retired slabs will be enough.
        spares: false for slabs that will be spare, to which spare ones do not give way.
        """
        missing = num_slabs - len(self._free) - self.num_coming
        if missing > self.idle.num_slabs - (0 if spares else self.idle.num_spare):
            return False
        if missing > 0:
            self.idle.evict(missing, spares=spares)
        return len(self._free) >= num_slabs

    def allocate(self, num_slabs: int, owner: str) -> list[int]:
        """Hand `owner` this many slabs, all or none. Raises ArenaFull."""
        if num_slabs > len(self._free):
            raise ArenaFull(wanted=num_slabs, free=len(self._free))
        slabs = [self._free.popleft() for _ in range(num_slabs)]
        self._owner.update(dict.fromkeys(slabs, owner))
        self._num_owned[owner] += num_slabs
        return slabs

    def retire(self, slabs: Sequence[int]) -> None:
        """Take slabs from their owner; they become free when all steps up to the fence finish."""
        if not slabs:
            return
        for slab in slabs:
            owner = self._owner.pop(slab)
            self._num_owned[owner] -= 1
            if not self._num_owned[owner]:
                del self._num_owned[owner]
        self._retired.append((self._fence_step, tuple(slabs)))
        self.num_coming += len(slabs)
        self._reclaim()

    def expect_step(self) -> None:
        """Fence slabs retired from now on behind the next step: its swap copies still read them."""
        self._fence_step = self._launched_step + 1

    def launch_step(self, step: int) -> None:
        self._launched_step = self._fence_step = step

    def finish_step(self, step: int) -> None:
        self._finished_step = step
        self._reclaim()

    def check_integrity(self) -> None:
        """Assert that every slab is free, owned or retired, exactly once."""
        places = [*self._free, *self._owner, *(s for _, slabs in self._retired for s in slabs)]
        assert sorted(places) == list(range(self.num_slabs)), "a slab is lost or in two places"
        assert Counter(self._owner.values()) == self._num_owned
        assert self.num_coming == sum(len(slabs) for _, slabs in self._retired)
        self.idle.check_integrity()
        assert self.idle.num_slabs <= len(self._owner)

    def owned_by(self, owner: str) -> int:
        return self._num_owned[owner]

    def _reclaim(self) -> None:
        while self._retired and self._retired[0][0] <= self._finished_step:
            _, slabs = self._retired.popleft()
            self._free.extend(slabs)
            self.num_coming -= len(slabs)
