"""Packed weights stand for the same numbers as the quantised weights that they were made of."""

import pytest
import torch

from kernels.packed import COLUMNS, can_pack, pack
from kernels.quantized import Rounding
from tests.kernels.quantized_cases import ROUNDINGS, random_weight


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize(("out_features", "groups"), [(1, 1), (133, 3), (128, 4)])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=str)
def test_a_packed_weight_is_the_weight_that_was_packed(rounding, out_features, groups, scale_dtype):
    in_features = groups * (rounding.group_size or 33)
    weight = random_weight(rounding, out_features, in_features, scale_dtype=scale_dtype)
    packed = pack(weight)
    assert packed.scales.dtype == (scale_dtype if rounding.group_size else torch.float32)
    assert torch.equal(packed.dequantize(), weight.dequantize())
    assert packed.codes.shape[2] % COLUMNS == 0
    assert packed.codes.nbytes >= weight.codes.numel() * rounding.bits / 8


def test_a_word_has_the_codes_of_four_inputs_of_a_block():
    weight = random_weight(Rounding(4, 32), 3, 256)
    words = pack(weight).codes[:, :, :3].int()
    for index in range(4):
        field = (words >> 4 * index & 15) - 8
        assert torch.equal(field[1, 5], weight.codes[:, 133 + 32 * index].int())


def test_groups_that_are_no_whole_steps_are_not_packed():
    assert not can_pack(Rounding(4, 8))
    with pytest.raises(AssertionError):
        pack(random_weight(Rounding(4, 8), 3, 64))
