"""Parts of CudaDevice that can be tested without a GPU."""

import mmap

import pytest
import torch

from lora.device import page_locked


class Registry:
    """A registry of page-locked memory, like CUDA's own."""

    def __init__(self):
        self.pages = {}

    def register(self, address, num_bytes):
        assert address % mmap.PAGESIZE == 0
        self.pages[address] = num_bytes

    def unregister(self, address):
        del self.pages[address]


@pytest.mark.parametrize("shape", [(3, 1000), (1,), (1 << 20,)])
def test_pinned_memory_is_what_was_asked_for_until_its_last_view_is_gone(shape):
    registry = Registry()
    memory = page_locked(shape, torch.int32, registry.register, registry.unregister)
    memory.fill_(7)
    assert (memory.shape, memory.dtype) == (shape, torch.int32)
    first_byte = memory.untyped_storage().data_ptr()  # where torch asks whether it is pinned
    assert registry.pages == {first_byte: memory.nbytes}
    view = memory[-1:]
    del memory
    assert registry.pages, "a view of it is left"
    assert view.unique().tolist() == [7]
    del view
    assert not registry.pages


def test_no_memory_is_pinned_where_none_is_asked_for():
    registry = Registry()
    memory = page_locked((0, 4096), torch.uint8, registry.register, registry.unregister)
    assert memory.shape == (0, 4096)
    assert not registry.pages
