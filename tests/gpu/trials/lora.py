"""LoRA: shrink with expand, and shrink with the expand that is fused into a gated activation."""

from collections.abc import Callable, Iterator

import torch

from kernels.elementwise import Activation
from kernels.work import Site
from tests.gpu.setting import KernelSizes, Setting
from tests.gpu.trials.rowwise import GATES
from tests.gpu.trials.trial import Outputs, Trial, alike, apart, check_gaps, near, on, randn
from tests.kernels.lora_cases import LoRACase, make_case, rank_patterns

BLOCK_ROWS = (16, 64)
LAYER = 1


def lora_trials(setting: Setting) -> Iterator[Trial]:
    here, rng = sites(setting.kernels), setting.rng("slots")
    slots = make_slots(setting.kernels.tokens, rng)
    for name, site in here.items():
        for block_rows in BLOCK_ROWS:
            yield _expand(setting, name, site, slots, block_rows, setting.dtype)
    for dtype in setting.dtypes[1:]:
        yield _expand(setting, "o", here["o"], slots, BLOCK_ROWS[0], dtype)
    yield _expand(setting, "o, one token", here["o"], [3], BLOCK_ROWS[0], setting.dtype)
    yield _expand(setting, "o, no adapter", here["o"], [-1] * 5, BLOCK_ROWS[0], setting.dtype)
    long = [2] * 3 + [1] * 71 + [-1] + [0] * 34
    yield _expand(setting, "o, two blocks of 64", here["o"], long, 64, setting.dtype)
    yield _sums(setting)
    yield _neighbours(setting)
    for block_rows in BLOCK_ROWS:
        yield _gated(setting, "silu", block_rows)
    yield _gated(setting, "gelu_tanh", BLOCK_ROWS[0])
    yield _gated_base_rows(setting)


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
    return make_case(rank_patterns(), slots, features, dtype, block_rows=block_rows, seed=seed)


def make_slots(num_tokens: int, rng: torch.Generator) -> list[int]:
    """Slots of all tokens: one long run, then short runs, also of the base model, in any order."""
    long = num_tokens // 2
    runs = [(1, long), (-1, 2), (0, 3), (4, 1), (3, 1), (2, 2)]
    runs = [runs[0], *(runs[1:][i] for i in torch.randperm(5, generator=rng).tolist())]
    slots = [slot for slot, count in runs for _ in range(count)]
    return (slots + [0] * num_tokens)[:num_tokens]


def _inputs(
    site: Site, num_tokens: int, dtype: torch.dtype, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, x)"""
    x = randn(num_tokens, site.in_features, rng=rng, dtype=dtype)
    return randn(num_tokens, sum(site.out_features), rng=rng, dtype=dtype), x


def _expanded(ops, there, case: LoRACase, site: Site, *inputs: torch.Tensor) -> torch.Tensor:
    """y with the adapters' part.   inputs: y and x."""
    y, x = apart(there, *inputs)
    ops.expand(y, ops.shrink(x, case.placed(there).work, site))
    check_gaps(y)
    return y


def _expand(
    setting: Setting, name: str, site: Site, slots: list[int], block_rows: int, dtype: torch.dtype
) -> Trial:
    title = f"shrink, expand {name}, blocks of {block_rows}, {dtype}"
    case = case_at(site, slots, dtype, block_rows, setting.seed_of(title))
    y, x = _inputs(site, len(slots), dtype, setting.rng(title))
    return Trial(
        title,
        lambda ops, there: [_expanded(ops, there, case, site, y, x)],
        near(lambda: [case.exact(y, x, site)]),
    )


def _sums(setting: Setting) -> Trial:
    """Planes that are summed beforehand, those of blocks of 64, have the bits of their sums. One
    feature of each chunk is set, since the order of a sum's terms depends on the kernel.
    """
    site, dtype, slots = sites(setting.kernels)["gate_up"], setting.dtype, [1] * 21
    x = torch.zeros(len(slots), site.in_features, dtype=dtype)
    for token in range(len(slots)):
        for chunk in range(site.num_chunks):
            width = min(512, site.in_features - 512 * chunk)
            x[token, 512 * chunk + 3 * token % width] = 0.3 + token + chunk
    cases = [case_at(site, slots, dtype, rows, setting.seed_of("sums")) for rows in (64, 16)]

    def run(ops, there):
        totals = []
        for case in cases:
            planes = ops.shrink(*on(there, x), case.placed(there).work, site).planes
            total = planes[0]
            for plane in planes[1:]:
                total = total + plane
            totals.append(total.nan_to_num())
        return totals

    return Trial("shrink, sums of planes", run, alike)


def _neighbours(setting: Setting) -> Trial:
    """Rows of the base model keep their bits, and rows that are not finite spoil no others."""
    site, slots = sites(setting.kernels)["o"], [-1, 1, 1, 1, -1, 0, 0]
    case = case_at(site, slots, setting.dtype, 16, setting.seed_of("neighbours"))
    y, x = _inputs(site, len(slots), setting.dtype, setting.rng("neighbours"))
    bad_y, bad_x = y.clone(), x.clone()
    bad_y[0, 0], bad_y[3, 1], bad_x[2, 7] = torch.nan, torch.inf, torch.nan
    bad_y[4, 0] = -0.0  # to which the kernel adds no 0.0

    def run(ops, there):
        clean = _expanded(ops, there, case, site, y, x)
        spoilt = _expanded(ops, there, case, site, bad_y, bad_x)
        return [clean[[1, 5, 6]], spoilt[[1, 5, 6]], spoilt[[0, 4]], spoilt[2]]

    def judge(ours: Outputs, _: Outputs) -> None:
        alike(ours[:2], _)
        alike([ours[2], bad_y[[0, 4]]], _)
        assert ours[3].isnan().all()

    return Trial("shrink, expand beside bad rows", run, judge)


def _gated(setting: Setting, activation: Activation, block_rows: int) -> Trial:
    title = f"{activation} with adapters, blocks of {block_rows}"
    site, rng = sites(setting.kernels)["gate_up"], setting.rng(title)
    slots = make_slots(setting.kernels.tokens, rng)
    case = case_at(site, slots, setting.dtype, block_rows, setting.seed_of(title))
    inputs = _inputs(site, len(slots), setting.dtype, rng)

    def exact():
        gate, up = case.exact(*inputs, site).chunk(2, dim=-1)
        return [GATES[activation](gate) * up]

    return Trial(title, _fused(activation, case, site, *inputs), near(exact))


def _gated_base_rows(setting: Setting) -> Trial:
    """Rows of the base model have the bits that they have where no row has an adapter."""
    site, slots = sites(setting.kernels)["gate_up"], [-1, -1, 1, 1, -1, 0]
    case = case_at(site, slots, setting.dtype, 16, setting.seed_of("gated base rows"))
    y, x = _inputs(site, len(slots), setting.dtype, setting.rng("gated base rows"))
    base, fused = torch.tensor(slots) < 0, _fused("silu", case, site, y, x)

    def run(ops, there):
        rows = base.to(there)
        return [fused(ops, there)[0][rows], ops.gated(*on(there, y), "silu")[rows]]

    return Trial("gate of base rows", run, alike)


def _fused(
    activation: Activation, case: LoRACase, site: Site, y: torch.Tensor, x: torch.Tensor
) -> Callable[..., Outputs]:
    """`run` of a trial of the gate with adapters."""

    def run(ops, there):
        gate_up, source = apart(there, y, x)
        delta = ops.shrink(source, case.placed(there).work, site)
        return [ops.gated(gate_up, activation, delta)]

    return run
