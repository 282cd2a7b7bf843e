"""Who owns which slab of the one arena that KV blocks and adapters share. Bookkeeping, no memory.

Every slab is in exactly one place: free, owned, or retired behind a fence. Bookkeeping frees at
once,
memory later: a retired slab is handed out again when every step launched before its retirement has
finished and every copy that reads or writes it is done.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lora.errors import ArenaFull


@dataclass(frozen=True, slots=True)
class Fence:
    """When a slab is nobody's any more. step: newest launched.   copies: still under way."""

    step: int
    copies: frozenset[int] = frozenset()


class Idle(Protocol):
    """Slabs that nobody uses at the moment, kept because somebody may come back for them."""

    def num_idle_slabs(self) -> int: ...
    def coldest(self) -> int | None:
        """When what would go next was last used, by `Arena.tick`; None if nothing is idle."""
        ...

    def evict_coldest(self) -> None:
        """Retire its slabs, one at least."""
        ...


class Arena:
    """Slabs 0 .. num_slabs - 1, handed out one by one.

    What is idle in it (adapters, prefix blocks) stays until room is needed; `make_room` knows one
    order over all of it: least recently used first.
    """

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self._idle: list[Idle] = []
        self._tick = 0
        self._num_retired = 0
        self._free: deque[int] = deque(range(num_slabs))
        self._owner: dict[int, str] = {}
        self._num_owned: Counter[str] = Counter()
        self._retired: deque[tuple[Fence, tuple[int, ...]]] = deque()
        self._launched_step = 0
        self._fence_step = 0
        self._finished_step = 0
        self._copies: set[int] = set()
        self._next_copy = 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_coming(self) -> int:
        """Slabs behind a fence: they will be free without anybody's doing."""
        return self._num_retired

    def tick(self) -> int:
        """A number larger than every one before: the time of a use."""
        self._tick += 1
        return self._tick

    def keep(self, idle: Idle) -> None:
        """From now on `make_room` may evict what is idle there."""
        self._idle.append(idle)

    def num_idle(self) -> int:
        return sum(source.num_idle_slabs() for source in self._idle)

    def make_room(self, num_slabs: int) -> bool:
        """Whether `num_slabs` are free now, after evicting what is idle.

        Nothing is evicted when that could not be enough, or when slabs behind fences will do.
        """
        missing = num_slabs - len(self._free) - self._num_retired
        if missing > 0 and missing > self.num_idle():
            return False
        while len(self._free) + self._num_retired < num_slabs:
            self._coldest_source().evict_coldest()
        return len(self._free) >= num_slabs

    def _coldest_source(self) -> Idle:
        coldest = ((source.coldest(), source) for source in self._idle)
        return min(((at, s) for at, s in coldest if at is not None), key=lambda pair: pair[0])[1]

    def allocate(self, num_slabs: int, owner: str) -> list[int]:
        """Slabs for `owner`, all or none. Raises ArenaFull."""
        if num_slabs > len(self._free):
            raise ArenaFull(wanted=num_slabs, free=len(self._free))
        slabs = [self._free.popleft() for _ in range(num_slabs)]
        self._owner.update(dict.fromkeys(slabs, owner))
        self._num_owned[owner] += num_slabs
        return slabs

    def retire(self, slabs: Sequence[int], copies: Iterable[int] = ()) -> None:
        """Take slabs from their owner; they are reusable behind the fence of this moment."""
        if not slabs:
            return
        for slab in slabs:
            owner = self._owner.pop(slab)
            self._num_owned[owner] -= 1
            if not self._num_owned[owner]:
                del self._num_owned[owner]
        fence = Fence(self._fence_step, frozenset(copies) & self._copies)
        self._retired.append((fence, tuple(slabs)))
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

    def begin_copy(self) -> int:
        """A copy that reads or writes slabs starts; its number goes into their fence."""
        copy, self._next_copy = self._next_copy, self._next_copy + 1
        self._copies.add(copy)
        return copy

    def finish_copy(self, copy: int) -> None:
        self._copies.discard(copy)
        self._reclaim()

    def check_integrity(self) -> None:
        """Every slab is free, owned or retired, once."""
        places = [*self._free, *self._owner, *(s for _, slabs in self._retired for s in slabs)]
        assert sorted(places) == list(range(self.num_slabs)), "a slab is lost or in two places"
        assert Counter(self._owner.values()) == self._num_owned
        assert self._num_retired == sum(len(slabs) for _, slabs in self._retired)

    def owned_by(self, owner: str) -> int:
        return self._num_owned[owner]

    def _reclaim(self) -> None:
        behind = deque[tuple[Fence, tuple[int, ...]]]()
        for fence, slabs in self._retired:
            if fence.step <= self._finished_step and not fence.copies & self._copies:
                self._free.extend(slabs)
                self._num_retired -= len(slabs)
            else:
                behind.append((fence, slabs))
        self._retired = behind
