"""Packed weights stand for the same numbers as the quantised weights that they were made of."""

import pytest
import torch

from kernels.packed import COLUMNS, can_pack, pack
from kernels.quantized import Rounding
from tests.kernels.quantized_cases import ROUNDINGS, random_weight


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize(("out_features", "groups"), [(1, 1), (133, 3), (128, 4)])
def test_a_packed_weight_is_the_weight_that_was_packed(rounding, out_features, groups):
    in_features = groups * (rounding.group_size or 33)
    weight = random_weight(rounding, out_features, in_features)
    packed = pack(weight)
    assert torch.equal(packed.dequantize(), weight.dequantize())
    assert packed.codes.shape[2] % COLUMNS == 0
    assert packed.codes.nbytes >= weight.codes.numel() * rounding.bits / 8


def test_a_byte_has_the_codes_of_two_inputs_of_a_block():
    weight = random_weight(Rounding(4, 32), 3, 128)
    codes = pack(weight).codes[:, :, :3]
    low, high = (codes & 15).to(torch.int8) - 8, (codes >> 4).to(torch.int8) - 8
    assert torch.equal(low[1, 5], weight.codes[:, 69])
    assert torch.equal(high[1, 5], weight.codes[:, 101])


def test_groups_that_are_no_whole_steps_are_not_packed():
    assert not can_pack(Rounding(4, 8))
    with pytest.raises(AssertionError):
        pack(random_weight(Rounding(4, 8), 3, 64))
