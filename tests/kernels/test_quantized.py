import pytest
import torch

from kernels.quantized import QuantizedWeight, Rounding, quantize

ROUNDINGS = [Rounding(4, 32), Rounding(4, 8), Rounding(8), Rounding(8, 16)]


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_rounded_weight_is_within_half_a_code_of_the_original(rounding):
    weight = random(9, 64)
    found = quantize(weight, rounding)
    assert found.codes.abs().max() <= 2 ** (rounding.bits - 1) - 1
    half = found.scales.repeat_interleave(found.group_size, dim=1) / 2
    assert ((found.dequantize() - weight).abs() <= half * 1.001).all()


def test_zeros_are_subtracted_group_by_group():
    codes = torch.tensor([[-8, 7, 1, 2]], dtype=torch.int8)
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[-8, 1]], dtype=torch.int8)
    found = QuantizedWeight(Rounding(4, 2, has_zeros=True), codes, scales, zeros)
    assert found.dequantize().tolist() == [[0.0, 7.5, 0.0, 2.0]]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_group_of_zeros_stays_zero(rounding):
    assert not quantize(torch.zeros(3, 64), rounding).dequantize().any()


def test_concatenated_weights_have_the_outputs_of_their_parts():
    parts = [quantize(random(n, 64), Rounding(4, 32)) for n in (3, 5)]
    found = QuantizedWeight.concatenate(parts).dequantize()
    assert torch.equal(found, torch.cat([part.dequantize() for part in parts]))


def test_packed_codes_are_what_is_counted():
    assert quantize(random(9, 64), Rounding(4, 32)).nbytes == 9 * 32 + 9 * 2 * 4
