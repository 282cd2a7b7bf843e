"""Adapters cut over ranks: the ranks' kernels together add what one rank's kernels add."""

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
    reference_expanded,
)
from tests.soak import soak

# 584 features have a second chunk, much shorter than the first, and no whole number of steps.
QKV = Site(layer=1, projections=(0, 1, 2), in_features=584, out_features=(144, 48, 48))
# Each of 2 ranks has 588 inputs, two chunks; each of 6 has 196.
DOWN = Site(layer=0, projections=(6,), in_features=1176, out_features=(43,))
GATE_UP = Site(layer=1, projections=(4, 5), in_features=72, out_features=(272, 272))
SITES = {"cut by outputs": QKV, "cut by inputs": DOWN}
SIZES = (2, 3, 4, 6)


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
    """All ranks of a site, one after the other; their cases own the memory that work points to."""

    def __init__(self, site: Site, size: int, slots: Sequence[int], *dtype, **options) -> None:
        self.site = site
        self.by_outputs = site.projections[0] not in (3, 6)
        self.cuts = [Cut(index, size, self.by_outputs) for index in range(size)]
        self.cases = [case_of(site, slots, *dtype, cut=cut, **options) for cut in self.cuts]

    def deltas(self, kernels, x: torch.Tensor) -> list[Delta]:
        """The delta that each rank expands; no rank needs those of the others."""
        return [
            kernels.shrink(cut.inputs(x).contiguous(), case.work, cut.site(self.site))
            for cut, case in zip(self.cuts, self.cases, strict=True)
        ]

    def split(self, y: torch.Tensor) -> list[torch.Tensor]:
        """y split for the ranks: into their outputs, or into numbers that add up to it."""
        if not self.by_outputs:
            return [y.clone(), *(torch.zeros_like(y) for _ in self.cuts[1:])]
        whole = y.split(self.site.out_features, dim=1)
        return [torch.cat([cut.outputs(part) for part in whole], dim=1) for cut in self.cuts]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor whose parts `split` returned."""
        if not self.by_outputs:
            return sum(part.float() for part in parts).to(parts[0].dtype)
        widths = self.cuts[0].site(self.site).out_features
        by_rank = [part.split(widths, dim=1) for part in parts]
        return torch.cat([torch.cat(own, dim=1) for own in zip(*by_rank, strict=True)], dim=1)

    def expanded(self, kernels, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y plus the adapters' part."""
        parts = self.split(y)
        for part, delta in zip(parts, self.deltas(kernels, x), strict=True):
            kernels.expand(part, delta)
        return self.joined(parts)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 3), *soak((torch.float32, 2), (torch.float16, 4), (torch.float16, 6))],
)
@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
def test_ranks_together_lose_no_more_than_torch_on_one(site, dtype, size):
    slots = MIXES["with base rows"] + [1] * 3
    case = case_of(site, slots, dtype)
    y = randn(len(slots), sum(site.out_features), dtype=dtype, seed=2)
    x = randn(len(slots), site.in_features, dtype=dtype)
    ours = Ranks(site, size, slots, dtype).expanded(ops, y, x)
    assert_loses_no_more(ours, reference_expanded(y, x, case, site), case.exact(y, x, site))


def test_blocks_of_64_rows_mean_the_same():
    slots = [2] * 3 + [1] * 71 + [-1] + [0] * 5
    y, x = randn(len(slots), 240, seed=2), randn(len(slots), QKV.in_features)
    exact = case_of(QKV, slots).exact(y, x, QKV)
    ranks = Ranks(QKV, 2, slots, block_rows=64)
    assert_loses_no_more(ranks.expanded(ops, y, x), ranks.expanded(reference, y, x), exact)


@pytest.mark.parametrize("size", [2, *soak(8)])
def test_what_adapters_add_before_an_activation_is_cut_with_its_columns(size):
    slots = MIXES["zipf"]
    y, x = randn(len(slots), 544, seed=2), randn(len(slots), 72)
    gate, up = case_of(GATE_UP, slots).exact(y, x, GATE_UP).chunk(2, dim=1)
    whole, ranks = silu(gate) * up, Ranks(GATE_UP, size, slots)
    deltas = ranks.deltas(ops, x)
    for cut, part, delta in zip(ranks.cuts, ranks.split(y), deltas, strict=True):
        ours, torchs = ops.silu_mul(part, delta), reference.silu_mul(part, delta)
        assert_loses_no_more(ours, torchs, whole[:, cut.of(272)])


@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(site):
    slots = [0] * 2 + [1] * 17 + [2]
    y = randn(len(slots), sum(site.out_features), dtype=torch.float16, seed=2)
    x = randn(len(slots), site.in_features, dtype=torch.float16)
    together = Ranks(site, 2, slots, torch.float16).expanded(ops, y, x)
    for token in (1, 18, 19):
        rows = slice(token, token + 1)
        alone = Ranks(site, 2, slots[rows], torch.float16)
        assert torch.equal(alone.expanded(ops, y[rows], x[rows]), together[rows])


@given(
    ranks=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    size=st.sampled_from(SIZES),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    twelfths=st.integers(1, 90),
    projections=st.sampled_from([(0, 1, 2), (3,), (4, 5), (6,)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_any_adapters_on_any_number_of_ranks_mean_what_they_mean_on_one(
    ranks, size, widths, twelfths, projections, seed
):
    out_features = tuple(12 * width for width in (widths * 2)[: len(projections)])
    site = Site(0, projections, 12 * twelfths, out_features)
    slots = [-1, *(slot for slot in range(len(ranks)) for _ in range(2))]
    y = randn(len(slots), sum(site.out_features), seed=seed)
    x = randn(len(slots), site.in_features, seed=seed + 1)
    patterns = [{(0, p): rank + i for i, p in enumerate(projections)} for rank in ranks]
    options = {"patterns": patterns, "num_layers": 1, "seed": seed}
    whole, of_ranks = case_of(site, slots, **options), Ranks(site, size, slots, **options)
    found = of_ranks.expanded(reference, y, x)
    assert torch.allclose(found.double(), whole.exact(y, x, site), rtol=1e-3, atol=1e-4)
