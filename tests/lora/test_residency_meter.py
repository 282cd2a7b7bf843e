"""Durations of adapters in tiers: those of one adapter add up to the time that it existed."""

from hypothesis import given
from hypothesis.strategies import booleans, floats, lists, sampled_from, tuples

from lora.entry import Entry
from lora.eviction import Claim
from lora.residency_meter import ResidencyMeter, Stay
from tests.engine.fakes import FakeClock, FakePacked, make_adapter

MOVES = lists(
    tuples(
        sampled_from(["disk", "host", "loading", "device"]),
        booleans(),
        floats(0, 1000, allow_subnormal=False),
        booleans(),
    ),
    min_size=1,
)


def make_entry():
    ref = make_adapter()
    return Entry(ref, Claim("t"), "disk", packed=FakePacked(ref.digest, 2, 5000))


@given(MOVES)
def test_the_durations_of_an_adapter_add_up_to_the_time_it_existed(moves):
    clock = FakeClock(123.4567)
    meter, entry = ResidencyMeter(clock), make_entry()
    taken = []
    for entry.state, entry.is_pinned, seconds, is_time in moves:
        entry.slabs = [1, 2] if entry.state in ("loading", "device") else []
        meter.note(entry)
        clock.now += seconds
        if is_time:
            taken += meter.take()
    meter.forget(entry.key)
    taken += meter.take()
    assert sum(duration_ms for _, duration_ms in taken) == int(clock.now * 1000) - 123_456
    assert meter.take() == []


def test_what_an_adapter_takes_is_what_its_tier_stores_of_it():
    entry = make_entry()
    entry.packed_bytes, entry.host_bytes, entry.slabs = 4096, 5000, [7]
    sizes = {}
    for entry.state in ("disk", "host", "device"):
        sizes[entry.state] = Stay.of(entry).size_bytes
    assert sizes == {"disk": entry.ref.size_bytes, "host": 5000, "device": 4096}
