"""rope_store_kv: rotation, norms of heads, adapters, KV in the model's dtype and in e4m3."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kernels import reference
from kernels.reference import FP8
from kernels.work import Delta, HeadNorms
from tests.gpu.setting import KernelSizes, Setting
from tests.gpu.trials.lora import BLOCK_ROWS, case_at, make_slots, sites
from tests.gpu.trials.trial import CPU, Trial, near, on, randn, work_on

_BLOCK_SIZE = 16
_POSITIONS = 3000
_THETA = 500_000.0


@dataclass(frozen=True)
class RopeStep:
    """Tokens to be rotated and stored; `run` works on copies.

    qkv: [T, (heads + 2 kv heads) * head_dim].   kv: [slabs, 2, kv heads, block size, head_dim].
    """

    sizes: KernelSizes
    qkv: torch.Tensor
    kv: torch.Tensor
    turns: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor
    slots: torch.Tensor
    norms: HeadNorms | None

    def run(self, ops, there: torch.device, delta: Delta | None = None) -> list[torch.Tensor]:
        """Run rope_store_kv, and return q, the KV and the flags."""
        qkv, kv, *places = on(there, self.qkv, self.kv, *self.turns, self.positions, self.slots)
        finite = torch.ones(len(qkv), dtype=torch.int32, device=there)
        norms = work_on(there, self.norms) if self.norms else None
        ops.rope_store_kv(qkv, kv, *places, finite, norms, delta)
        return [qkv[:, : self.sizes.heads * self.sizes.head_dim], kv, finite]

    def exact(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        """The same in float32.   qkv: with the adapters' part added."""
        norms = self.norms
        if norms is not None:
            norms = replace(norms, q=norms.q.float(), k=norms.k.float())
        kv = torch.full(self.kv.shape, torch.nan)
        wide = replace(self, qkv=qkv.float(), kv=kv, norms=norms)
        return wide.run(reference, CPU)


def make_step(
    sizes: KernelSizes,
    num_tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    has_norms: bool,
    rng: torch.Generator,
) -> RopeStep:
    """Make a step of tokens at random slots and positions."""
    dim, heads = sizes.head_dim, sizes.heads + 2 * sizes.kv_heads
    num_slabs = num_tokens // _BLOCK_SIZE + 2
    kv = torch.full((num_slabs, 2, sizes.kv_heads, _BLOCK_SIZE, dim), torch.nan)
    frequencies = _THETA ** -(torch.arange(dim // 2) * 2 / dim)
    angles = torch.outer(torch.arange(float(_POSITIONS)), frequencies)
    weights = 1 + randn(2, dim, rng=rng) / 4
    return RopeStep(
        sizes=sizes,
        qkv=randn(num_tokens, heads * dim, rng=rng, dtype=dtype),
        kv=kv.to(kv_dtype),
        turns=(angles.cos(), angles.sin()),
        positions=torch.randint(_POSITIONS, (num_tokens,), generator=rng).int(),
        slots=torch.randperm(num_slabs * _BLOCK_SIZE, generator=rng)[:num_tokens].int(),
        norms=HeadNorms(*weights.to(dtype), eps=1e-5) if has_norms else None,
    )


def rope_trials(setting: Setting) -> Iterator[Trial]:
    for dtype in setting.dtypes:
        yield _plain(setting, dtype, dtype, has_norms=False)
    yield _plain(setting, setting.dtype, setting.dtype, has_norms=True)
    if setting.has_fp8:
        yield _plain(setting, setting.dtype, FP8, has_norms=False)
    for block_rows in BLOCK_ROWS:
        yield _with_adapters(setting, block_rows, has_norms=False)
    yield _with_adapters(setting, BLOCK_ROWS[0], has_norms=True)


def _plain(setting: Setting, dtype: torch.dtype, kv_dtype: torch.dtype, has_norms: bool) -> Trial:
    title = f"rope_store_kv, {dtype}, KV {kv_dtype}{', normed' if has_norms else ''}"
    sizes, rng = setting.kernels, setting.rng(title)
    step = make_step(sizes, sizes.tokens, dtype, kv_dtype, has_norms, rng)
    heads = step.qkv.view(sizes.tokens, -1, sizes.head_dim)
    heads[1, sizes.heads, 3] = torch.nan
    heads[2, -1, -1] = torch.inf
    step.slots[3] = -1
    return Trial(title, step.run, near(lambda: step.exact(step.qkv)))


def _with_adapters(setting: Setting, block_rows: int, has_norms: bool) -> Trial:
    kind = f"blocks of {block_rows}{', normed' if has_norms else ''}"
    title = f"rope_store_kv with adapters, {kind}"
    sizes, rng, dtype = setting.kernels, setting.rng(title), setting.dtype
    site = sites(sizes)["qkv"]
    step = make_step(sizes, sizes.tokens, dtype, dtype, has_norms, rng)
    slots = make_slots(sizes.tokens, rng)
    case = case_at(site, slots, dtype, block_rows, setting.seed_of(title))
    x = randn(sizes.tokens, site.in_features, rng=rng, dtype=dtype)

    def run(ops, there):
        (source,) = on(there, x)
        return step.run(ops, there, ops.shrink(source, case.placed(there).work, site))

    return Trial(title, run, near(lambda: step.exact(case.exact(step.qkv, x, site))))
