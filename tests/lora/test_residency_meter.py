"""Durations of adapters in tiers: those of one adapter add up to the time that it existed."""

from hypothesis import given
from hypothesis.strategies import booleans, floats, lists, sampled_from, tuples

from lora.entry import Entry
from lora.eviction import Claim
from lora.residency_meter import ResidencyMeter, Stay
from tests.engine.fakes import FakeClock, FakePacked, make_adapter
from tests.lora.managers import bring_in, make_manager, make_waiter

MOVES = lists(
    tuples(
        sampled_from(["disk", "host", "loading", "device"]),
        booleans(),
        floats(0, 1000, allow_subnormal=False),
        booleans(),
    ),
    min_size=1,
)


def make_entry(tier="disk", num_slabs=2):
    ref = make_adapter()
    return Entry(ref, Claim("t"), tier, packed=FakePacked(ref.digest, num_slabs, 5000))


@given(MOVES)
def test_the_durations_of_an_adapter_add_up_to_the_time_it_existed(moves):
    clock = FakeClock(123.4567)
    meter, entry = ResidencyMeter(clock), make_entry()
    taken = []
    for tier, entry.is_pinned, seconds, is_time in moves:
        entry.tier = tier
        entry.slabs = [1, 2] if tier in ("loading", "device") else []
        meter.note(entry)
        clock.now += seconds
        if is_time:
            taken += meter.take()
    meter.forget(entry.key)
    taken += meter.take()
    assert sum(duration_ms for _, duration_ms in taken) == int(clock.now * 1000) - 123_456
    assert meter.take() == []


def test_a_pinned_stretch_and_an_unpinned_one_are_two_items():
    manager, loader = make_manager()
    ref = make_adapter()
    loader.slabs[ref.object_key] = 3
    bring_in(manager, ref)
    manager.residency.take()
    manager.clock.now += 5
    manager.pin([ref])
    manager.clock.now += 7
    manager.pin([])
    manager.clock.now += 11
    durations = {stay.is_pinned: ms for stay, ms in manager.residency.take() if stay.slabs == 3}
    assert durations == {False: 16_000, True: 7_000}


def test_an_adapter_has_its_slabs_from_the_moment_they_are_taken_for_it():
    manager, loader = make_manager(at_once=False, arena_is_host=False)
    ref = make_adapter()
    loader.slabs[ref.object_key] = 2
    manager.join(ref, make_waiter())
    manager.poll()
    for _ in range(2):
        manager.clock.now += 1
        loader.finish()
        manager.poll()
    manager.clock.now += 3  # in host memory
    manager.place(ref.object_key)
    manager.clock.now += 4  # being copied
    loader.finish()
    manager.poll()
    manager.clock.now += 5
    found = {(stay.tier, stay.slabs): ms for stay, ms in manager.residency.take()}
    assert found == {("disk", 0): 1_000, ("host", 0): 3_000, ("device", 2): 9_000}


def test_what_is_nowhere_is_not_metered():
    clock = FakeClock()
    meter = ResidencyMeter(clock)
    for tier in ("remote", "fetching", "failed"):
        meter.note(make_entry(tier))
        clock.now += 60
    assert meter.take() == []


def test_what_an_adapter_takes_is_what_its_tier_stores_of_it():
    entry = make_entry()
    entry.packed_bytes, entry.slabs = 4096, [7]
    sizes = {}
    for entry.tier in ("disk", "host", "device"):
        sizes[entry.tier] = Stay.of(entry).size_bytes
    assert sizes == {"disk": entry.ref.size_bytes, "host": 5000, "device": 4096}
