"""Attention on paged KV: decodes, drafts and prefills, with a window and without."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from engine.gpu.decodes import Decodes
from kernels import reference
from kernels.gpu.launch import assume_capability, capability
from kernels.reference import FP8
from kernels.work import Decode, decode_queries
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import Trial, alike, near
from tests.kernels.attention_cases import AttentionCase, make_case

NAMES = ("decode_attention", "prefill_attention")
Rows = Sequence[tuple[int, int]]
"""(positions, tokens of this step) each; (0, 1) is padding, as in a captured step."""

_PADDING = (0, 1)
_WINDOW = 100
EDGES: Rows = (
    (1, 1), (16, 1), (2, 2), (17, 1), (33, 33), (255, 1), _PADDING, (17, 2), (256, 1), (23, 7),
    (257, 1), (86, 70), (333, 33), (1100, 1), (131, 5), (1100, 5), _PADDING,
)  # fmt: skip
"""Rows that end or begin beside an edge of a block, a split or a tile. The first token of (131, 5)
does not see the last key of a tile, whatever a tile's keys are.
"""
DRAFTS: Rows = (
    (1, 1), (8, 8), (15, 2), (40, 9), (16, 3), (17, 4), (133, 5), (257, 6), (258, 7), (134, 8),
    _PADDING,
)  # fmt: skip
"""Rows of up to 8 tokens decode; some of them begin in another split than they end."""


def attention_trials(setting: Setting) -> Iterator[Trial]:
    dtype, contexts = setting.dtype, [*setting.kernels.contexts, _PADDING]
    for other in setting.dtypes[1:]:
        yield attend(setting, "", contexts, other)
    yield attend(setting, "", contexts, dtype)
    # A GPU compiles kernels for each window, and with a bound.
    windows = (None, 5, 700) if setting.is_dry else (None, _WINDOW)
    yield from edges(setting, windows)
    all_scores = ((0.6,), (None, 1.5), (0.6, 0.9))
    for scores in all_scores if setting.is_dry else all_scores[-1:]:
        name, rows = f", factor and bound {scores}", [(1, 1), (300, 1), (40, 17)]
        yield attend(setting, name, rows, dtype, _WINDOW, *scores)
    if setting.has_fp8:
        yield attend_fp8(setting, None)
    if setting.is_dry:
        yield attend_fp8(setting, 30)
        options = {"kv_dtype": FP8, "most_decoded": 8}
        yield attend(setting, ", FP8 drafts", [(300, 5), (40, 8)], dtype, 20, 0.6, 0.9, **options)
    yield attend(setting, ", more splits than are reduced at a time", [(4400, 1)], dtype)
    for name, rows in {"decodes": [(50, 1), _PADDING], "prefills": [(40, 9)]}.items():
        yield attend(setting, f", {name} alone", rows, dtype)
        yield attend(setting, f", {name} alone without room", rows, dtype, num_spare=0)
    yield _parts(setting)
    yield _as_decodes(setting)


def edges(setting: Setting, windows: Sequence[int | None]) -> Iterator[Trial]:
    for window in windows:
        yield attend(setting, ", edges", EDGES, setting.dtype, window)
        yield attend(setting, ", drafts", DRAFTS, setting.dtype, window, most_decoded=8)


def attend_fp8(setting: Setting, window: int | None) -> Trial:
    rows = [(600, 1), (150, 40), (17, 1), _PADDING]
    options = {"kv_dtype": FP8, "block_size": 32}
    return attend(setting, ", FP8", rows, setting.dtype, window, **options)


def make_attention(
    setting: Setting,
    rows: Rows,
    dtype: torch.dtype,
    seed: int,
    *,
    head_dim: int | None = None,
    **options: object,
) -> AttentionCase:
    """Make random inputs of attention in the sizes of the setting.

    rows: a sequence depends on its length and `seed`.   options: of `make_case`.
    """
    sizes = setting.kernels
    with assume_capability(capability(setting.there)):
        return make_case(
            rows, heads=sizes.heads, kv_heads=sizes.kv_heads, dim=head_dim or sizes.head_dim,
            dtype=dtype, seed=seed & 0x7FFFFFFF, **options,  # type: ignore[arg-type]
        )  # fmt: skip


def attend(
    setting: Setting,
    name: str,
    rows: Rows,
    dtype: torch.dtype,
    window: int | None = None,
    *scores: float | None,
    **options: object,
) -> Trial:
    """Make a trial of both kernels on the same rows.   scores, options: see AttentionCase.run and
    `make_case`.
    """
    title = f"attention{name}, {dtype}, window {window}"
    case = make_attention(setting, rows, dtype, setting.seed_of(title), **options)

    def outputs(ops, case: AttentionCase) -> list[torch.Tensor]:
        return [case.run(getattr(ops, name), window, *scores) for name in NAMES]

    def exact():
        # A product of e4m3 and float64 has all bits.
        wide = replace(case, q=case.q.double(), kv=case.kv.float().double())
        return outputs(reference, wide)

    return Trial(title, lambda ops, there: outputs(ops, case.placed(there)), near(exact))


def _parts(setting: Setting) -> Trial:
    """Items in parts give the bits that they give together."""
    rows = [(270, 1), (30, 1), (40, 9), (259, 6), (17, 1), (260, 2)]
    cases = [
        make_attention(setting, rows, setting.dtype, 1, most_decoded=8, num_parts=parts)
        for parts in (3, 1)
    ]

    def run(ops, there):
        return [case.placed(there).run(ops.decode_attention) for case in cases]

    return Trial("attention, items in parts", run, alike)


def _as_decodes(setting: Setting) -> Trial:
    """Drafts have the bits that they would have as decodes, in the splits of a window."""
    sizes, window = setting.kernels, _WINDOW
    rows = [(33, 2), (259, 7), (3, 1)]
    case = make_attention(setting, rows, setting.dtype, 1, most_decoded=8)
    alone = Decodes(len(case.q), 1, decode_queries(sizes.heads, sizes.kv_heads), window)
    for decode in (Decode(*ints) for ints in case.work.decodes.tolist()):
        alone.add(decode.token, decode.length - 1, 1, decode.block_start)
    (items,) = alone.items()
    as_decodes = replace(
        case.work,
        decodes=torch.tensor(alone.records, dtype=torch.int32),
        decode_items=torch.from_numpy(items),
        num_decode_items=torch.tensor([len(items)], dtype=torch.int32),
    )

    def run(ops, there):
        cases = case, replace(case, work=as_decodes)
        return [one.placed(there).run(ops.decode_attention, window) for one in cases]

    return Trial("attention, drafts as decodes", run, alike)
