"""Who owns which slab of the one arena that KV blocks and adapters share. Bookkeeping, no memory.

Every slab is in exactly one place: free, owned, or retired behind a fence. Bookkeeping frees at
once, memory later: a retired slab is handed out again when every step launched before its
retirement has finished. What a copy still reads or writes is not retired: an adapter on its way in
keeps its slabs until it has arrived, and swap copies are part of a step.
"""

from collections import Counter, deque
from collections.abc import Sequence

from lora.errors import ArenaFull
from lora.eviction import EvictionOrder


class Arena:
    """Slabs 0 .. num_slabs - 1, handed out one by one.

    What is idle in it (adapters, prefix blocks) is owned, and stays until room is needed.
    """

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self.idle = EvictionOrder()
        self._num_retired = 0
        self._free: deque[int] = deque(range(num_slabs))
        self._owner: dict[int, str] = {}
        self._num_owned: Counter[str] = Counter()
        # By the newest step that may touch them, which only rises.
        self._retired: deque[tuple[int, tuple[int, ...]]] = deque()
        self._launched_step = 0
        self._fence_step = 0
        self._finished_step = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_coming(self) -> int:
        """Slabs behind a fence: they will be free without anybody's doing."""
        return self._num_retired

    def make_room(self, num_slabs: int) -> bool:
        """Whether `num_slabs` are free now, after evicting what is idle.

        Nothing is evicted when that could not be enough, or when slabs behind fences will do.
        """
        missing = num_slabs - len(self._free) - self._num_retired
        if missing > self.idle.num_slabs:
            return False
        if missing > 0:
            self.idle.evict(missing)
        return len(self._free) >= num_slabs

    def allocate(self, num_slabs: int, owner: str) -> list[int]:
        """Slabs for `owner`, all or none. Raises ArenaFull."""
        if num_slabs > len(self._free):
            raise ArenaFull(wanted=num_slabs, free=len(self._free))
        slabs = [self._free.popleft() for _ in range(num_slabs)]
        self._owner.update(dict.fromkeys(slabs, owner))
        self._num_owned[owner] += num_slabs
        return slabs

    def retire(self, slabs: Sequence[int]) -> None:
        """Take slabs from their owner; they are reusable behind the fence of this moment."""
        if not slabs:
            return
        for slab in slabs:
            owner = self._owner.pop(slab)
            self._num_owned[owner] -= 1
            if not self._num_owned[owner]:
                del self._num_owned[owner]
        self._retired.append((self._fence_step, tuple(slabs)))
        self._num_retired += len(slabs)
        self._reclaim()

    def expect_step(self) -> None:
        """The step to be launched next reads slabs that are given back before it is."""
        self._fence_step = self._launched_step + 1

    def launch_step(self, step: int) -> None:
        self._launched_step = self._fence_step = step

    def finish_step(self, step: int) -> None:
        self._finished_step = step
        self._reclaim()

    def check_integrity(self) -> None:
        """Every slab is free, owned or retired, once."""
        places = [*self._free, *self._owner, *(s for _, slabs in self._retired for s in slabs)]
        assert sorted(places) == list(range(self.num_slabs)), "a slab is lost or in two places"
        assert Counter(self._owner.values()) == self._num_owned
        assert self._num_retired == sum(len(slabs) for _, slabs in self._retired)
        self.idle.check_integrity()
        assert self.idle.num_slabs <= len(self._owner)

    def owned_by(self, owner: str) -> int:
        return self._num_owned[owner]

    def _reclaim(self) -> None:
        while self._retired and self._retired[0][0] <= self._finished_step:
            _, slabs = self._retired.popleft()
            self._free.extend(slabs)
            self._num_retired -= len(slabs)
