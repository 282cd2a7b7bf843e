"""Adapters cut over ranks: what the ranks' kernels write, added up, is what one rank's do."""

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from kernels import reference
from kernels.gpu import ops
from kernels.work import Delta, Site
from tests.kernels.lora_cases import (
    MIXES,
    Cut,
    LoRACase,
    assert_loses_no_more,
    make_case,
    randn,
    rank_patterns,
)

# 584: a second chunk, much shorter than the first, and no whole number of steps.
QKV = Site(layer=1, projections=(0, 1, 2), in_features=584, out_features=(136, 40, 40))
# Of 8 ranks each has 146: 4 chunks of one rank, and one of each.
DOWN = Site(layer=0, projections=(6,), in_features=1168, out_features=(48,))
GATE_UP = Site(layer=1, projections=(4, 5), in_features=72, out_features=(272, 272))
SITES = {"cut by outputs": QKV, "cut by inputs": DOWN}
SIZES = (2, 4, 8)


@pytest.fixture(autouse=True)
def empty_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case_of(
    site: Site,
    slots: Sequence[int],
    dtype: torch.dtype = torch.float32,
    cut: Cut | None = None,
    patterns: Sequence[Mapping[tuple[int, int], int]] | None = None,
    **options: int,
) -> LoRACase:
    features = {
        projection: (site.in_features, width)
        for projection, width in zip(site.projections, site.out_features, strict=True)
    }
    return make_case(patterns or rank_patterns(), slots, features, dtype, cut=cut, **options)


class Ranks:
    """All ranks of a site, one after the other; their cases own memory that work points to."""

    def __init__(self, site: Site, size: int, slots: Sequence[int], *dtype, **options) -> None:
        self.site = site
        self.cuts = [Cut(index, size, site.projections[0] not in (3, 6)) for index in range(size)]
        self.cases = [case_of(site, slots, *dtype, cut=cut, **options) for cut in self.cuts]

    def planes(self, kernels, x: torch.Tensor) -> list[torch.Tensor]:
        """Of each rank, one plane."""
        return [
            kernels.shrink(cut.inputs(x), case.work, cut.site(self.site), is_summed=True).planes
            for cut, case in zip(self.cuts, self.cases, strict=True)
        ]

    def deltas(self, kernels, x: torch.Tensor) -> list[Delta]:
        """Of each rank, what it expands: the planes of all."""
        total = add(self.planes(kernels, x))
        return [
            Delta(total, case.work, cut.site(self.site))
            for cut, case in zip(self.cuts, self.cases, strict=True)
        ]

    def split(self, y: torch.Tensor) -> list[torch.Tensor]:
        """y as the ranks have it, [T, sum of their out_features]."""
        whole = y.split(self.site.out_features, dim=1)
        return [
            torch.cat([part[:, cut.of(part.shape[1])] for part in whole], dim=1)
            for cut in self.cuts
        ]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What `split` took apart."""
        widths = self.cuts[0].site(self.site).out_features
        by_rank = [part.split(widths, dim=1) for part in parts]
        return torch.cat([torch.cat(own, dim=1) for own in zip(*by_rank, strict=True)], dim=1)

    def expanded(self, kernels, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y with the adapters' part."""
        parts = self.split(y)
        for part, delta in zip(parts, self.deltas(kernels, x), strict=True):
            kernels.expand(part, delta)
        return self.joined(parts)


def add(planes: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(planes[1:], planes[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
def test_planes_of_all_ranks_add_up_to_those_of_one(site, size):
    slots, dtype = MIXES["distinct"], torch.float16
    x = randn(len(slots), site.in_features, dtype=dtype)
    case = case_of(site, slots, dtype)
    whole = ops.shrink(x, case.work, site, is_summed=True).planes
    total = add(Ranks(site, size, slots, dtype).planes(ops, x))
    assert torch.equal(total.isnan(), whole.isnan())
    assert torch.allclose(total, whole, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("mix", ["one token", "distinct", "with base rows", "base rows only"])
@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
def test_a_ranks_planes_are_those_of_the_reference_and_nothing_else_is_written(site, mix, size):
    slots = MIXES[mix]
    x = randn(len(slots), site.in_features, dtype=torch.float16)
    ranks = Ranks(site, size, slots, torch.float16)
    both = (ranks.planes(kernels, x) for kernels in (ops, reference))
    for ours, torchs in zip(*both, strict=True):
        assert torch.equal(ours.isnan(), torchs.isnan())
        assert torch.allclose(ours, torchs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rank_rows_that_lie_on_other_ranks_are_zero_whatever_the_input_is():
    x = randn(3, QKV.in_features)
    x[1, 5] = torch.inf
    ranks = Ranks(QKV, 4, [3] * 3)
    for kernels in (ops, reference):
        for index, planes in enumerate(ranks.planes(kernels, x)):
            rows = planes[0].view(3, -1, 8)[:, :2]
            others = [row for row in range(8) if row // 2 != index]
            assert (rows[:, :, others] == 0).all()
            assert (rows[:, :, [2 * index, 2 * index + 1]] != 0).all()


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 2), (torch.float16, 4), (torch.float16, 8)]
)
@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
def test_ranks_together_lose_no_more_than_torch_on_one(site, dtype, size):
    slots = MIXES["with base rows"] + [1] * 3
    case = case_of(site, slots, dtype)
    y = randn(len(slots), sum(site.out_features), dtype=dtype, seed=2)
    x = randn(len(slots), site.in_features, dtype=dtype)
    torchs = y.clone()
    reference.expand(torchs, reference.shrink(x, case.work, site))
    ours = Ranks(site, size, slots, dtype).expanded(ops, y, x)
    assert_loses_no_more(ours, torchs, case.exact(y, x, site))


def test_blocks_of_64_rows_mean_the_same():
    slots = [2] * 3 + [1] * 71 + [-1] + [0] * 5
    y, x = randn(len(slots), 216, seed=2), randn(len(slots), QKV.in_features)
    exact = case_of(QKV, slots).exact(y, x, QKV)
    ranks = Ranks(QKV, 4, slots, block_rows=64)
    assert_loses_no_more(ranks.expanded(ops, y, x), ranks.expanded(reference, y, x), exact)


@pytest.mark.parametrize("size", [2, 8])
def test_what_adapters_add_before_an_activation_is_cut_with_its_columns(size):
    slots = MIXES["zipf"]
    y, x = randn(len(slots), 544, seed=2), randn(len(slots), 72)
    gate, up = case_of(GATE_UP, slots).exact(y, x, GATE_UP).chunk(2, dim=1)
    whole, ranks = silu(gate) * up, Ranks(GATE_UP, size, slots)
    deltas = ranks.deltas(ops, x)
    for cut, part, delta in zip(ranks.cuts, ranks.split(y), deltas, strict=True):
        ours, torchs = ops.silu_mul(part, delta), reference.silu_mul(part, delta)
        assert_loses_no_more(ours, torchs, whole[:, cut.of(272)])


def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    slots = [0] * 2 + [1] * 17 + [2]
    y = randn(len(slots), 216, dtype=torch.float16, seed=2)
    x = randn(len(slots), QKV.in_features, dtype=torch.float16)
    together = Ranks(QKV, 2, slots, torch.float16).expanded(ops, y, x)
    for token in (1, 18, 19):
        rows = slice(token, token + 1)
        alone = Ranks(QKV, 2, slots[rows], torch.float16)
        assert torch.equal(alone.expanded(ops, y[rows], x[rows]), together[rows])


@given(
    ranks=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    size=st.sampled_from(SIZES),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    eighths=st.integers(1, 90),
    projections=st.sampled_from([(0, 1, 2), (3,), (4, 5), (6,)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_adapters_on_any_number_of_ranks_mean_what_they_mean_on_one(
    ranks, size, widths, eighths, projections, seed
):
    out_features = tuple(8 * width for width in (widths * 2)[: len(projections)])
    site = Site(0, projections, 8 * eighths, out_features)
    slots = [-1, *(slot for slot in range(len(ranks)) for _ in range(2))]
    y = randn(len(slots), sum(site.out_features), seed=seed)
    x = randn(len(slots), site.in_features, seed=seed + 1)
    patterns = [{(0, p): rank + i for i, p in enumerate(projections)} for rank in ranks]
    options = {"patterns": patterns, "num_layers": 1, "seed": seed}
    whole, of_ranks = case_of(site, slots, **options), Ranks(site, size, slots, **options)
    planes = reference.shrink(x, whole.work, site, is_summed=True).planes
    total = add(of_ranks.planes(reference, x))
    assert torch.allclose(total, planes, rtol=1e-4, atol=1e-5, equal_nan=True)
    found = of_ranks.expanded(reference, y, x)
    assert torch.allclose(found.double(), whole.exact(y, x, site), rtol=1e-3, atol=1e-4)
