"""A row has the same bits alone, among others, and at another place."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kernels.gpu import ops
from kernels.packed import pack
from tests.gpu.setting import Check, Setting
from tests.gpu.trials.attention import make_attention
from tests.gpu.trials.experts import DENSE, INT4, Form, make_mixture
from tests.gpu.trials.lora import BLOCK_ROWS, case_at, sites
from tests.gpu.trials.quantized import shape_of
from tests.gpu.trials.rope import make_step
from tests.gpu.trials.rowwise import EPS
from tests.gpu.trials.sampling import make_choices
from tests.gpu.trials.trial import describe_difference, is_same, on, randn, work_on
from tests.kernels.quantized_cases import random_weight

Rows = Callable[[Sequence[int]], torch.Tensor]
"""Numbers of rows, in some order -> a kernel's results for them in one step, [rows, ..]. A row's
data depends on its number only.
"""

_SLOTS = (1, 1, 1, 4, -1, 0, 2, 3)
"""Slots of the rows' adapters, by the rows' numbers; -1 for the base model."""


def invariance_checks() -> dict[str, Check]:
    checks = {
        "rms_norm": _rms_norm,
        "add_rms_norm": _add_rms_norm,
        "gated": _gated,
        "multiply_quantized": _multiply_quantized,
        "sample": _sample,
        "decode_attention": _decode,
        "drafts": _drafts,
        "prefill_attention": _prefill,
    }
    for name, form in {"dense": DENSE, "int4": INT4}.items():
        checks[f"experts.{name}"] = lambda setting, form=form: _experts(setting, form)
    for rows in BLOCK_ROWS:
        checks |= {
            f"expand.{rows}": lambda setting, rows=rows: _expand(setting, rows),
            f"rope.{rows}": lambda setting, rows=rows: _rope(setting, rows),
        }
    return {f"invariance.{name}": _check(name, make) for name, make in checks.items()}


def _check(name: str, make: Callable[[Setting], Rows]) -> Check:
    def check(setting: Setting) -> None:
        run, rng = make(setting), setting.rng(f"invariance {name}")
        largest = setting.kernels.batches[-1]
        all_rows = torch.randperm(largest, generator=rng).tolist()
        expected = dict(zip(all_rows, run(all_rows), strict=True))
        for size in setting.kernels.batches:
            rows = torch.randperm(largest, generator=rng)[:size].tolist()
            for row, found in zip(rows, run(rows), strict=True):
                assert is_same(found, expected[row]), (
                    f"row {row} differs among {size}: {describe_difference(found, expected[row])}"
                )

    return check


# ---- kernels without adapters ----


def _rms_norm(setting: Setting) -> Rows:
    x, weight = _random(setting, setting.kernels.hidden), _random(setting, setting.kernels.hidden)
    return lambda rows: ops.rms_norm(x[rows], weight[0], EPS)


def _add_rms_norm(setting: Setting) -> Rows:
    x, weight = _random(setting, setting.kernels.hidden), _random(setting, setting.kernels.hidden)
    return lambda rows: ops.add_rms_norm(x[rows], x[rows].flip(1), weight[0], EPS)


def _gated(setting: Setting) -> Rows:
    gate_up = _random(setting, 2 * setting.kernels.intermediate)
    return lambda rows: ops.gated(gate_up[rows], "silu")


def _multiply_quantized(setting: Setting) -> Rows:
    """Products of steps of up to 16 tokens."""
    out_features, in_features = shape_of(setting, INT4)
    weight = pack(random_weight(INT4, out_features, in_features, setting.seed_of("weight")))
    x, own = _random(setting, in_features), work_on(setting.there, weight)
    return lambda rows: torch.cat(
        [
            ops.multiply_quantized(x[rows[first : first + 16]], own)
            for first in range(0, len(rows), 16)
        ]
    )


def _sample(setting: Setting) -> Rows:
    logits = 3 * _random(setting, setting.kernels.vocab).float()
    work = make_choices(len(logits), setting.rng("choices"))

    def run(rows: Sequence[int]) -> torch.Tensor:
        part = replace(work, **{n: getattr(work, n)[list(rows)] for n in work.__slots__})
        return ops.sample(logits[rows], work_on(setting.there, part))

    return run


def _decode(setting: Setting) -> Rows:
    def run(rows: Sequence[int]) -> torch.Tensor:
        contexts = [(_length(setting, row), 1) for row in rows]
        seed = setting.seed_of("decode")
        case = make_attention(setting, contexts, setting.dtype, seed)
        return case.placed(setting.there).run(ops.decode_attention)

    return run


def _drafts(setting: Setting) -> Rows:
    """Decodes behind drafts, of which there are more or fewer; the result of a row is that of its
    last token.
    """

    def run(rows: Sequence[int]) -> torch.Tensor:
        contexts = [
            (_length(setting, row), min(_length(setting, row), 1 + place % 8))
            for place, row in enumerate(rows)
        ]
        seed = setting.seed_of("drafts")
        case = make_attention(setting, contexts, setting.dtype, seed, most_decoded=8)
        out = case.placed(setting.there).run(ops.decode_attention)
        return out[[int(case.row(number)[-1]) for number in range(len(rows))]]

    return run


def _prefill(setting: Setting) -> Rows:
    """Prefills among decodes; the result of a row is that of its first and of its last token."""

    def run(rows: Sequence[int]) -> torch.Tensor:
        contexts = [(_length(setting, row), _chunk(setting, row)) for row in rows]
        contexts = [context for own in contexts for context in (own, (3, 1))]
        seed = setting.seed_of("prefill")
        case = make_attention(setting, contexts, setting.dtype, seed)
        out = case.placed(setting.there).run(ops.prefill_attention)
        tokens = [case.row(2 * number) for number in range(len(rows))]
        return torch.stack([out[own[[0, -1]].to(setting.there)] for own in tokens])

    return run


def _length(setting: Setting, row: int) -> int:
    longest = max(length for length, _ in setting.kernels.contexts)
    return 2 + row * (longest - 2) // setting.kernels.batches[-1]


def _chunk(setting: Setting, row: int) -> int:
    return min(_length(setting, row), 2 + 37 * row % 200)


def _experts(setting: Setting, form: Form) -> Rows:
    """A layer of experts, whose rows have the same experts as other rows, or others."""
    mixture = make_mixture(setting, form, 8, setting.dtype).on(setting.there)
    x = _random(setting, mixture.gate_up.in_features)

    def run(rows: Sequence[int]) -> torch.Tensor:
        routing = ops.route(x[rows], mixture.router, 2, True)
        gated = ops.gated(ops.multiply_experts(x[rows], mixture.gate_up, routing), "silu")
        return ops.sum_experts(ops.multiply_experts(gated, mixture.down, routing, True), routing)

    return run


# ---- with adapters ----


def _expand(setting: Setting, block_rows: int) -> Rows:
    """Shrink, expand and gate of rows with adapters."""
    site = sites(setting.kernels)["gate_up"]
    x, y = _random(setting, site.in_features), _random(setting, sum(site.out_features))

    def run(rows: Sequence[int]) -> torch.Tensor:
        order, slots = _by_slot(rows)
        seed = setting.seed_of("expand")
        case = case_at(site, slots, setting.dtype, block_rows, seed).placed(setting.there)
        in_order = [rows[i] for i in order]
        delta = ops.shrink(x[in_order], case.work, site)
        gated, target = ops.gated(y[in_order], "silu", delta), y[in_order]
        ops.expand(target, delta)
        return _back(torch.cat((target, gated), dim=1), order)

    return run


def _rope(setting: Setting, block_rows: int) -> Rows:
    """q, k and v of rows with adapters and head norms."""
    sizes, site = setting.kernels, sites(setting.kernels)["qkv"]
    x = _random(setting, site.in_features)
    rng = setting.rng("rope")
    step = make_step(sizes, sizes.batches[-1], setting.dtype, setting.dtype, True, rng)

    def run(rows: Sequence[int]) -> torch.Tensor:
        order, slots = _by_slot(rows)
        seed = setting.seed_of("rope")
        case = case_at(site, slots, setting.dtype, block_rows, seed).placed(setting.there)
        own = [rows[i] for i in order]
        part = replace(
            step, qkv=step.qkv[own], positions=step.positions[own], slots=step.slots[own]
        )
        delta = ops.shrink(x[own], case.work, site)
        q, kv, _ = part.run(ops, setting.there, delta)
        places = part.slots.long().to(setting.there)
        stored = kv.permute(0, 3, 1, 2, 4)[places // kv.shape[3], places % kv.shape[3]]
        return _back(torch.cat((q, stored.flatten(1)), dim=1), order)

    return run


def _by_slot(rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """(indices in `rows`, in the order of a step; the slots in that order): rows of an adapter are
    adjacent.
    """
    slots = [_SLOTS[row % len(_SLOTS)] for row in rows]
    order = sorted(range(len(rows)), key=slots.__getitem__)
    return order, [slots[i] for i in order]


def _back(ordered: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    return ordered[torch.tensor(order).argsort().to(ordered.device)]


def _random(setting: Setting, width: int) -> torch.Tensor:
    """Random rows on the device, one for each number."""
    rng = setting.rng(f"rows of {width}")
    (rows,) = on(
        setting.there, randn(setting.kernels.batches[-1], width, rng=rng, dtype=setting.dtype)
    )
    return rows
