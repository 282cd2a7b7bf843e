"""Penalties and drawn tokens, which are the reference's unless rounding decides."""

from collections.abc import Iterator

import numpy as np
import torch

from engine.grammar.matcher import mask_bytes
from kernels import sampling
from kernels.work import PenaltyWork, SamplingWork
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import Outputs, Trial, on, randint, randn, work_on

_ROUNDING = 1e-5
"""Error of a cumulative share: sums of float32 and of integers are no further apart."""

_CUTS = [
    {"temperature": 0.0}, {}, {"temperature": 0.3}, {"min_p": 0.05}, {"top_k": 1}, {"top_k": 40},
    {"top_p": 0.9}, {"top_p": 0.05, "temperature": 1.7}, {"top_k": 6000}, {"top_p": 0.99},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 0.8}, {"top_k": 100, "min_p": 0.3},
]  # fmt: skip
_DRAWS = 2


def sampling_trials(setting: Setting) -> Iterator[Trial]:
    yield _adjust(setting)
    yield _sample(setting)
    yield _mask(setting)


def make_choices(num_rows: int, rng: torch.Generator) -> SamplingWork:
    """Make the options of rows, which have all kinds of cuts in turn."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        values = [_CUTS[row % len(_CUTS)].get(name, default) for row in range(num_rows)]
        return torch.tensor(values).to(dtype)

    return SamplingWork(
        temperature=column("temperature", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float64),
        top_p=column("top_p", 1.0, torch.float64),
        top_k=column("top_k", 0, torch.int32),
        uniform=torch.rand(num_rows, generator=rng, dtype=torch.float64),
    )


def _sample(setting: Setting) -> Trial:
    rng, num_rows = setting.rng("sample"), _DRAWS * len(_CUTS)
    logits = 3 * randn(num_rows, setting.kernels.vocab, rng=rng)
    work = make_choices(num_rows, rng)
    logits[1, 7], logits[num_rows // 2, 0] = torch.nan, -torch.inf

    def run(ops, there):
        return [ops.sample(*on(there, logits), work_on(there, work))]

    def judge(ours: Outputs, torchs: Outputs) -> None:
        mine, theirs = ours[0].long(), torchs[0].long()
        is_settled = (theirs < 0) | (work.temperature == 0)
        assert torch.equal(mine[is_settled], theirs[is_settled]), "greedy or bad rows differ"
        assert (mine[~is_settled] >= 0).all(), "a good row is called bad"
        _check_draws(logits[~is_settled], _rows(work, ~is_settled), mine[~is_settled])

    return Trial("sample", run, judge)


def _rows(work: SamplingWork, rows: torch.Tensor) -> SamplingWork:
    columns = "temperature", "min_p", "top_p", "top_k", "uniform"
    return SamplingWork(*(getattr(work, name)[rows] for name in columns))


def _check_draws(logits: torch.Tensor, work: SamplingWork, tokens: torch.Tensor) -> None:
    """Assert that each row's uniform number lies in the share of its token among the kept ones."""
    probs = sampling.probabilities(logits, work.temperature)
    kept = sampling.truncate(probs, work.min_p, work.top_k.long(), work.top_p).double()
    shares = kept / kept.sum(dim=-1, keepdim=True)
    end = shares.cumsum(dim=-1).gather(1, tokens[:, None]).squeeze(1)
    start = end - shares.gather(1, tokens[:, None]).squeeze(1)
    is_drawn = (start - _ROUNDING <= work.uniform) & (work.uniform <= end + _ROUNDING)
    assert is_drawn.all(), f"rows {(~is_drawn).nonzero().flatten().tolist()} drew another's share"


def _mask(setting: Setting) -> Trial:
    rng, vocab = setting.rng("mask"), setting.kernels.vocab
    logits, rows = randn(40, vocab, rng=rng), torch.arange(39, 0, -2)
    bits = torch.rand(len(rows), 8 * mask_bytes(vocab), generator=rng) < 0.3
    packed = torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
    kept = torch.ones(40, vocab, dtype=torch.bool).index_copy_(0, rows, bits[:, :vocab])

    def run(_, there):
        (mine,) = on(there, logits.clone())
        sampling.keep_bits(mine, *on(there, rows, packed))
        return [mine]

    def judge(ours: Outputs, _: Outputs) -> None:
        assert torch.equal(ours[0][kept], logits[kept]), "a token that may be chosen has changed"
        assert (ours[0][~kept] < -1e29).all(), "a token that a mask forbids may be chosen"

    return Trial("mask", run, judge)


def _adjust(setting: Setting) -> Trial:
    rng, num_rows, vocab = setting.rng("adjust_logits"), 9, setting.kernels.vocab
    logits = randn(num_rows, vocab, rng=rng)
    work = _make_penalties(num_rows, vocab, rng)

    def run(ops, there):
        (adjusted,) = on(there, logits)
        ops.adjust_logits(adjusted, work_on(there, work))
        return [adjusted]

    def judge(ours: Outputs, torchs: Outputs) -> None:
        torch.testing.assert_close(ours[0], torchs[0], rtol=1e-5, atol=1e-5)

    return Trial("adjust_logits", run, judge)


def _make_penalties(num_rows: int, vocab: int, rng: torch.Generator) -> PenaltyWork:
    """Make penalties: row i has seen 300 i tokens, and has as many biased ones; every third row has
    neither.
    """
    sizes = [min(300 * row, vocab) if row % 3 else 0 for row in range(num_rows)]
    starts = torch.tensor([sum(sizes[:row]) for row in range(num_rows + 1)], dtype=torch.int32)

    def distinct() -> torch.Tensor:
        picks = [torch.randperm(vocab, generator=rng)[:size] for size in sizes]
        return torch.cat(picks).int()

    tokens = distinct()
    pending = torch.tensor([row % 4 - 1 for row in range(num_rows)], dtype=torch.int32)
    previous = randint(0, vocab, 4, rng=rng)
    # One pending token was seen before by its row, and one is of a row that failed.
    previous[0], previous[1] = tokens[0], -1
    return PenaltyWork(
        entry_starts=starts,
        entry_tokens=tokens,
        entry_counts=randint(0, 4, len(tokens), rng=rng),
        pending=pending,
        previous=previous,
        repetition=0.5 + 2 * torch.rand(num_rows, generator=rng),
        frequency=randn(num_rows, rng=rng),
        presence=randn(num_rows, rng=rng),
        bias_starts=starts,
        bias_tokens=distinct(),
        bias=5 * randn(int(starts[-1]), rng=rng),
    )
