"""The fake device: the order that it keeps, the races that it reports, and late work."""

import pytest
import torch

from tests.engine.gpu.fake_device import FakeDevice, Race


@pytest.fixture(params=[0.0, 0.5, 0.95])
def device(request):
    device = FakeDevice(seed=3, eagerness=request.param)
    device.arena = torch.zeros(8, 256, dtype=torch.uint8)
    return device


def touch(device, stream, slab, is_write):
    device.submit(stream, lambda: device.touch({slab}, is_write, "test"))


def is_race(device, *accesses):
    """Whether the accesses, (stream, slab, is_write) in order of submission, are a race."""
    try:
        for access in accesses:
            touch(device, *access)
        finish(device, *{id(stream): stream for stream, _, _ in accesses}.values())
    except Race:
        return True
    return False


def finish(device, *streams):
    for event in [device.record(stream) for stream in streams]:
        device.synchronize(event)


def test_work_of_one_stream_runs_in_its_order(device):
    done = []
    for number in range(20):
        device.submit(device.compute, lambda number=number: done.append(number))
    finish(device, device.compute)
    assert done == list(range(20))


def test_nothing_is_done_before_somebody_waits_where_nothing_is_eager():
    device, done = FakeDevice(eagerness=0.0), []
    device.submit(device.compute, lambda: done.append(1))
    event = device.record(device.compute)
    device.submit(device.compute, lambda: done.append(2))
    device.synchronize(event)
    assert done == [1], "work after the event is not done yet"


@pytest.mark.parametrize("first_writes", [True, False])
def test_two_streams_with_a_write_and_no_event_between_are_a_race(device, first_writes):
    """An example is a page-in and a step that is given its slab; they may run in either order."""
    copies = device.stream()
    assert is_race(device, (copies, 5, first_writes), (device.compute, 5, not first_writes))


def test_two_writes_are_a_race_and_two_reads_are_none(device):
    copies = device.stream()
    assert not is_race(device, (copies, 1, False), (device.compute, 1, False))
    assert is_race(device, (copies, 2, True), (device.compute, 2, True))


def test_a_host_that_waited_orders_what_it_submits_afterwards(device):
    copies = device.stream()
    for stream, is_write in ((copies, True), (device.compute, False), (copies, True)):
        assert not is_race(device, (stream, 5, is_write))  # is_race waits for the work


def test_waiting_for_an_event_says_nothing_of_what_came_behind_it(device):
    copies = device.stream()
    event = device.record(copies)
    touch(device, copies, 5, True)
    device.synchronize(event)
    assert is_race(device, (device.compute, 5, False), (copies, 6, False))


def test_one_stream_needs_no_event(device):
    accesses = [(device.compute, 5, is_write) for is_write in (True, False, True, True, False)]
    assert not is_race(device, *accesses)


@pytest.mark.parametrize(("slab", "expected"), [(2, False), (3, True), (4, True), (5, False)])
def test_copies_touch_the_slabs_that_they_lie_in(slab, expected):
    device = FakeDevice(eagerness=0.0)
    device.arena = torch.zeros(8, 256, dtype=torch.uint8)
    copies = device.stream()
    device.copy(copies, device.arena[3:5], torch.ones(2, 256, dtype=torch.uint8))
    assert is_race(device, (device.compute, slab, False), (copies, 0, False)) == expected
    assert expected or device.arena[:, 0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_pinned_memory_that_is_written_before_its_copy_is_done_is_a_race(is_waited_for):
    device = FakeDevice(eagerness=0.0)
    copies = device.stream()
    source = device.pinned(4, 256, dtype=torch.uint8).zero_()
    device.copy(copies, torch.empty(2, 256, dtype=torch.uint8), source[1:3])
    event = device.record(copies)
    source[0] = 1  # this element is not copied
    if is_waited_for:
        device.synchronize(event)
    source[2] = 1
    if not is_waited_for:
        with pytest.raises(Race, match="the host wrote"):
            device.synchronize(event)


def test_what_runs_beside_must_be_waited_for():
    device = FakeDevice(eagerness=0.0)
    device.submit(device.compute, lambda: [device.beside(lambda: None) for _ in range(10)])
    with pytest.raises(AssertionError, match="was not joined"):
        finish(device, device.compute)
