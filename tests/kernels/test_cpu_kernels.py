"""All CPU kernels against the formulas in float64, and against themselves in other batches."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.cpu.errors import Unavailable
from kernels.cpu.native import NativeKernels
from kernels.cpu.plain import AttentionShape, CpuKernels
from kernels.work import Site
from tests.kernels.cpu_cases import (
    LAYER,
    LAYERS,
    Formula,
    Part,
    Sequences,
    make_norms,
    make_shape,
    randn,
    runs_of,
)
from tests.kernels.lora_cases import MIXES, assert_loses_no_more, make_case, rank_patterns
from tests.soak import soak

ROWS = [1, 3, 17, 200, *soak(2, 7, 16, 33)]
EPS = 1e-5


KERNELS = {"torch": 0, "C": 1, "C, two threads": 2}
"""Threads of the kernels in C, by the name of what is tested; 0 for those of torch."""


@pytest.fixture(params=KERNELS.values(), ids=KERNELS)
def threads(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def garbage(threads: int) -> float:
    """Fills memory that no row sees; it is finite for torch, which multiplies it by 0."""
    return torch.nan if threads else 1e4


@pytest.fixture
def make_kernels(threads: int) -> Callable[[AttentionShape], CpuKernels]:
    def make(shape: AttentionShape) -> CpuKernels:
        try:
            return NativeKernels(shape, threads) if threads else CpuKernels(shape)
        except Unavailable as reason:
            pytest.skip(str(reason))

    return make


@pytest.fixture
def kernels(make_kernels: Callable[[AttentionShape], CpuKernels]) -> CpuKernels:
    """Kernels with a small attention shape, for tests of the other operations."""
    return make_kernels(make_shape(2, 1, 16))


IN_C = pytest.mark.parametrize("threads", [1, 2], indirect=True)


# ---- norm, activation, embedding ----


def norm_formula(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [16, 100, *soak(576)])
def test_norms_are_their_formula_and_the_residual_is_added_in_place(kernels, rows, dim):
    x, delta, weight = randn(rows, dim), randn(rows, dim, seed=2), randn(dim, seed=3)
    before, total = x.clone(), x + delta
    found = kernels.rms_norm(x, weight, EPS)
    exact = norm_formula(x.double(), weight.double())
    assert_loses_no_more(found, norm_formula(x, weight), exact)
    assert torch.equal(x, before)
    found = kernels.rms_norm(x, weight, EPS, delta)
    exact = norm_formula(total.double(), weight.double())
    assert_loses_no_more(found, norm_formula(total, weight), exact)
    assert torch.equal(x, total)


ACTIVATIONS = {
    "silu": lambda gate: gate / (1 + (-gate).exp()),
    "gelu_tanh": lambda gate: gelu(gate, approximate="tanh"),
}
FAR = [-3e38, -1e30, -1e4, -100.0, -89.0, -88.0, -40.0, 0.0, 40.0, 88.0, 100.0, 3e38]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [16, 100, *soak(576)])
def test_an_activation_is_its_formula_and_far_from_zero_the_gate_or_zero(kernels, rows, dim, name):
    gate_up = 10 * randn(rows, 2 * dim)
    gate_up[0, : len(FAR)], gate_up[0, dim : dim + len(FAR)] = torch.tensor(FAR), 1.0
    torchs, exact = (
        ACTIVATIONS[name](gate) * up
        for gate, up in (x.chunk(2, dim=1) for x in (gate_up, gate_up.double()))
    )
    found = kernels.gated(gate_up, name)
    assert torch.equal(found[0, len(FAR) - 2 : len(FAR)], torch.tensor([100.0, 3e38]))
    near = exact.abs() < 1e3
    assert_loses_no_more(found[near], torchs[near], exact[near])


def test_what_is_not_finite_stays_so_and_in_its_row(kernels):
    for bad in (torch.nan, torch.inf):
        x, weight = randn(5, 48), randn(48, seed=2)
        good = kernels.rms_norm(x, weight, EPS), kernels.gated(x, "silu")
        x[3, 7] = bad
        for found, expected in zip(
            (kernels.rms_norm(x, weight, EPS), kernels.gated(x, "silu")), good, strict=True
        ):
            assert not found[3].isfinite().all()
            rest = [0, 1, 2, 4]
            assert torch.equal(found[rest], expected[rest])


def test_an_embedding_has_the_rows_of_its_weight(kernels):
    weight, ids = randn(70, 48), torch.tensor([69, 0, 33, 0])
    head = kernels.linear(weight.clone(), None)
    assert torch.equal(kernels.embedding(weight.clone(), None)(ids), weight[ids])
    assert torch.equal(kernels.embedding(weight.clone(), head)(ids), weight[ids])


# ---- LoRA ----

WIDTHS = {0: (72, 64), 1: (72, 24), 2: (72, 24), 3: (64, 72), 4: (72, 100), 5: (72, 100)}
FEATURES = {**WIDTHS, 6: (100, 72)}
RUNS = {**MIXES, "odd": [s for s, n in enumerate((1, 2, 3, 7, 17)) for _ in range(n)]}
RUNS["long"] = [-1] * 5 + [1] * 133 + [3] * 16 + [4] * 33


def sites():
    for layer in range(2):
        for projections in ((0, 1, 2), (3,), (4, 5), (6,)):
            outs = tuple(FEATURES[p][1] for p in projections)
            yield Site(layer, projections, FEATURES[projections[0]][0], outs, 7)


@pytest.mark.parametrize("name", RUNS)
def test_adapters_are_added_to_their_tokens_and_to_no_others(kernels, name):
    # The case has ranks from 1 to 64, missing modules, and NaN around every tile.
    case = make_case(rank_patterns(), RUNS[name], FEATURES, torch.float32)
    runs = runs_of(case)
    on_base = torch.tensor(RUNS[name]) < 0
    for site in sites():
        x = randn(len(on_base), site.in_features) / site.in_features**0.5
        x[on_base] = torch.nan
        before = randn(len(on_base), sum(site.out_features), seed=2)
        found = before.clone()
        kernels.add_lora(found, x, site, runs)
        assert torch.equal(found[on_base], before[on_base])
        torchs = case.added(before, x, site)
        exact = case.exact(before, x, site)
        if not on_base.all():
            assert_loses_no_more(found[~on_base], torchs[~on_base], exact[~on_base])


# ---- attention ----

SHAPES = [(2, 2, 16), (9, 3, 64), (8, 2, 128)]
LENGTHS = [1, 2, 17, 33, 150]
# The first step has chunks, which the decodes need; the second has decodes and chunks.
STEPS: list[list[Part]] = [
    [(4, 0, 7), (3, 0, 16), (2, 0, 16)],
    [(2, 16, 17), (0, 0, 1), (4, 7, 140), (1, 0, 1), (3, 16, 33)],
    [(1, 1, 2), (4, 140, 150)],
]


WAYS = [(None, 16, True), (24, 32, False)]
"""(window, block size, whether heads are normed)"""


@pytest.mark.parametrize(
    ("window", "block_size", "with_norms"),
    [
        *WAYS,
        *soak(
            *(
                way
                for way in product([None, 1, 24, 1000], [16, 32], [True, False])
                if way not in WAYS
            )
        ),
    ],
)
@pytest.mark.parametrize("heads", SHAPES)
def test_attention_is_its_formula_and_touches_nothing_else(
    make_kernels, garbage, heads, block_size, window, with_norms
):
    shape = make_shape(*heads, block_size)
    norms = make_norms(shape.head_dim) if with_norms else None
    sequences = Sequences(shape, LENGTHS, garbage)
    kernels, formula = make_kernels(shape), Formula(shape, window, norms)
    exact = [formula(qkv.double()) for qkv in sequences.qkv]
    torchs = [formula(qkv) for qkv in sequences.qkv]
    for parts in STEPS:
        outs = sequences.step(kernels, parts, window, norms)
        for (row, first, end), out in zip(parts, outs, strict=True):
            assert_loses_no_more(out, torchs[row][first:end], exact[row][first:end])
    other_layers = sequences.kv.view(len(sequences.kv), LAYERS, -1)[:, :LAYER]
    behind = sequences.memory[:, sequences.kv.shape[1] :]
    for untouched in (other_layers, behind, sequences.memory[sequences.spare]):
        expected = torch.full_like(untouched, garbage)
        torch.testing.assert_close(untouched, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, *soak(torch.inf)])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_token_that_is_not_finite_is_nan_and_its_cache_finite(make_kernels, garbage, part, bad):
    shape = make_shape(9, 3, 64)
    kernels, formula = make_kernels(shape), Formula(shape)
    sequences = Sequences(shape, [50, 21], garbage)
    clean = [qkv.clone() for qkv in sequences.qkv]
    first = 9 * 64 if part == "key" else 12 * 64
    sequences.qkv[0][19, first + 70] = bad
    exact, torchs = ([formula(qkv.to(t)) for qkv in clean] for t in (torch.float64, torch.float32))
    for parts in ([(0, 0, 40), (1, 0, 21)], [(0, 40, 49)], [(0, 49, 50), (1, 20, 21)]):
        for (row, first, end), out in zip(parts, sequences.step(kernels, parts), strict=True):
            # Later tokens of the same sequence may be wrong, as the request is.
            good = min(end, 19) if row == 0 else end
            if first < good:
                found = out[: good - first]
                assert_loses_no_more(found, torchs[row][first:good], exact[row][first:good])
            is_nan = [row == 0 and token == 19 for token in range(first, end)]
            assert out.isfinite().all(dim=1).tolist() == [not it for it in is_nan]
            assert out.isnan().all(dim=1).tolist() == is_nan


@pytest.mark.parametrize(
    "shape",
    [
        replace(make_shape(4, 2, 32), scale=0.6),
        make_shape(4, 2, 32, rotary_dim=20),
        replace(make_shape(4, 2, 32, rotary_dim=2), scale=0.6),
        replace(make_shape(4, 2, 32), softcap=1.5),
    ],
    ids=["scale", "partial rotation", "both", "soft cap"],
)
def test_a_shape_may_have_a_scale_a_partial_rotation_and_a_soft_cap(make_kernels, garbage, shape):
    sequences = Sequences(shape, [37], garbage)
    (found,) = sequences.step(make_kernels(shape), [(0, 0, 37)])
    expected = Formula(shape)(sequences.qkv[0].double())
    assert (found - expected).abs().max() < 1e-5


def test_each_layer_has_the_rope_that_it_names(make_kernels, garbage):
    first = make_shape(4, 2, 32)
    second = replace(first, cos=first.cos[:, ::3], sin=first.sin[:, ::3])
    cos = torch.cat((first.cos[:, :170], second.cos[:, :170]))
    sin = torch.cat((first.sin[:, :170], second.sin[:, :170]))
    kernels = make_kernels(replace(first, cos=cos, sin=sin))
    for rope, shape in enumerate((first, second)):
        sequences = Sequences(shape, [37], garbage)
        (found,) = sequences.step(kernels, [(0, 0, 37)], rope=rope)
        expected = Formula(shape)(sequences.qkv[0].double())
        assert (found - expected).abs().max() < 1e-5


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation of torch returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.elements = max(self.elements, *(each.numel() for each in tensors), 0)
        return out


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_long_prompt_makes_no_matrix_of_all_its_scores(make_kernels, garbage, softcap):
    shape, length = replace(make_shape(1, 1, 16), softcap=softcap), 500
    sequences = Sequences(shape, [length], garbage)
    with LargestTensor() as largest:
        (found,) = sequences.step(make_kernels(shape), [(0, 0, length)])
    assert largest.elements <= 0.6 * length**2
    assert (found - Formula(shape)(sequences.qkv[0].double())).abs().max() < 1e-5


# ---- a row's bits do not depend on other rows ----


def chunked(length, size):
    """Bounds of the pieces of [0, length) of `size` each."""
    return list(pairwise([*range(0, length, size), length]))


@IN_C
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (24, 2.0)])
@pytest.mark.parametrize("heads", SHAPES)
def test_a_token_attends_to_the_same_bits_in_any_chunk_and_company(
    make_kernels, garbage, heads, window, softcap
):
    shape, length = replace(make_shape(*heads), softcap=softcap), 150
    kernels = make_kernels(shape)
    alone = Sequences(shape, [length], garbage)
    (expected,) = alone.step(kernels, [(0, 0, length)], window)
    for size in (1, 7, 32, 100):
        sequences = Sequences(shape, [33, length, 7, 64], garbage)
        pieces = []
        for number, (first, end) in enumerate(chunked(length, size)):
            parts = [(1, first, end)]
            if number < 32:
                parts = [(0, number, number + 1), *parts]
            if number % 3 == 0:
                parts += [(3, 0, 64), (2, 0, 7)]
            outs = sequences.step(kernels, parts, window)
            pieces.append(outs[parts.index((1, first, end))])
        assert torch.equal(torch.cat(pieces), expected), f"in chunks of {size}"


@IN_C
@pytest.mark.parametrize("window", [24, *soak(None)])
@pytest.mark.parametrize("heads", [*SHAPES[1:], *soak((SHAPES[0],), ((14, 2, 64),))])
def test_a_token_verified_among_drafts_has_the_bits_of_one_decoded_alone(
    make_kernels, garbage, heads, window
):
    shape, lengths = make_shape(*heads), [9, 33, 63, 133, 301]
    kernels, sequences = make_kernels(shape), Sequences(shape, lengths, garbage)
    starts = [length - 8 for length in lengths]
    sequences.step(kernels, [(row, 0, start) for row, start in enumerate(starts)], window)
    decoded: list[list[torch.Tensor]] = [[] for _ in lengths]
    for i in range(8):
        parts = [(row, start + i, start + i + 1) for row, start in enumerate(starts)]
        for row, out in enumerate(sequences.step(kernels, parts, window)):
            decoded[row].append(out)
    for i in range(8):
        # The rows of a step have different numbers of tokens, and each has every number once.
        parts = [(row, n - 1 - (row + i) % 8, n) for row, n in enumerate(lengths)]
        outs = sequences.step(kernels, parts, window)
        for (row, first, end), out in zip(parts, outs, strict=True):
            expected = torch.cat(decoded[row][first - end :])
            assert torch.equal(out, expected), f"{end - first} tokens of {end}"


@IN_C
def test_a_row_of_every_other_operation_has_the_same_bits_in_any_company(kernels):
    case = make_case(rank_patterns(), [1] * 150, FEATURES, torch.float32)
    site = Site(1, (4, 5), 72, (100, 100), 7)
    x, y = randn(150, 72), randn(150, 200, seed=2)
    weight = randn(72, seed=3)

    def run(first, end):
        """LoRA, norm and activation of some of the rows."""
        bounds = torch.tensor([[0, end - first]], dtype=torch.int32)
        total, residual = y[first:end].clone(), x[first:end].clone()
        kernels.add_lora(total, x[first:end], site, replace(runs_of(case), bounds=bounds))
        normed = kernels.rms_norm(residual, weight, EPS, x[first:end])
        gated = kernels.gated(total, "silu"), kernels.gated(total, "gelu_tanh")
        return torch.cat((total, normed, *gated), dim=1)

    expected = run(0, 150)
    for size in (1, 2, 3, 7, 8, 17, 70):
        found = torch.cat([run(first, end) for first, end in chunked(150, size)])
        assert torch.equal(found, expected), f"of {size} rows"
