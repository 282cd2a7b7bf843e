"""The arena's bookkeeping: no slab is lost, shared, or handed out while a step may still write to
it.
"""

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import data, integers

from lora.arena import Arena
from lora.errors import ArenaFull


def test_allocation_is_all_or_nothing():
    arena = Arena(4)
    arena.allocate(3, "a")
    with pytest.raises(ArenaFull) as error:
        arena.allocate(2, "b")
    assert (error.value.wanted, error.value.free) == (2, 1)
    assert arena.num_free == 1


def test_a_retired_slab_waits_for_the_newest_launched_step():
    arena = Arena(1)
    slabs = arena.allocate(1, "a")
    arena.launch_step(7)
    arena.retire(slabs)
    arena.finish_step(6)
    assert arena.num_free == 0
    arena.finish_step(7)
    assert arena.num_free == 1


class ArenaMachine(RuleBasedStateMachine):
    """Owners come and go while steps are launched and finished in order."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(16)
        self.owned: dict[str, list[int]] = {}
        self.launched = self.finished = 0
        # slab -> the step after which the slab may be handed out again
        self.busy_until: dict[int, int] = {}

    @rule(count=integers(0, 6))
    def allocate(self, count):
        owner = f"o{len(self.owned)}-{self.launched}"
        if count > self.arena.num_free or owner in self.owned:
            return
        slabs = self.arena.allocate(count, owner)
        assert all(self.busy_until.get(slab, 0) <= self.finished for slab in slabs)
        assert not set(slabs) & {s for taken in self.owned.values() for s in taken}
        self.owned[owner] = slabs

    @precondition(lambda self: self.owned)
    @rule(choice=data())
    def retire(self, choice):
        owner = sorted(self.owned)[choice.draw(integers(0, len(self.owned) - 1))]
        slabs = self.owned.pop(owner)
        self.busy_until.update(dict.fromkeys(slabs, self.launched))
        self.arena.retire(slabs)

    @rule()
    def launch(self):
        self.launched += 1
        self.arena.launch_step(self.launched)

    @precondition(lambda self: self.finished < self.launched)
    @rule()
    def finish(self):
        self.finished += 1
        self.arena.finish_step(self.finished)

    @invariant()
    def every_slab_is_in_one_place(self):
        self.arena.check_integrity()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
