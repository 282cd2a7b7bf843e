"""rope_store_kv: rotation, norms of heads, adapters, KV in the model's dtype and in e4m3."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kernels import reference
from kernels.reference import FP8, FP8_MAX
from kernels.work import Delta, HeadNorms
from tests.gpu.setting import KernelSizes, Setting
from tests.gpu.trials.lora import BLOCK_ROWS, case_at, make_slots, sites
from tests.gpu.trials.trial import (
    CPU,
    Outputs,
    Trial,
    alike,
    apart,
    check_gaps,
    describe_difference,
    near,
    on,
    randn,
    work_on,
)

_BLOCK_SIZE = 16
_POSITIONS = 3000
_THETA = 500_000.0


@dataclass(frozen=True)
class RopeStep:
    """Tokens to be rotated and stored; `run` works on copies.

    qkv: [T, (heads + 2 kv heads) * head_dim].   kv: [slabs, 2, kv heads, block size, head_dim].
    turns: cos and sin, [positions, at most head_dim / 2].   finite: flags before the step.
    kv_scales: of k and of v, in e4m3.
    """

    sizes: KernelSizes
    qkv: torch.Tensor
    kv: torch.Tensor
    turns: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor
    slots: torch.Tensor
    finite: torch.Tensor
    norms: HeadNorms | None
    kv_scales: tuple[float, float] = (1.0, 1.0)

    def run(self, ops, there: torch.device, delta: Delta | None = None) -> list[torch.Tensor]:
        """Run rope_store_kv, and return q, the KV and the flags."""
        qkv, kv = apart(there, self.qkv, self.kv)
        places = on(there, *self.turns, self.positions, self.slots, self.finite)
        norms = work_on(there, self.norms) if self.norms else None
        ops.rope_store_kv(qkv, kv, *places, norms, delta, self.kv_scales)
        check_gaps(kv)
        return [qkv[:, : self.sizes.heads * self.sizes.head_dim], kv, places[-1]]

    def exact(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        """The same in float64.   qkv: with the adapters' part added."""
        norms = self.norms
        if norms is not None:
            norms = replace(norms, q=norms.q.double(), k=norms.k.double())
        kv = torch.full(self.kv.shape, torch.nan, dtype=torch.float64)
        wide = replace(self, qkv=qkv.double(), kv=kv, norms=norms)
        q, kv, finite = wide.run(reference, CPU)
        if self.kv.dtype == FP8:
            kv /= torch.tensor(self.kv_scales).view(2, 1, 1, 1)
        return [q, kv, finite]


def make_step(
    sizes: KernelSizes,
    num_tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    has_norms: bool,
    rng: torch.Generator,
    rotary_dim: int | None = None,
) -> RopeStep:
    """Make a step of tokens at random slots and positions.

    rotary_dim: features of a head that are turned, None for all.
    """
    dim, heads = sizes.head_dim, sizes.heads + 2 * sizes.kv_heads
    num_slabs = num_tokens // _BLOCK_SIZE + 2
    kv = torch.full((num_slabs, 2, sizes.kv_heads, _BLOCK_SIZE, dim), torch.nan)
    frequencies = _THETA ** -(torch.arange((rotary_dim or dim) // 2) * 2 / dim)
    angles = torch.outer(torch.arange(float(_POSITIONS)), frequencies)
    weights = 1 + randn(2, dim, rng=rng) / 4
    return RopeStep(
        sizes=sizes,
        qkv=randn(num_tokens, heads * dim, rng=rng, dtype=dtype),
        kv=kv.to(kv_dtype),
        turns=(angles.cos(), angles.sin()),
        positions=torch.randint(_POSITIONS, (num_tokens,), generator=rng).int(),
        slots=torch.randperm(num_slabs * _BLOCK_SIZE, generator=rng)[:num_tokens].int(),
        finite=torch.ones(num_tokens, dtype=torch.int32),
        norms=HeadNorms(*weights.to(dtype), eps=1e-5) if has_norms else None,
    )


def rope_trials(setting: Setting) -> Iterator[Trial]:
    sizes, dtype = setting.kernels, setting.dtype
    for other in setting.dtypes:
        yield plain(setting, "", other, other, has_norms=False)
    yield plain(setting, "normed", dtype, dtype, has_norms=True)
    if setting.is_dry:  # a GPU compiles kernels for each of these
        yield _wide_norms(setting)
        yield plain(setting, "a part turned", dtype, dtype, has_norms=True, rotary_dim=2)
    yield _flags(setting, dtype)
    if setting.has_fp8:
        yield plain(setting, "", dtype, FP8, has_norms=False)
        yield plain(setting, "scaled", dtype, FP8, has_norms=False, kv_scales=(0.25, 4.0))
        yield _flags(setting, FP8)
    slots = make_slots(sizes.tokens, setting.rng("rope slots"))
    for block_rows in BLOCK_ROWS:
        yield _with_adapters(setting, "", slots, block_rows, has_norms=False)
    yield _with_adapters(setting, "normed", slots, BLOCK_ROWS[0], has_norms=True)
    yield _with_adapters(setting, "a part turned", slots, BLOCK_ROWS[0], False, rotary_dim=2)
    yield _with_adapters(setting, "one token", [3], BLOCK_ROWS[0], has_norms=False)
    yield _with_adapters(setting, "no adapter", [-1] * 5, BLOCK_ROWS[0], has_norms=False)
    if setting.is_dry:  # on a GPU the two forms may add in another order
        yield _as_expanded(setting, slots)


def plain(
    setting: Setting,
    name: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    has_norms: bool,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    **options: int,
) -> Trial:
    """Make a trial without adapters; some tokens are padding, and some not finite."""
    title = f"rope_store_kv, {dtype}, KV {kv_dtype} {name}"
    sizes, rng = setting.kernels, setting.rng(title)
    step = make_step(sizes, sizes.tokens, dtype, kv_dtype, has_norms, rng, **options)
    step = replace(step, kv_scales=kv_scales)
    heads = step.qkv.view(sizes.tokens, -1, sizes.head_dim)
    heads[0, 0, 3] = torch.nan  # q sets no flag
    heads[1, sizes.heads, 3] = torch.nan
    heads[2, -1, -1], heads[4, -1, 0] = torch.inf, -torch.inf
    step.slots[step.slots == 0] = step.slots[6].item()  # two tokens in one slot would be a race
    step.slots[3], step.slots[5], step.slots[6], step.finite[3] = -1, -3, 0, 0
    return Trial(title, step.run, near(lambda: step.exact(step.qkv)))


def _wide_norms(setting: Setting) -> Trial:
    """Weights of norms may have more bits than what they multiply."""
    sizes, rng, dtype = setting.kernels, setting.rng("wide norms"), setting.dtype
    step = make_step(sizes, sizes.tokens, dtype, dtype, True, rng)
    q, k = (weights.float() + 1e-4 for weights in (step.norms.q, step.norms.k))
    step = replace(step, norms=HeadNorms(q, k, step.norms.eps))
    return Trial("rope_store_kv, wide norms", step.run, near(lambda: step.exact(step.qkv)))


def _flags(setting: Setting, kv_dtype: torch.dtype) -> Trial:
    """Numbers that overflow where they are rotated are flagged and stored as 0; numbers that e4m3
    cannot hold are stored as its largest one.
    """
    sizes, dtype, rng = setting.kernels, setting.dtype, setting.rng("flags")
    step = make_step(sizes, 4, dtype, kv_dtype, False, rng)
    heads, first_v = step.qkv.view(4, -1, sizes.head_dim), sizes.heads + sizes.kv_heads
    most = torch.finfo(dtype).max
    heads[1, sizes.heads], heads[2, first_v:], heads[3, first_v:] = most, most, -1000.0
    step.positions[1] = step.turns[0].shape[0] - 1

    def run(ops, there):
        _, kv, finite = step.run(ops, there)
        places = step.slots.to(there)
        by_token = kv.float().permute(0, 3, 1, 2, 4)
        return [finite, by_token[places // kv.shape[3], places % kv.shape[3]]]

    def judge(ours: Outputs, torchs: Outputs) -> None:
        finite, stored = ours
        limit, least = (FP8_MAX, 2.0**-9) if kv_dtype == FP8 else (torch.inf, 0.0)
        mine, theirs = stored[1].abs(), torchs[1][1].abs()
        assert finite.tolist() == [1, 0, 1, 1], f"the flags are {finite.tolist()}"
        assert stored.isfinite().all(), "a number that is not finite is stored"
        # The least number of e4m3 and 0 are as far from what is rounded.
        differs = ((mine == 0) & (theirs > least)) | ((theirs == 0) & (mine > least))
        assert not differs.any(), f"0 or not: {describe_difference(stored[1], torchs[1][1])}"
        assert (stored[2, 1] == min(most, limit)).all(), "the largest number is stored as another"
        assert (stored[3, 1] == -min(1000.0, limit)).all(), "-1000 is stored as another number"

    return Trial(f"rope_store_kv, flags, KV {kv_dtype}", run, judge)


def _with_adapters(
    setting: Setting, name: str, slots: list[int], block_rows: int, has_norms: bool, **options: int
) -> Trial:
    title = f"rope_store_kv with adapters, blocks of {block_rows} {name}"
    sizes, rng, dtype = setting.kernels, setting.rng(title), setting.dtype
    site = sites(sizes)["qkv"]
    step = make_step(sizes, len(slots), dtype, dtype, has_norms, rng, **options)
    case = case_at(site, slots, dtype, block_rows, setting.seed_of(title))
    x = randn(len(slots), site.in_features, rng=rng, dtype=dtype)

    def run(ops, there):
        (source,) = on(there, x)
        return step.run(ops, there, ops.shrink(source, case.placed(there).work, site))

    return Trial(title, run, near(lambda: step.exact(case.exact(step.qkv, x, site))))


def _as_expanded(setting: Setting, slots: list[int]) -> Trial:
    """The fused form has the bits of the plain expand and then the plain form."""
    sizes, rng, dtype = setting.kernels, setting.rng("as expanded"), setting.dtype
    site = sites(sizes)["qkv"]
    step = make_step(sizes, len(slots), dtype, dtype, False, rng)
    case = case_at(site, slots, dtype, BLOCK_ROWS[0], setting.seed_of("as expanded"))
    x = randn(len(slots), site.in_features, rng=rng, dtype=dtype)

    def run(ops, there):
        source, qkv = on(there, x, step.qkv)
        delta = ops.shrink(source, case.placed(there).work, site)
        ops.expand(qkv, delta)
        forms = step.run(ops, there, delta), replace(step, qkv=qkv).run(ops, there)
        return [torch.cat([part.flatten() for part in form[:2]]).nan_to_num() for form in forms]

    return Trial("rope_store_kv after an expand", run, alike)
