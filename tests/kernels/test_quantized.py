import pytest
import torch

from kernels.quantized import (
    Fp8Weight,
    QuantizedWeight,
    Rounding,
    as_numbers,
    concatenated,
    form_of,
    quantize,
)
from kernels.reference import FP8

ROUNDINGS = [
    Rounding(4, 32),
    Rounding(4, 8),
    Rounding(4, 32, has_zeros=True),
    Rounding(8),
    Rounding(8, 16),
]


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_rounded_weight_is_within_half_a_code_of_the_original(rounding):
    weight = random(9, 64)
    found = quantize(weight, rounding)
    most = 2 ** (rounding.bits - 1)
    least = -most if rounding.has_zeros else 1 - most
    assert least <= int(found.codes.min())
    assert int(found.codes.max()) < most
    # The code of zero is rounded, too, so that values at an edge may be another half away.
    half = found.scales.repeat_interleave(found.group_size, dim=1) / 2 * (1 + rounding.has_zeros)
    assert ((found.dequantize() - weight).abs() <= half * 1.001).all()


def test_scales_of_groups_are_float16_where_it_has_all_its_bits():
    weight = random(9, 64)
    weight[3, :32] *= 1e-5
    scales = quantize(weight, Rounding(4, 32)).scales
    is_narrow = scales.half().float() == scales
    assert is_narrow.sum() == scales.numel() - 1
    assert not is_narrow[3, 0]


def test_zeros_are_subtracted_group_by_group():
    codes = torch.tensor([[-8, 7, 1, 2]], dtype=torch.int8)
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[-8, 1]], dtype=torch.int8)
    found = QuantizedWeight(Rounding(4, 2, has_zeros=True), codes, scales, zeros)
    assert found.dequantize().tolist() == [[0.0, 7.5, 0.0, 2.0]]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_group_of_zeros_stays_zero(rounding):
    assert not quantize(torch.zeros(3, 64), rounding).dequantize().any()


def test_concatenated_weights_have_the_outputs_of_their_parts():
    weights = [random(3, 64), random(5, 64)]
    for parts in (
        weights,
        [quantize(weight, Rounding(4, 32)) for weight in weights],
        [quantize(weight, Rounding(4, 32, has_zeros=True)) for weight in weights],
        [Fp8Weight(weight.to(FP8), weight[:, :1].abs()) for weight in weights],
    ):
        expected = torch.cat([as_numbers(part) for part in parts])
        assert torch.equal(as_numbers(concatenated(parts)), expected)


def test_weights_that_can_share_a_product_have_one_form():
    weight = random(3, 64)
    four = quantize(weight, Rounding(4, 32))
    others = [weight, quantize(weight, Rounding(8)), quantize(weight, Rounding(4, 64))]
    assert form_of(four) == form_of(quantize(random(5, 64), Rounding(4, 32)))
    assert all(form_of(other) != form_of(four) for other in others)


def test_packed_codes_are_what_is_counted():
    assert quantize(random(9, 64), Rounding(4, 32)).nbytes == 9 * 32 + 9 * 2 * 4
