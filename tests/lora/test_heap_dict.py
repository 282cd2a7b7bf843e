"""A dict that knows the key of its smallest value, whatever was set and deleted before."""

import random

from lora.heap_dict import HeapDict


def test_the_first_key_has_the_smallest_value_and_few_outdated_entries_are_kept():
    chance, heap = random.Random(1), HeapDict[int, int]()
    for _ in range(2000):
        key = chance.randrange(60)
        if chance.random() < 0.3:
            heap.pop(key, None)
        else:
            heap[key] = chance.randrange(100)
        if heap:
            assert (heap[heap.first()], heap.first()) == min((v, k) for k, v in heap.items())
        assert len(heap._heap) <= 2 * 60 + 65
