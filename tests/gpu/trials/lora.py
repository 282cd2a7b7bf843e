"""LoRA: shrink with expand, and shrink with the expand that is fused into silu_mul."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn.functional import silu

from kernels.gpu.launch import INTERPRETED
from kernels.tiles import MAX_RANK
from kernels.work import Site
from tests.gpu.setting import KernelSizes, Setting
from tests.gpu.trials.trial import Trial, near, on, randn
from tests.kernels.lora_cases import LoRACase, make_case, rank_patterns

BLOCK_ROWS = (16, 64)
LAYER = 1


def lora_trials(setting: Setting) -> Iterator[Trial]:
    for name, site in sites(setting.kernels).items():
        for block_rows in BLOCK_ROWS:
            yield _expand(setting, name, site, block_rows, setting.dtype)
    for dtype in setting.dtypes[1:]:
        yield _expand(setting, "o", sites(setting.kernels)["o"], BLOCK_ROWS[0], dtype)
    for block_rows in BLOCK_ROWS:
        yield _silu_mul(setting, block_rows)


def sites(sizes: KernelSizes) -> dict[str, Site]:
    """Sites of a layer by name."""
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {
        "qkv": Site(LAYER, (0, 1, 2), sizes.hidden, (q, kv, kv)),
        "o": Site(LAYER, (3,), q, (sizes.hidden,)),
        "gate_up": Site(LAYER, (4, 5), sizes.hidden, (sizes.intermediate,) * 2),
        "down": Site(LAYER, (6,), sizes.intermediate, (sizes.hidden,)),
    }


def case_at(
    site: Site, slots: list[int], dtype: torch.dtype, block_rows: int, seed: int
) -> LoRACase:
    """Make a case of five adapters with weights for the site's projections."""
    features = {
        projection: (site.in_features, width)
        for projection, width in zip(site.projections, site.out_features, strict=True)
    }
    case = make_case(rank_patterns(), slots, features, dtype, block_rows=block_rows, seed=seed)
    if INTERPRETED:
        return case
    # Planes are as wide as the engine's, because kernels are compiled for the width.
    return replace(case, work=replace(case.work, max_rank=MAX_RANK))


def make_slots(num_tokens: int, rng: torch.Generator) -> list[int]:
    """Slots of all tokens: one long run, then short runs, also of the base model, in any order."""
    long = num_tokens // 2
    runs = [(1, long), (-1, 2), (0, 3), (4, 1), (3, 1), (2, 2)]
    runs = [runs[0], *(runs[1:][i] for i in torch.randperm(5, generator=rng).tolist())]
    slots = [slot for slot, count in runs for _ in range(count)]
    return (slots + [0] * num_tokens)[:num_tokens]


def _expand(setting: Setting, name: str, site: Site, block_rows: int, dtype: torch.dtype) -> Trial:
    title = f"shrink, expand {name}, blocks of {block_rows}, {dtype}"
    rng, num_tokens = setting.rng(title), setting.kernels.tokens
    slots = make_slots(num_tokens, rng)
    case = case_at(site, slots, dtype, block_rows, setting.seed_of(title))
    x = randn(num_tokens, site.in_features, rng=rng, dtype=dtype)
    y = randn(num_tokens, sum(site.out_features), rng=rng, dtype=dtype)

    def run(ops, there):
        target, source = on(there, y, x)
        ops.expand(target, ops.shrink(source, case.placed(there).work, site))
        return [target]

    return Trial(title, run, near(lambda: [case.exact(y, x, site)]))


def _silu_mul(setting: Setting, block_rows: int) -> Trial:
    title = f"silu_mul with adapters, blocks of {block_rows}"
    rng, num_tokens = setting.rng(title), setting.kernels.tokens
    site = sites(setting.kernels)["gate_up"]
    slots = make_slots(num_tokens, rng)
    case = case_at(site, slots, setting.dtype, block_rows, setting.seed_of(title))
    x = randn(num_tokens, site.in_features, rng=rng, dtype=setting.dtype)
    y = randn(num_tokens, sum(site.out_features), rng=rng, dtype=setting.dtype)

    def run(ops, there):
        gate_up, source = on(there, y, x)
        return [ops.silu_mul(gate_up, ops.shrink(source, case.placed(there).work, site))]

    def exact():
        gate, up = case.exact(y, x, site).chunk(2, dim=-1)
        return [silu(gate) * up]

    return Trial(title, run, near(exact))
