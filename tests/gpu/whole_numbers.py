"""Kernels with tiles of 64 rows on integers, whose results are known to the last bit.

ptxas before 13.3 miscompiles a WGMMA whose left operand is in registers (triton issue 9433): a sum
lacks some of its terms, which on random data may look like mere rounding.
"""

from dataclasses import replace

import torch

from kernels.gpu import ops
from kernels.tiles import MAX_RANK
from kernels.work import Site
from tests.gpu.setting import Check, Setting
from tests.gpu.trials.attention import make_attention
from tests.gpu.trials.lora import LAYER, case_at, make_slots
from tests.gpu.trials.trial import describe_difference, randint
from tests.kernels.attention_cases import AttentionCase
from tests.kernels.lora_cases import LoRACase

_KEY, _QUERY = 32.0, 64.0
"""Sizes of one-hot keys and queries. A matching key has weight 1, any other 2**-180 or less, which
rounds to nothing.
"""


def whole_number_checks() -> dict[str, Check]:
    return {"whole_numbers.shrink": _check_shrink, "whole_numbers.prefill": _check_prefill}


# ---- shrink, 64 rows ----


def _check_shrink(setting: Setting) -> None:
    rng, sizes = setting.rng("whole shrink"), setting.kernels
    widths = sorted({sizes.hidden, sizes.intermediate, sizes.hidden + 8})
    for number in range(setting.kernels.exact):
        num_tokens = int(randint(1, 2 * sizes.tokens, 1, rng=rng))
        width = widths[number % len(widths)]
        site = Site(LAYER, (0, 1), width, (64, 40))
        slots = make_slots(num_tokens, rng)
        case = _whole(case_at(site, slots, setting.dtype, 64, setting.seed_of(str(number))))
        x = randint(-2, 3, num_tokens, width, rng=rng).to(setting.dtype)
        expected = _planes(x, case, site)
        placed = case.placed(setting.there)
        planes = ops.shrink(x.to(setting.there), placed.work, site).planes
        found = planes.double().sum(dim=0).cpu()
        known = ~expected.isnan()
        assert torch.equal(found[known], expected[known]), (
            f"sums of {num_tokens} tokens, {width} features: "
            f"{describe_difference(found.where(known, 0), expected.where(known, 0))}"
        )


def _whole(case: LoRACase) -> LoRACase:
    """The same case with -2 .. 2 for all weights; 0 and NaN stay."""

    def whole(values: torch.Tensor) -> torch.Tensor:
        return (997 * values.float()).trunc().fmod(3).to(values.dtype)

    modules = [
        {place: replace(m, a=whole(m.a), b=whole(m.b)) for place, m in of_slot.items()}
        for of_slot in case.modules
    ]
    return replace(case, work=replace(case.work, arena=whole(case.work.arena)), modules=modules)


def _planes(x: torch.Tensor, case: LoRACase, site: Site) -> torch.Tensor:
    """Expected planes, [T, projections * MAX_RANK] float64; NaN where nothing is written."""
    planes = torch.full((len(x), len(site.projections) * MAX_RANK), torch.nan).double()
    slots = torch.tensor(case.slots)
    for slot, modules in enumerate(case.modules):
        for number, projection in enumerate(site.projections):
            if module := modules.get((site.layer, projection)):
                h = x[slots == slot].double() @ module.a.double().T * module.scale
                first = number * MAX_RANK
                planes[slots == slot, first : first + h.shape[1]] = h
    return planes


# ---- prefill attention ----


def _check_prefill(setting: Setting) -> None:
    """Every query matches one kind of keys, and its result is the mean of their values."""
    rng = setting.rng("whole prefill")
    longest = max(length for length, _ in setting.kernels.contexts) // 4
    for number in range(setting.kernels.exact):
        rows = []
        for _ in range(int(randint(1, 4, 1, rng=rng))):
            length = int(randint(2, longest, 1, rng=rng))
            rows.append((length, int(randint(2, length + 1, 1, rng=rng))))
        seed = setting.seed_of(str(number))
        head_dim = setting.kernels.head_dims[number % len(setting.kernels.head_dims)]
        case = make_attention(setting, rows, setting.dtype, seed, head_dim=head_dim)
        num_kinds = (1, 8, head_dim)[int(randint(0, 3, 1, rng=rng))]
        expected = _fill(case, num_kinds, rng)
        found = case.placed(setting.there).run(ops.prefill_attention).cpu().double()
        # The mean is rounded once, and is exactly 0 if the sum is.
        allowed = torch.finfo(setting.dtype).eps * expected.abs()
        wrong = (found - expected).abs() > allowed
        assert not wrong.any(), (
            f"{int(wrong.sum())} means of rows {rows}, {num_kinds} kinds are wrong: "
            f"{describe_difference(found, expected)}"
        )


def _fill(case: AttentionCase, num_kinds: int, rng: torch.Generator) -> torch.Tensor:
    """Fill the case's q and kv with integers; return means, [T, heads, head_dim] float64."""
    _, _, kv_heads, block_size, dim = case.kv.shape
    heads, work = case.q.shape[1], case.work
    out = torch.zeros(case.q.shape).double()
    for row, length in enumerate(work.seq_lens.tolist()):
        tokens = case.row(row)
        values = randint(-2, 3, length, kv_heads, dim, rng=rng)
        key_kinds = randint(0, num_kinds, length, kv_heads, rng=rng).long()
        query_kinds = randint(0, num_kinds, len(tokens), heads, rng=rng).long()
        positions = torch.arange(length)
        blocks = work.blocks[int(work.block_starts[row]) + positions // block_size].long()
        places = blocks, positions % block_size
        one_hot = torch.eye(dim, dtype=case.q.dtype)
        by_token = case.kv.permute(0, 3, 1, 2, 4)
        by_token[(*places, 0)] = one_hot[key_kinds] * _KEY
        by_token[(*places, 1)] = values.to(case.kv.dtype)
        case.q[tokens] = one_hot[query_kinds] * _QUERY
        # A query that matches no key so far weighs all keys that it sees alike.
        is_seen = positions <= (length - len(tokens) + torch.arange(len(tokens)))[:, None]
        for head in range(heads):
            kinds = key_kinds[:, head * kv_heads // heads]
            is_found = is_seen & (kinds == query_kinds[:, head, None])
            is_found |= is_seen & ~is_found.any(dim=1, keepdim=True)
            sums = is_found.double() @ values[:, head * kv_heads // heads].double()
            out[tokens, head] = sums / is_found.sum(dim=1, keepdim=True)
    return out
