"""Rotary embedding and KV writes in Triton's interpreter, against the reference and float64."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from kernels import elementwise, reference
from kernels.gpu import lora, rope
from kernels.reference import FP8, FP8_MAX
from kernels.work import Delta, HeadNorms, Site
from tests.kernels.lora_cases import (
    MIXES,
    LoRACase,
    assert_loses_no_more,
    make_case,
    randn,
    rank_patterns,
)
from tests.kernels.lora_mixes import MIXES_AND_DTYPES
from tests.soak import soak

Q_HEADS, KV_HEADS, BLOCK_SIZE, HIDDEN = 3, 2, 4, 72
HEADS = Q_HEADS + 2 * KV_HEADS


@pytest.fixture(autouse=True)
def empty_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Step:
    """Inputs of rope_store_kv; `run` works on copies, and returns q, the layer's KV and flags."""

    qkv: torch.Tensor
    kv: torch.Tensor
    turns: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor
    slots: torch.Tensor
    finite: torch.Tensor
    norms: HeadNorms | None = None

    def run(self, rope_store_kv, delta: Delta | None = None, kv_scales=(1.0, 1.0)):
        qkv, kv, finite = self.qkv.clone(), self.kv.clone(), self.finite.clone()
        places = self.positions, self.slots, finite
        rope_store_kv(qkv, kv, *self.turns, *places, self.norms, delta, kv_scales)
        return qkv[:, : Q_HEADS * kv.shape[-1]], kv, finite

    def exact(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(q, k and v) in float64, [T, heads, head_dim] each."""
        heads = qkv.double().view(len(qkv), HEADS, -1).clone()
        turned, v = heads[:, : Q_HEADS + KV_HEADS], heads[:, Q_HEADS + KV_HEADS :]
        if self.norms is not None:
            weights = [self.norms.q] * Q_HEADS + [self.norms.k] * KV_HEADS
            mean = turned.pow(2).mean(-1, keepdim=True)
            turned = turned * (mean + self.norms.eps).rsqrt() * torch.stack(weights).double()
        cos, sin = (table[self.positions].double() for table in self.turns)
        turned = elementwise.apply_rope(turned, cos, sin)
        return turned[:, :Q_HEADS], torch.cat((turned[:, Q_HEADS:], v), dim=1)


def make_step(
    num_tokens: int, dim: int, dtype: torch.dtype, kv_dtype=None, norms=False, rotary_dim=None
) -> Step:
    """Token t is stored at slot 2 t + 1 of a KV full of NaN, with other layers on both sides."""
    num_blocks = num_tokens // 2 + 1
    layers = torch.full((num_blocks, 3, 2, KV_HEADS, BLOCK_SIZE, dim), torch.nan)
    waves = torch.arange((rotary_dim or dim) // 2) * 2 / dim
    angles = torch.outer(torch.arange(50.0), 100.0**-waves)
    weights = 1 + randn(2, dim, dtype=dtype, seed=3) / 4
    return Step(
        qkv=randn(num_tokens, HEADS * dim, dtype=dtype, seed=2),
        kv=layers.to(kv_dtype or dtype)[:, 1],
        turns=(angles.cos(), angles.sin()),
        positions=(torch.arange(num_tokens) * 7 % 50).int(),
        slots=torch.arange(num_tokens).int() * 2 + 1,
        finite=torch.ones(num_tokens, dtype=torch.int32),
        norms=HeadNorms(*weights, eps=1e-5) if norms else None,
    )


def stored(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Heads of k, then of v, [T, 2 * kv heads, head_dim]."""
    place = slots.long()
    return kv.permute(0, 3, 1, 2, 4)[place // BLOCK_SIZE, place % BLOCK_SIZE].flatten(1, 2)


def assert_as_good(step: Step, ours, torchs, qkv: torch.Tensor, factor: float = 2) -> None:
    q, kv = step.exact(qkv)
    assert_loses_no_more(ours[0].view(q.shape), torchs[0].view(q.shape), q, factor)
    pairs = (stored(got[1], step.slots).float() for got in (ours, torchs))
    assert_loses_no_more(*pairs, kv, factor)
    assert torch.equal(ours[1].isnan(), torchs[1].isnan())
    assert torch.equal(ours[2], torchs[2])


def assert_fp8_near(ours: torch.Tensor, torchs: torch.Tensor) -> None:
    """Assert that values are at most one step apart, up to an eighth with 3 bits of mantissa."""
    # The interpreter forgets to carry where a value rounds up to a power of two.
    carries = torchs.frexp().mantissa.abs() == 0.5
    halved = carries & (ours == torchs / 2)
    assert (halved | ((ours - torchs).abs() <= torchs.abs() / 8 + 2**-9)).all()


def delta_case(slots: list[int], dim: int, dtype: torch.dtype, block_rows: int = 16):
    """(case, site, input of the projections)"""
    widths = (Q_HEADS * dim, KV_HEADS * dim, KV_HEADS * dim)
    site = Site(layer=1, projections=(0, 1, 2), in_features=HIDDEN, out_features=widths)
    features = {p: (HIDDEN, width) for p, width in enumerate(widths)}
    case = make_case(rank_patterns(), slots, features, dtype, block_rows=block_rows)
    return case, site, randn(len(slots), HIDDEN, dtype=dtype)


def run_both(step: Step, case: LoRACase, site: Site, x: torch.Tensor):
    ours = step.run(rope.rope_store_kv, lora.shrink(x, case.work, site))
    return ours, step.run(reference.rope_store_kv, reference.shrink(x, case.work, site))


def test_norms_may_have_more_bits_than_what_they_multiply():
    step = make_step(7, 16, torch.float16, norms=True)
    wide = HeadNorms(step.norms.q.float() + 1e-4, step.norms.k.float() + 1e-4, 1e-5)
    step = replace(step, norms=wide)
    ours, torchs = step.run(rope.rope_store_kv), step.run(reference.rope_store_kv)
    assert_as_good(step, ours, torchs, step.qkv)


@pytest.mark.parametrize(("dim", "rotary_dim"), [(80, 2), *soak((16, 12), (8, 6))])
def test_a_part_of_each_head_may_stay_as_it_is_with_norms_and_adapters(dim, rotary_dim):
    case, site, x = delta_case([0, 0, 1, -1, 2, 3, 3], dim, torch.float32)
    step = make_step(7, dim, torch.float32, norms=True, rotary_dim=rotary_dim)
    ours, torchs = run_both(step, case, site, x)
    for got, wanted in zip(ours, torchs, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5, equal_nan=True)
    plain = make_step(7, dim, torch.float32, rotary_dim=rotary_dim)
    ours, torchs = plain.run(rope.rope_store_kv), plain.run(reference.rope_store_kv)
    assert_as_good(plain, ours, torchs, plain.qkv)


@pytest.mark.parametrize(
    ("dtype", "norms"),
    [
        (torch.float32, False),
        (torch.float16, True),
        (torch.bfloat16, True),
        *soak((torch.float32, True), (torch.float16, False), (torch.bfloat16, False)),
    ],
)
@pytest.mark.parametrize(
    ("num_tokens", "dim"), [(1, 64), (18, 80), (3, 256), *soak((7, 16), (33, 8))]
)
def test_it_loses_no_more_than_torch(num_tokens, dim, norms, dtype):
    step = make_step(num_tokens, dim, dtype, norms=norms)
    ours, torchs = step.run(rope.rope_store_kv), step.run(reference.rope_store_kv)
    # The interpreter truncates to bfloat16.
    factor = 4 if dtype == torch.bfloat16 else 2
    assert_as_good(step, ours, torchs, step.qkv, factor)


@MIXES_AND_DTYPES
def test_what_adapters_add_is_added_before(mix, dtype):
    slots = MIXES[mix]
    step = make_step(len(slots), 16, dtype)
    case, site, x = delta_case(slots, 16, dtype)
    ours, torchs = run_both(step, case, site, x)
    assert_as_good(step, ours, torchs, case.exact(step.qkv, x, site))


@pytest.mark.parametrize("dim", [16, 80])
def test_what_adapters_add_is_normed_too(dim):
    slots = MIXES["with base rows"]
    step = make_step(len(slots), dim, torch.float16, norms=True)
    case, site, x = delta_case(slots, dim, torch.float16)
    ours, torchs = run_both(step, case, site, x)
    assert_as_good(step, ours, torchs, case.exact(step.qkv, x, site))


def test_blocks_of_64_rows_mean_the_same():
    slots = [2] * 3 + [1] * 70 + [-1]
    step = make_step(len(slots), 16, torch.float16)
    case, site, x = delta_case(slots, 16, torch.float16, block_rows=64)
    ours, torchs = run_both(step, case, site, x)
    assert_as_good(step, ours, torchs, case.exact(step.qkv, x, site))


@pytest.mark.parametrize("kv_dtype", [torch.float16, FP8], ids=["fp16", "fp8"])
def test_what_is_not_finite_is_stored_as_0_and_flagged(kv_dtype):
    step = make_step(6, 16, torch.float16, kv_dtype)
    heads = step.qkv.view(6, HEADS, 16)
    heads[0, 0, 3] = torch.nan  # q sets no flag.
    heads[1, Q_HEADS, 3] = torch.nan
    heads[2, Q_HEADS + KV_HEADS + 1, 15] = torch.inf
    heads[3, HEADS - 1, 0] = -torch.inf
    heads[4, HEADS - 1] = torch.finfo(torch.float16).max
    step.finite[5] = 0
    ours, torchs = step.run(rope.rope_store_kv), step.run(reference.rope_store_kv)
    assert ours[2].tolist() == [1, 0, 0, 0, 1, 0]
    got, expected = (stored(each[1], step.slots).float() for each in (ours, torchs))
    assert got.isfinite().all()
    assert got[2, KV_HEADS + 1, 15] == got[3, HEADS - Q_HEADS - 1, 0] == 0
    if kv_dtype == FP8:
        assert_fp8_near(got, expected)
    else:
        assert torch.allclose(got, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_sum_that_overflows_is_flagged():
    step = make_step(3, 16, torch.float16)
    step.qkv.view(3, HEADS, 16)[1, Q_HEADS, :] = 6e4  # Some overflow float16 when rotated.
    assert step.run(rope.rope_store_kv)[2].tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_kv_is_at_most_a_step_from_torchs_and_clamped(dtype):
    step = make_step(7, 16, dtype, FP8)
    step.qkv.view(7, HEADS, 16)[3] = -1000.0
    ours, torchs = step.run(rope.rope_store_kv), step.run(reference.rope_store_kv)
    got, expected = (stored(each[1], step.slots).float() for each in (ours, torchs))
    assert got[3, KV_HEADS:].unique().tolist() == [-FP8_MAX]
    assert_fp8_near(got, expected)


def test_fp8_kv_is_divided_by_its_scales():
    step, scales = make_step(7, 16, torch.float32, FP8), (0.25, 4.0)
    ours = step.run(rope.rope_store_kv, None, scales)
    torchs = step.run(reference.rope_store_kv, None, scales)
    got, expected = (stored(each[1], step.slots).float() for each in (ours, torchs))
    assert_fp8_near(got, expected)
    plain = stored(step.run(rope.rope_store_kv)[1], step.slots).float()
    assert got[:, :KV_HEADS].norm() > 3 * plain[:, :KV_HEADS].norm()
    assert got[:, KV_HEADS:].norm() < plain[:, KV_HEADS:].norm() / 3


def test_a_padding_row_is_written_nowhere():
    step = make_step(5, 16, torch.float16)
    step.slots[1], step.slots[4] = -1, -3
    ours, torchs = step.run(rope.rope_store_kv), step.run(reference.rope_store_kv)
    assert torch.equal(ours[1].isnan(), torchs[1].isnan())
    written = (~ours[1].isnan()).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1).all(dim=1)
    assert written.nonzero().squeeze(1).tolist() == [1, 5, 7]


def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    slots = [0] * 3 + [1] * 18 + [-1]
    step = make_step(len(slots), 16, torch.float16, norms=True)
    case, site, x = delta_case(slots, 16, torch.float16)
    q, kv, _ = step.run(rope.rope_store_kv, lora.shrink(x, case.work, site))
    for token in (1, 4, 20, 21):
        rows = slice(token, token + 1)
        one = replace(
            step,
            qkv=step.qkv[rows],
            positions=step.positions[rows],
            slots=step.slots[rows],
            finite=step.finite[rows],
        )
        alone, _, _ = delta_case(slots[rows], 16, torch.float16)
        delta = lora.shrink(x[rows], alone.work, site)
        q_alone, kv_alone, _ = one.run(rope.rope_store_kv, delta)
        assert torch.equal(q_alone, q[rows])
        assert torch.equal(stored(kv_alone, one.slots), stored(kv, step.slots)[rows])


def test_the_fused_form_is_the_plain_expand_and_then_the_plain_form():
    slots = MIXES["zipf"]
    step = make_step(len(slots), 16, torch.float16)
    case, site, x = delta_case(slots, 16, torch.float16)
    delta = lora.shrink(x, case.work, site)
    fused = step.run(rope.rope_store_kv, delta)
    lora.expand(step.qkv, delta)
    for ours, other in zip(fused, step.run(rope.rope_store_kv), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), other.nan_to_num(7.0))


def test_a_block_far_beyond_2_to_the_31_elements_is_found():
    torch.use_deterministic_algorithms(False)  # else all of the huge memory would be filled
    step = make_step(5, 16, torch.float16)
    # The stride fits into 32 bits; with a 64-bit stride the product would be wide anyway.
    num_slabs, slab_elems = len(step.kv), 2**30 + 64
    memory = torch.empty(num_slabs * slab_elems, dtype=torch.float16)
    strides = (slab_elems, *step.kv[0].contiguous().stride())
    far = memory.as_strided(step.kv.shape, strides)
    far.copy_(step.kv)
    places = step.positions, step.slots, step.finite
    rope.rope_store_kv(step.qkv.clone(), far, *step.turns, *places)
    assert torch.equal(far.nan_to_num(7.0), step.run(rope.rope_store_kv)[1].nan_to_num(7.0))
