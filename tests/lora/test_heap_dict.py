"""A dict that knows the key of its smallest value, whatever was set and deleted before."""

from hypothesis import given
from hypothesis.strategies import integers, lists, none, one_of, tuples

from lora.heap_dict import HeapDict


@given(lists(tuples(integers(0, 5), one_of(none(), integers(-9, 9))), max_size=300))
def test_the_first_key_has_the_smallest_value(changes):
    """A value of None deletes the key."""
    heap: HeapDict[int, int] = HeapDict()
    for key, value in changes:
        if value is None:
            heap.pop(key, None)
        else:
            heap[key] = value
        if heap:
            assert (heap[heap.first()], heap.first()) == min((v, k) for k, v in heap.items())
        assert len(heap._heap) <= 2 * len(heap) + 64
