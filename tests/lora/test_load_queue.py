"""Order of loads: by class, then the tenant with the fewest under way, then by arrival."""

from tests.engine.fakes import make_adapter
from tests.lora.managers import finish, make_manager, make_waiter


def test_only_so_many_fetches_are_under_way_and_the_first_to_wait_is_next():
    manager, loader = make_manager(at_once=False, max_fetches=2)
    refs = [make_adapter(name) for name in "abcd"]
    for arrival, ref in enumerate(refs):
        manager.join(ref, make_waiter(f"r{arrival}", "t", arrival, priority=arrival == 2))
    manager.poll()
    assert loader.fetched == [refs[0].object_key, refs[1].object_key]
    finish(manager, loader)
    assert loader.fetched[2:] == [refs[3].object_key], "the third is of a lower class"


def test_a_tenant_with_many_cold_adapters_does_not_hold_up_anothers_one():
    manager, loader = make_manager(at_once=False, max_fetches=2)
    for arrival in range(50):
        waiter = make_waiter(f"r{arrival}", "greedy", arrival)
        manager.join(make_adapter(f"g{arrival}"), waiter)
    modest = make_adapter("m", tenant_id="modest")
    manager.join(modest, make_waiter("m", "modest", arrival=50))
    manager.poll()
    finish(manager, loader)
    assert modest.object_key in loader.fetched


def test_whoever_joins_takes_its_place_in_line_along():
    """A load has the place in line of the most urgent request that waits for it now."""
    manager, loader = make_manager(at_once=False, max_fetches=1)
    busy, first, second = (make_adapter(name) for name in ("busy", "first", "second"))
    manager.join(busy, make_waiter("busy", "b"))
    manager.poll()
    manager.join(first, make_waiter("r1", "t", arrival=1, priority=1))
    manager.join(second, make_waiter("r2", "t", arrival=2, priority=1))
    manager.join(second, make_waiter("r3", "u", arrival=3, priority=0))
    finish(manager, loader)
    assert loader.fetched[1:] == [second.object_key]
    third, fourth = make_adapter("third"), make_adapter("fourth")
    manager.join(third, make_waiter("r4", "t", arrival=4))
    manager.join(third, make_waiter("r6", "t", arrival=6))
    manager.join(fourth, make_waiter("r5", "t", arrival=5))
    manager.leave(third.object_key, "r4")
    for _ in range(3):
        finish(manager, loader, 2)
    assert loader.fetched[2:] == [fourth.object_key, third.object_key, first.object_key]


def test_a_prefetch_waits_behind_every_request():
    manager, loader = make_manager(at_once=False, max_fetches=1)
    manager.prefetch(make_adapter("p"), "t")
    manager.join(make_adapter("r"), make_waiter(priority=1, arrival=99))
    manager.poll()
    assert loader.fetched == [make_adapter("r").object_key]
