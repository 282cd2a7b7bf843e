"""Penalties and drawn tokens, which are the reference's unless rounding decides."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from engine.grammar.matcher import mask_bytes
from kernels import reference, sampling
from kernels.work import PenaltyWork, SamplingWork
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import (
    Outputs,
    Trial,
    apart,
    check_gaps,
    is_same,
    on,
    randint,
    randn,
    work_on,
)

_ROUNDING = 1e-5
"""Error of a cumulative share: sums of float32 and of integers are no further apart."""

Row = dict[str, float]
"""Options of a row that are not the usual ones: temperature, min_p, top_p, top_k, u."""

_CUTS: list[Row] = [
    {"temperature": 0.0}, {}, {"temperature": 0.3}, {"min_p": 0.05}, {"top_k": 1}, {"top_k": 40},
    {"top_p": 0.9}, {"top_p": 0.05, "temperature": 1.7}, {"top_k": 6000}, {"top_p": 0.99},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 0.8}, {"top_k": 100, "min_p": 0.3},
    {"top_k": 10**6, "min_p": 1.0},
]  # fmt: skip
_LAST = 1 - 2**-53
"""The highest uniform number."""


def sampling_trials(setting: Setting) -> Iterator[Trial]:
    yield from sized_trials(setting)
    yield from _of_special_logits(setting)
    yield _mask(setting)


def sized_trials(setting: Setting) -> Iterator[Trial]:
    """Trials on the setting's vocabulary."""
    yield _adjust(setting)
    yield from _of_cuts(setting)


def make_choices(num_rows: int, rng: torch.Generator) -> SamplingWork:
    """Make the options of rows, which have all kinds of cuts in turn."""
    return _work([_CUTS[row % len(_CUTS)] for row in range(num_rows)], rng)


def _work(rows: Sequence[Row], rng: torch.Generator) -> SamplingWork:
    """Options of rows; those that name no `u` draw a random one."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    random = torch.rand(len(rows), generator=rng, dtype=torch.float64).tolist()
    return SamplingWork(
        temperature=column("temperature", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float64),
        top_p=column("top_p", 1.0, torch.float64),
        top_k=column("top_k", 0, torch.int32),
        uniform=torch.tensor(
            [row.get("u", u) for row, u in zip(rows, random, strict=True)], dtype=torch.float64
        ),
    )


def _of_cuts(setting: Setting) -> Iterator[Trial]:
    """Every cut twice, with bad logits in some rows; the ends of the interval; random cuts."""
    rng, vocab = setting.rng("cuts"), setting.kernels.vocab
    rows = _CUTS * 2
    logits = 3 * randn(len(rows), vocab, rng=rng)
    bad = {1: torch.nan, 5: torch.inf, len(_CUTS): -torch.inf, len(_CUTS) + 6: torch.nan}
    for row, value in bad.items():
        logits[row, 17 * row % vocab] = value
    yield _sample(setting, "sample", logits, rows, rng)
    rows = [{**cut, "u": u} for cut in ({}, {"top_k": 40}, {"top_p": 0.9}) for u in (0.0, _LAST)]
    yield _sample(setting, "sample, ends", randn(6, vocab, rng=rng), rows, rng)
    columns = torch.rand(12, 5, generator=rng, dtype=torch.float64)
    scales = torch.tensor([3.0, 1.0, 1.0, 300.0, 1.0])
    names = ("temperature", "min_p", "top_p", "top_k", "u")
    rows = [dict(zip(names, row, strict=True)) for row in (0.01 + scales * columns).tolist()]
    rows = [{**row, "top_k": int(row["top_k"]), "u": row["u"] % 1} for row in rows]
    yield _sample(setting, "sample, random cuts", 10 * randn(12, vocab, rng=rng), rows, rng)


def _of_special_logits(setting: Setting) -> Iterator[Trial]:
    rng = setting.rng("special logits")
    nearly_alike = 0.1 * randn(1, 9001, rng=rng)
    # The lanes' lists do not hold all tokens above the cut.
    rows = [{"top_k": 6000, "u": 0.999}, {"min_p": 0.7, "top_p": 0.9, "u": 0.001}]
    rows += [{"top_k": 5000, "top_p": 0.9, "u": 0.4}]
    yield _sample(setting, "sample, deep cuts", nearly_alike.expand(len(rows), -1), rows, rng)
    # The likeliest tokens are all in one lane, which keeps four; the cut lies among the rest.
    of_a_lane = randn(1, 14_400, rng=rng) / 2
    of_a_lane[0, torch.arange(12, 14_400, 2048)[:7]] = torch.linspace(19, 20, 7)
    rows = [{**cut, "u": u} for cut in ({"top_k": 6}, {"top_p": 0.8}) for u in (0.01, 0.2, 0.99)]
    yield _sample(setting, "sample, one lane", of_a_lane.expand(len(rows), -1), rows, rng)
    ties = torch.zeros(3, 9001)
    ties[1, [8999, 4500, 4097]], ties[2] = 1.0, -1e30
    yield _sample(setting, "sample, the first of equals", ties, [{"temperature": 0.0}] * 3, rng)
    equals = torch.tensor([[2.0, 5.0, 4.0, 5.0, 4.0, 5.0, 0.0]])
    cuts = {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}
    rows = [{**cut, "u": (i + 0.5) / 6} for cut in cuts for i in range(6)]
    yield _sample(setting, "sample, equals", equals.expand(len(rows), -1), rows, rng)
    rows = [{"temperature": t, "u": 0.999} for t in (1e-5, 1e-38, 1e-42)]
    rows += [{"temperature": 1e30, "u": (i + 0.5) / 50} for i in range(50)]
    yield _sample(setting, "sample, temperatures", randn(1, 50, rng=rng).expand(53, -1), rows, rng)
    one = randn(2, 1, rng=rng)
    yield _sample(setting, "sample, a vocabulary of one", one, [{"top_p": 0.5}, {"top_k": 3}], rng)


def _sample(
    setting: Setting, name: str, logits: torch.Tensor, rows: Sequence[Row], rng: torch.Generator
) -> Trial:
    if not setting.is_dry:  # a GPU compiles a kernel for each size of a vocabulary
        logits = pad(logits, (0, setting.kernels.vocab - logits.shape[1]), value=-1e30)
    work = _work(rows, rng)

    def run(ops, there):
        return [ops.sample(*apart(there, logits), work_on(there, work))]

    def judge(ours: Outputs, torchs: Outputs) -> None:
        mine, theirs = ours[0].long(), torchs[0].long()
        is_settled = (theirs < 0) | (work.temperature == 0)
        assert torch.equal(mine[is_settled], theirs[is_settled]), "greedy or bad rows differ"
        assert (mine[~is_settled] >= 0).all(), "a good row is called bad"
        assert (mine < logits.shape[1]).all(), "a token is beyond the vocabulary"
        _check_draws(logits[~is_settled], _rows(work, ~is_settled), mine[~is_settled])

    return Trial(name, run, judge)


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
        if ops is reference:  # its rows are adjacent
            adjusted = logits.clone()
            ops.adjust_logits(adjusted, work)
            return [adjusted]
        (adjusted,) = apart(there, logits)
        ops.adjust_logits(adjusted, work_on(there, work))
        check_gaps(adjusted)
        return [adjusted]

    def judge(ours: Outputs, torchs: Outputs) -> None:
        assert is_same(ours[0][0], logits[0]), "a row with nothing to do has changed"
        torch.testing.assert_close(ours[0], torchs[0], rtol=1e-5, atol=1e-5)

    return Trial("adjust_logits", run, judge)


def _make_penalties(num_rows: int, vocab: int, rng: torch.Generator) -> PenaltyWork:
    """Make penalties: row i has seen 300 i tokens, and has as many biased ones; every third row has
    neither. After the valid entries there are others, which would change other logits.
    """
    sizes = [min(300 * row, vocab) if row % 3 else 0 for row in range(num_rows)]
    starts = torch.tensor([sum(sizes[:row]) for row in range(num_rows + 1)], dtype=torch.int32)

    def distinct() -> torch.Tensor:
        picks = [torch.randperm(vocab, generator=rng)[:size] for size in sizes]
        return torch.cat(picks).int()

    tokens = distinct()
    pending = torch.tensor([row % 4 - 1 for row in range(num_rows)], dtype=torch.int32)
    previous = randint(0, vocab, 4, rng=rng)
    # Pending tokens are the first entry of row 1, one of a row that failed, no entry of row 3, and
    # the last entry of row 7.
    previous[0], previous[1], previous[2] = tokens[0], -1, tokens[starts[8] - 1]
    return PenaltyWork(
        entry_starts=starts,
        entry_tokens=torch.cat((tokens, torch.arange(3).int())),
        entry_counts=randint(0, 4, len(tokens) + 3, rng=rng),
        pending=pending,
        previous=previous,
        repetition=0.5 + 2 * torch.rand(num_rows, generator=rng),
        frequency=randn(num_rows, rng=rng),
        presence=randn(num_rows, rng=rng),
        bias_starts=starts,
        bias_tokens=torch.cat((distinct(), torch.arange(3).int())),
        bias=5 * randn(len(tokens) + 3, rng=rng),
    )
