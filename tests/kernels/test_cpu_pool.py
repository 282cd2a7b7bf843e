"""Threads of the C kernels compute each item once, whoever else calls them or is forked."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernels.cpu.compiler import find_library
from kernels.cpu.errors import Unavailable

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


@pytest.fixture(scope="module")
def library():
    try:
        return ctypes.CDLL(str(find_library()))
    except Unavailable as reason:
        pytest.skip(str(reason))


def counts(library, num_items, threads):
    """How often each item was computed."""
    found = [0] * num_items

    def note(_, item):
        found[item] += 1

    library.share(TASK(note), None, ctypes.c_int64(num_items), threads)
    return found


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_each_item_is_computed_once(library, threads):
    for num_items in (0, 1, 2, 3, 7, 100):
        for _ in range(20):
            assert counts(library, num_items, threads) == [1] * num_items


def test_callers_at_the_same_time_do_not_take_each_others_items(library):
    with ThreadPoolExecutor(3) as callers:
        found = [callers.submit(counts, library, 1 + i % 50, 3) for i in range(300)]
    assert [one.result() for one in found] == [[1] * (1 + i % 50) for i in range(300)]


def test_a_forked_child_has_threads_of_its_own(library):
    counts(library, 9, 3)
    child = os.fork()
    if child == 0:
        os._exit(counts(library, 50, 3) != [1] * 50)
    assert os.waitpid(child, 0)[1] == 0
