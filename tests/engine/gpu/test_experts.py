"""Experts of every form of weights compute what their numbers mean, and are placed one by one."""

import weakref
from dataclasses import replace

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.gpu.experts import ExpertMlp
from engine.gpu.linear import Linears
from engine.models.checkpoint import ExpertWeights
from engine.models.experts import Experts
from kernels import reference
from kernels.packed import pack
from kernels.quantized import Rounding, as_numbers
from kernels.routing import choose_experts
from tests.engine.gpu.test_linear import in_form, in_fp8

ABOUT = Experts(count=5, per_token=2, width=32, norms_weights=True)
HIDDEN = 64
INT4 = Rounding(4, 32)


@pytest.fixture(autouse=True)
def numbers():
    torch.manual_seed(4)


def random_experts(forms):
    """Gate, up and down of each expert, in the form of this expert."""
    shapes = (ABOUT.width, HIDDEN), (ABOUT.width, HIDDEN), (HIDDEN, ABOUT.width)
    return [
        tuple(in_form(torch.randn(shape) / shape[1] ** 0.5, form) for shape in shapes)
        for form in forms
    ]


def make(experts, quantization=None):
    router = torch.randn(ABOUT.count, HIDDEN) / 8
    linears = Linears(torch.device("cpu"), torch.float32, reference, quantization)
    mlp = ExpertMlp(ABOUT, ExpertWeights(router, iter(experts)), linears, "silu")
    return router, mlp


def meant(router, experts, x):
    """The sum over each token's experts, one by one."""
    chosen, weights = choose_experts(x @ router.T, ABOUT.per_token, norms_weights=True)
    total = torch.zeros_like(x)
    for token, row in enumerate(x):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up, down = map(as_numbers, experts[expert])
            gated = torch.nn.functional.silu(gate @ row) * (up @ row)
            total[token] += weight * (down @ gated)
    return total


def check(experts, quantization=None, means=None):
    """Check that a layer computes what its experts' numbers mean, or those of `means`."""
    router, mlp = make(experts, quantization)
    x = torch.randn(9, HIDDEN)
    torch.testing.assert_close(mlp(x), meant(router, means or experts, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "quantization"),
    [
        (torch.Tensor, None),
        (torch.Tensor, "fp8"),
        (in_fp8, None),
        (INT4, None),
        (Rounding(4, 32, has_zeros=True), "fp8"),
        (Rounding(8), None),
        (Rounding(4, 8), None),
    ],
    ids=["dense", "rounded to FP8", "FP8", "4 bits", "4 bits, zeros", "8 bits", "odd groups"],
)
def test_every_form_of_weights_computes_what_its_numbers_mean(form, quantization):
    experts = random_experts([form] * ABOUT.count)
    is_rounded = form is torch.Tensor and quantization
    check(experts, quantization, [tuple(map(in_fp8, e)) for e in experts] if is_rounded else None)


@pytest.mark.parametrize("form", [INT4, Rounding(8, 64)], ids=str)
@pytest.mark.parametrize("wide", [[0], [3], [1, 4]])
def test_one_experts_scales_may_need_more_bits_than_those_of_others(form, wide):
    experts = random_experts([form] * ABOUT.count)
    for expert in wide:
        experts[expert] = tuple(replace(own, scales=own.scales * 1.001) for own in experts[expert])
    kinds = {pack(own[0]).scales.dtype for own in experts}
    assert kinds == {torch.float16, torch.float32}
    check(experts)


@pytest.mark.parametrize("place", [0, 2])
def test_an_expert_in_another_form_is_refused_by_its_number(place):
    experts = random_experts([INT4] * ABOUT.count)
    experts[3] = list(experts[3])
    experts[3][place] = in_form(as_numbers(experts[3][place]), Rounding(8))
    with pytest.raises(UnsupportedModel, match=r"expert 3 .*take device cpu"):
        make(experts)


def test_experts_that_have_their_place_are_not_kept():
    living = weakref.WeakSet()

    def read():
        for own in random_experts([torch.Tensor] * ABOUT.count):
            assert len(living) <= 3, "weights of an expert before the last one are still there"
            copies = tuple(weight.clone() for weight in own)
            living.update(copies)
            yield copies
            del copies

    make(read())
    assert not living
