"""Slabs are copied by ids, byte for byte, and no other bytes change."""

import pytest
import torch

from kernels import reference
from kernels.gpu.slabs import copy_slabs
from tests.kernels.far_rows import far_rows


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def random_slabs(slabs, slab_bytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (slabs, slab_bytes), generator=generator).to(torch.uint8)


# Slabs smaller than a piece, of one piece, of slightly more than one, and of three.
@pytest.mark.parametrize("slab_bytes", [16, 4368, 32768, 32784, 98304])
def test_slabs_go_where_their_ids_say_and_no_others_change(slab_bytes):
    source, target = random_slabs(5, slab_bytes), random_slabs(7, slab_bytes, seed=1)
    wanted = target.clone()
    ids = ints(6, 0, 3), ints(4, 1, 4)
    reference.copy_slabs(wanted, ids[0], source, ids[1])
    copy_slabs(target, ids[0], source, ids[1])
    assert torch.equal(target, wanted)


def test_slabs_of_one_arena_are_copied_within_it():
    arena = random_slabs(6, 48)
    before = arena.clone()
    copy_slabs(arena, ints(5, 0), arena, ints(1, 3))
    assert torch.equal(arena, before[[3, 1, 2, 3, 4, 1]])


def test_parts_of_slabs_leave_their_rests_alone():
    source, target = random_slabs(3, 64), random_slabs(3, 96, seed=1)
    wanted = target.clone()
    wanted[2, 16:64] = source[0, 16:64]
    copy_slabs(target[:, 16:64], ints(2), source[:, 16:64], ints(0))
    assert torch.equal(target, wanted)


def test_slabs_past_32_bits_are_their_own():
    slabs = far_rows(5, 16, torch.int32).view(torch.uint8)
    slabs[0], slabs[3] = 1, 2
    copy_slabs(slabs, ints(4), slabs, ints(3))
    copy_slabs(slabs, ints(1), slabs, ints(4))
    copy_slabs(slabs, ints(4), slabs, ints(0))
    assert slabs[:, 0].tolist() == [1, 2, 0, 2, 1]
