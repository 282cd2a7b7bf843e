"""Residency: loads join, users protect, the oldest idle one goes, failures are remembered."""

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import integers

from lora.arena import Arena
from lora.errors import Failure
from lora.manager import AdapterManager
from tests.engine.fakes import FakeClock, FakeLoader, make_adapter


def make_manager(num_slabs=8, at_once=True, **options):
    loader = FakeLoader(at_once=at_once)
    manager = AdapterManager(Arena(num_slabs), loader, clock=FakeClock(), **options)
    return manager, loader


def bring_in(manager, ref):
    """To the arena, whatever it takes."""
    for _ in range(5):
        manager.want(ref)
        manager.poll()
        if manager.slabs_needed(ref.object_key):
            assert manager.arena.make_room(manager.slabs_needed(ref.object_key))
            manager.place(ref.object_key)
    assert manager.is_ready(ref.object_key)


def test_an_adapter_passes_every_tier_on_its_way():
    manager, loader = make_manager(at_once=False)
    ref = make_adapter()
    manager.want(ref)
    for _ in range(2):
        loader.finish()
        manager.poll()
    manager.place(ref.object_key)
    loader.finish()
    manager.poll()
    tiers = [tier for _, tier, _, _ in manager.take_moves()]
    assert tiers == ["fetching", "disk", "host", "loading", "device"]


def test_the_least_recently_used_idle_adapter_is_evicted_first():
    manager, _ = make_manager(num_slabs=3)
    a, b, c, d = (make_adapter(name) for name in "abcd")
    for ref in (a, b, c):
        bring_in(manager, ref)
    manager.want(a)  # used again
    bring_in(manager, d)
    assert not manager.is_ready(b.object_key)
    assert all(manager.is_ready(ref.object_key) for ref in (a, c, d))


def test_make_room_evicts_nobody_when_it_cannot_make_enough():
    manager, _ = make_manager(num_slabs=3)
    a, b = make_adapter("a"), make_adapter("b")
    bring_in(manager, a)
    bring_in(manager, b)
    manager.acquire(a.object_key)
    assert not manager.arena.make_room(3)
    assert manager.is_ready(b.object_key)


def test_every_placement_has_a_generation_of_its_own():
    manager, _ = make_manager(num_slabs=1)
    a, b = make_adapter("a"), make_adapter("b")
    bring_in(manager, a)
    first, _ = manager.tables(a.object_key)
    bring_in(manager, b)
    bring_in(manager, a)
    second, _ = manager.tables(a.object_key)
    assert second > first


def test_a_prefetch_takes_no_slabs_and_a_tenant_has_only_so_many_under_way():
    manager, loader = make_manager(at_once=False, prefetch_per_tenant=2)
    for name in "abcd":
        manager.prefetch(make_adapter(name), "greedy")
    manager.prefetch(make_adapter("e"), "modest")
    assert loader.num_fetches == 3
    loader.finish(10)
    manager.poll()
    loader.finish(10)
    manager.poll()
    assert manager.arena.num_free == 8


def test_a_rejected_object_is_not_fetched_again():
    manager, loader = make_manager()
    ref = make_adapter()
    loader.failures[ref.object_key, "host"] = Failure("incompatible", "not of this base model")
    for _ in range(3):
        manager.want(ref)
        manager.poll()
        manager.poll()
        manager.clock.now += 1000
    assert loader.num_fetches == 1
    assert manager.failure(ref.object_key) == Failure("incompatible", "not of this base model")


def test_what_becomes_of_one_tenants_object_is_nothing_to_anothers_equal_one():
    manager, loader = make_manager()
    lost, kept = make_adapter("same", tenant_id="a"), make_adapter("same", tenant_id="b")
    assert lost.digest == kept.digest
    loader.failures[lost.object_key, "disk"] = Failure("missing", "no such object")
    manager.want(lost)
    manager.poll()
    bring_in(manager, kept)
    assert manager.failure(lost.object_key) is not None


def test_the_host_cache_keeps_to_its_bytes():
    manager, _ = make_manager(host_cache_bytes=2500, arena_is_host=False)
    for name in "abcdef":
        manager.want(make_adapter(name))
        manager.poll()
        manager.poll()
    kept = [e for e in manager.entries.values() if e.packed is not None]
    assert sum(e.packed.size_bytes for e in kept) <= 2500


def test_what_is_remembered_of_idle_adapters_has_a_limit():
    manager, loader = make_manager(max_entries=4)
    for i in range(20):
        ref = make_adapter(f"a{i}")
        loader.failures[ref.object_key, "disk"] = Failure("missing", "gone")
        manager.want(ref)
        manager.poll()
    assert len(manager.entries) <= 5


class ManagerMachine(RuleBasedStateMachine):
    """Requests, releases and a slow, failing loader, in any order."""

    def __init__(self):
        super().__init__()
        self.manager, self.loader = make_manager(num_slabs=6, at_once=False, host_cache_bytes=3000)
        self.refs = [make_adapter(f"a{i}") for i in range(5)]
        self.loader.slabs = {ref.object_key: i % 3 + 1 for i, ref in enumerate(self.refs)}
        self.held: list[str] = []

    @rule(i=integers(0, 4))
    def want(self, i):
        self.manager.want(self.refs[i])

    @rule(i=integers(0, 4))
    def prefetch(self, i):
        self.manager.prefetch(self.refs[i], "t")

    @rule(count=integers(1, 3))
    def finish(self, count):
        self.loader.finish(count)
        self.manager.poll()

    @rule(i=integers(0, 4))
    def fail(self, i):
        key = self.refs[i].object_key
        self.loader.failures = {
            (key, "disk"): Failure("unavailable", "503"),
            (key, "host"): Failure("incompatible", "bad"),
        }

    @rule(i=integers(0, 4))
    def place(self, i):
        entry = self.manager.entries.get(self.refs[i].object_key)
        if entry and entry.tier == "host" and self.manager.arena.make_room(entry.packed.num_slabs):
            self.manager.place(entry.ref.object_key)

    @rule(i=integers(0, 4))
    def acquire(self, i):
        key = self.refs[i].object_key
        if key in self.manager.entries and self.manager.is_ready(key):
            self.manager.acquire(key)
            self.held.append(key)

    @rule()
    def release(self):
        if self.held:
            self.manager.release(self.held.pop())

    @rule(seconds=integers(1, 10))
    def wait(self, seconds):
        self.manager.clock.now += seconds

    @invariant()
    def nobody_in_use_was_evicted_and_no_slab_is_lost(self):
        assert all(self.manager.is_ready(key) for key in self.held)
        self.manager.check_integrity()
        self.manager.arena.check_integrity()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
