"""Slabs of one region of host memory: each has one owner at most, adjacent ones are preferred."""

import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, tuples

from lora.host_region import HostRegion


def make_region(num_slabs):
    return HostRegion(torch.zeros(num_slabs, 16, dtype=torch.uint8))


@given(acts=lists(tuples(booleans(), integers(0, 12)), max_size=60), num_slabs=integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_a_slab_is_given_to_one_at_a_time_and_every_free_one_can_be_had(acts, num_slabs):
    region, held = make_region(num_slabs), []
    for is_take, number in acts:
        if is_take:
            num_free = num_slabs - sum(map(len, held))
            slabs = region.take(number)
            assert (slabs is not None) == (number <= num_free)
            if slabs is not None:
                assert len(slabs) == number
                held.append(slabs)
        elif held:
            region.give_back(held.pop(number % len(held)))
        taken = [slab for slabs in held for slab in slabs]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(range(num_slabs))
    for slabs in held:
        region.give_back(slabs)
    assert region.take(num_slabs) == tuple(range(num_slabs)), "all of them came back"


def test_neighbours_are_preferred_and_the_smallest_run_that_holds_them():
    region = make_region(12)
    for slabs in ((0, 1), (2,), (3, 4, 5, 6), (7,), (8,), (9, 10, 11)):
        assert region.take(len(slabs)) == slabs
    for slabs in ((0, 1), (3, 4, 5, 6), (8,)):
        region.give_back(slabs)
    assert region.take(2) == (0, 1)
    assert region.take(5) == (3, 4, 5, 6, 8), "no run holds them: the largest ones do"
    assert region.take(1) is None
