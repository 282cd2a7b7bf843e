"""Attention on paged KV: decodes and prefills in one step, with a window and without."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from kernels import reference
from kernels.gpu.launch import assume_capability, capability
from kernels.reference import FP8
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import Trial, near
from tests.kernels.attention_cases import AttentionCase, make_case

NAMES = ("decode_attention", "prefill_attention")
_WINDOW = 100


def attention_trials(setting: Setting) -> Iterator[Trial]:
    for name in NAMES:
        for dtype in setting.dtypes:
            yield _attention(setting, name, None, dtype, dtype)
        yield _attention(setting, name, _WINDOW, setting.dtype, setting.dtype)
        if setting.has_fp8:
            yield _attention(setting, name, None, setting.dtype, FP8)
    for window in (None, _WINDOW):
        yield _drafts(setting, window)


def make_attention(
    setting: Setting,
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
    *,
    kv_dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    most_decoded: int = 1,
) -> AttentionCase:
    """Make random inputs of attention in the sizes of the setting.

    rows: (positions, tokens of this step) each; a sequence depends on its length and `seed`.
    """
    sizes = setting.kernels
    with assume_capability(capability(setting.there)):
        return make_case(
            rows, heads=sizes.heads, kv_heads=sizes.kv_heads, dim=head_dim or sizes.head_dim,
            dtype=dtype, kv_dtype=kv_dtype, seed=seed & 0x7FFFFFFF, most_decoded=most_decoded,
        )  # fmt: skip


def _attention(
    setting: Setting,
    name: str,
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Trial:
    title = f"{name}, {dtype}, KV {kv_dtype}, window {window}"
    rng = setting.rng(title)
    contexts = setting.kernels.contexts
    rows = [contexts[i] for i in torch.randperm(len(contexts), generator=rng)]
    # The last row is padding, as in a captured step.
    seed = setting.seed_of(title)
    case = make_attention(setting, [*rows, (0, 1)], dtype, seed, kv_dtype=kv_dtype)
    return _trial(title, name, window, case)


def _drafts(setting: Setting, window: int | None) -> Trial:
    """Decodes, of which all but each eighth have drafts, among prefills."""
    title = f"decode_attention, drafts, window {window}"
    contexts = setting.kernels.contexts
    rows = [(max(length, 8), 1 + number % 8) for number, (length, _) in enumerate(contexts)]
    seed = setting.seed_of(title)
    case = make_attention(setting, [*rows, (40, 9)], setting.dtype, seed, most_decoded=8)
    return _trial(title, "decode_attention", window, case)


def _trial(title: str, name: str, window: int | None, case: AttentionCase) -> Trial:
    def run(ops, there):
        return [case.placed(there).run(getattr(ops, name), window)]

    def exact():
        wide = replace(case, q=case.q.float(), kv=case.kv.float())
        return [wide.run(getattr(reference, name), window)]

    return Trial(title, run, near(exact))
