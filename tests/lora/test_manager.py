"""Residency: requests share loads, users and pins protect adapters, and failures are remembered
for a while.
"""

import pytest

from lora.errors import Failure
from tests.engine.fakes import make_adapter
from tests.lora.managers import bring_in, bring_to_host, finish, make_manager, make_waiter, tier

# ---- from the store to the arena ----


def test_an_adapter_passes_every_tier_on_its_way():
    manager, loader = make_manager(at_once=False)
    ref = make_adapter()
    manager.join(ref, make_waiter())
    manager.poll()
    for _ in range(2):
        finish(manager, loader)
    manager.place(ref.object_key)
    finish(manager, loader)
    tiers = [move.tier for move in manager.machine.take_moves()]
    assert tiers == ["fetching", "disk", "host", "loading", "device"]


def test_a_request_learns_where_its_adapter_has_to_come_from():
    manager, loader = make_manager(at_once=False)
    ref = make_adapter()
    found = [manager.join(ref, make_waiter("r1"))]
    manager.poll()
    for number in range(2, 5):
        found.append(manager.join(ref, make_waiter(f"r{number}")))
        finish(manager, loader)
    manager.place(ref.object_key)
    found.append(manager.join(ref, make_waiter("r5")))
    finish(manager, loader)
    found.append(manager.join(ref, make_waiter("r6")))
    assert found == ["store", "store", "disk", "host", "host", None]


@pytest.mark.parametrize(("arena_is_host", "last_tier"), [(True, "disk"), (False, "host")])
def test_a_prefetch_takes_no_slabs_and_a_tenant_has_only_so_many_under_way(
    arena_is_host, last_tier
):
    """A prefetch ends on the tier before the arena."""
    manager, loader = make_manager(
        at_once=False, prefetch_per_tenant=2, arena_is_host=arena_is_host
    )
    for name in "abcd":
        manager.prefetch(make_adapter(name), "greedy")
    manager.prefetch(make_adapter("e"), "modest")
    manager.poll()
    assert len(loader.fetched) == 3
    for _ in range(4):
        finish(manager, loader, 10)
    assert manager.arena.num_free == 8
    assert [tier(manager, make_adapter(name)) for name in "abe"] == [last_tier] * 3
    manager.prefetch(make_adapter("c"), "greedy")
    manager.poll()
    assert len(loader.fetched) == 4, "what has come counts no more"


def test_a_prefetch_of_what_was_on_disk_looks_whether_it_still_is():
    manager, loader = make_manager(at_once=False)
    for count in (1, 2):
        manager.prefetch(make_adapter(), "t")
        manager.poll()
        finish(manager, loader)
        assert (tier(manager, make_adapter()), len(loader.fetched)) == ("disk", count)


def test_a_load_that_nobody_waits_for_any_more_is_dropped():
    manager, loader = make_manager(at_once=False, max_fetches=1)
    under_way, in_line = make_adapter("a"), make_adapter("b")
    for arrival, ref in enumerate((under_way, in_line)):
        manager.join(ref, make_waiter(f"r{arrival}", arrival=arrival))
    manager.poll()
    for arrival, ref in enumerate((under_way, in_line)):
        manager.leave(ref.object_key, f"r{arrival}")
    finish(manager, loader)
    assert [tier(manager, ref) for ref in (under_way, in_line)] == ["remote", "remote"]
    assert len(loader.fetched) == 1


def test_a_load_goes_on_for_whoever_still_waits():
    manager, loader = make_manager(at_once=False)
    ref = make_adapter()
    for name in ("one", "other"):
        manager.join(ref, make_waiter(name))
    manager.poll()
    manager.leave(ref.object_key, "one")
    for _ in range(2):
        finish(manager, loader)
    assert (tier(manager, ref), len(loader.fetched)) == ("host", 1)


def test_what_is_lost_on_its_way_into_the_arena_gives_its_slabs_back_and_comes_again():
    manager, loader = make_manager()
    ref = make_adapter()
    loader.failures[ref.object_key, "device"] = Failure("lost", "its slabs are damaged")
    manager.join(ref, make_waiter())
    bring_to_host(manager)
    manager.place(ref.object_key)
    manager.acquire(ref.object_key)
    manager.poll()
    assert tier(manager, ref) == "fetching"
    assert manager.arena.num_free == 8
    manager.check_integrity()
    loader.failures.clear()
    manager.release(ref.object_key)
    bring_in(manager, ref)


def test_what_was_lost_once_and_came_may_be_lost_again():
    """A failed load after a success is tried again as soon as after the first failure."""
    manager, loader = make_manager(num_slabs=1)
    ref = make_adapter()
    manager.join(ref, make_waiter())
    for _ in range(3):
        for failure in (Failure("lost", "damaged"), Failure("unavailable", "503")):
            loader.failures[ref.object_key, "disk" if failure.error == "503" else "host"] = failure
            for _ in range(3):
                manager.wait(ref.object_key)
                manager.poll()
            loader.failures.clear()
            if failure.error == "503":
                assert manager.retry_after_s(ref.object_key) == 1
                manager.clock.now += 1
            bring_in(manager, ref)
            assert manager.arena.make_room(1)


# ---- evictions ----


def use_again(manager, ref):
    """Let a request find the adapter in the arena."""
    manager.join(ref, make_waiter("again"))
    manager.acquire(ref.object_key)
    manager.release(ref.object_key)
    manager.leave(ref.object_key, "again")


def test_an_adapter_that_was_found_there_stays_longer():
    manager, _ = make_manager(num_slabs=3)
    a, b, c, d = (make_adapter(name) for name in "abcd")
    bring_in(manager, a)
    use_again(manager, a)
    for ref in (b, c, d):
        bring_in(manager, ref)
    assert manager.is_ready(a.object_key)
    assert not manager.is_ready(b.object_key)


def test_who_was_evicted_begins_anew():
    manager, _ = make_manager(num_slabs=2)
    a, b, c = (make_adapter(name) for name in "abc")
    bring_in(manager, a)
    for _ in range(8):
        use_again(manager, a)
    assert manager.arena.make_room(2)
    bring_in(manager, a)
    bring_in(manager, b)
    use_again(manager, b)
    bring_in(manager, c)
    assert not manager.is_ready(a.object_key)
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


def test_pinned_adapters_come_by_themselves_and_are_not_evicted_until_unpinned():
    manager, _ = make_manager(num_slabs=4)
    pinned, other = make_adapter("pinned"), make_adapter("other")
    manager.pin([pinned])
    for _ in range(4):
        manager.poll()
    assert manager.is_ready(pinned.object_key)
    assert manager.num_slabs_pinned == 1
    bring_in(manager, other)
    assert not manager.arena.make_room(4)
    assert manager.arena.make_room(3)
    assert manager.is_ready(pinned.object_key)
    manager.pin([])
    assert manager.arena.make_room(4)


def test_pins_take_no_more_than_their_share():
    manager, loader = make_manager(num_slabs=8, max_pinned_share=0.5)
    large, small = make_adapter("large"), make_adapter("small")
    loader.slabs = {large.object_key: 5, small.object_key: 4}
    manager.pin([large, small])
    for _ in range(6):
        manager.poll()
        manager.check_integrity()
    assert manager.num_slabs_pinned == 4
    assert manager.is_ready(small.object_key)
    assert not manager.is_ready(large.object_key)


# ---- failures ----


def test_what_becomes_of_one_tenants_object_is_nothing_to_anothers_equal_one():
    manager, loader = make_manager()
    lost, kept = make_adapter("same", tenant_id="a"), make_adapter("same", tenant_id="b")
    assert lost.digest == kept.digest
    loader.failures[lost.object_key, "disk"] = Failure("missing", "no such object")
    manager.join(lost, make_waiter())
    bring_in(manager, kept)
    assert manager.wait(lost.object_key) is not None


def test_what_is_remembered_of_unwanted_adapters_has_a_limit():
    manager, loader = make_manager(max_entries=4)
    for i in range(20):
        ref = make_adapter(f"a{i}")
        loader.failures[ref.object_key, "disk"] = Failure("missing", "gone")
        manager.join(ref, make_waiter())
        for _ in range(2):
            manager.poll()
        manager.leave(ref.object_key, "r")
    assert len(manager.entries) <= 5


# ---- the figures ----


def test_every_tier_counts_what_was_found_in_it():
    manager, _ = make_manager(num_slabs=1, arena_is_host=False)
    a, b = make_adapter("a"), make_adapter("b")
    bring_in(manager, a)  # from the store
    bring_in(manager, b)  # from the store; evicts a, which stays on the host
    bring_in(manager, a)  # from the host
    bring_in(manager, a)  # found in the arena
    counts = manager.counts
    assert (counts.device.hits, counts.device.misses, counts.device.loads) == (1, 3, 3)
    assert (counts.host.hits, counts.host.misses, counts.host.loads) == (1, 2, 2)
    assert (counts.disk.hits, counts.disk.misses, counts.store.hits) == (0, 2, 2)
    assert counts.device.load_bytes == 3 * a.size_bytes
