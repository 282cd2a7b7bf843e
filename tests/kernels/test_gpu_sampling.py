"""Penalties and sampling of `kernels.gpu`: the reference's tokens, unless rounding decides."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference, sampling
from kernels.gpu.sampling import adjust_logits, sample
from kernels.work import PenaltyWork, SamplingWork
from tests.kernels.far_rows import far_rows
from tests.soak import soak

# The interpreter computes with numpy, which warns about the NaN and overflows of these tests.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


def ints(values):
    return torch.tensor(list(values), dtype=torch.int32)


def make_logits(rows, vocab, seed=0, spread=3.0):
    """Random logits in rows that are wider than the vocabulary, and NaN past it."""
    wide = torch.full((rows, vocab + 5), torch.nan)
    generator = torch.Generator().manual_seed(seed)
    wide[:, :vocab] = torch.randn(rows, vocab, generator=generator) * spread
    return wide[:, :vocab]


# ---- bias and penalties ----


def make_penalties(rows, previous=()):
    """Make the penalties of a step as kernels take them.

    rows: dicts of counts (token -> times said), bias, pending, repetition, frequency, presence.

    After the valid entries there are others, which would change other logits.
    """

    def starts(name):
        lengths = [len(row.get(name, {})) for row in rows]
        return ints(sum(lengths[:i]) for i in range(len(lengths) + 1))

    def joined(name, part):
        return [x for row in rows for x in getattr(row.get(name, {}), part)()]

    def floats(name, default):
        return torch.tensor([float(row.get(name, default)) for row in rows])

    return PenaltyWork(
        entry_starts=starts("counts"),
        entry_tokens=ints([*joined("counts", "keys"), 0, 1, 2]),
        entry_counts=ints([*joined("counts", "values"), 9, 9, 9]),
        pending=ints(row.get("pending", -1) for row in rows),
        previous=ints(previous),
        repetition=floats("repetition", 1),
        frequency=floats("frequency", 0),
        presence=floats("presence", 0),
        bias_starts=starts("bias"),
        bias_tokens=ints([*joined("bias", "keys"), 0, 1, 2]),
        bias=torch.tensor([*joined("bias", "values"), 99.0, 99.0, 99.0]),
    )


def assert_adjusts_as_the_reference(rows, vocab, previous=()):
    logits, work = make_logits(len(rows), vocab), make_penalties(rows, previous)
    wanted = logits.clone()
    reference.adjust_logits(wanted, work)
    adjust_logits(logits, work)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


VOCAB = 133
tokens = st.integers(0, VOCAB - 1)
penalized = st.fixed_dictionaries(
    {},
    optional={
        "counts": st.dictionaries(tokens, st.integers(0, 4), max_size=20),
        "bias": st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=9),
        "pending": st.integers(-1, 3),
        "repetition": st.floats(0.5, 3),
        "frequency": st.floats(-2, 2),
        "presence": st.floats(-2, 2),
    },
)


@given(st.lists(penalized, min_size=1, max_size=4), st.lists(tokens | st.just(-1), min_size=4))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_bias_and_penalties_are_the_references(rows, previous):
    assert_adjusts_as_the_reference(rows, VOCAB, previous)


def test_many_entries_and_biases_are_all_applied_once():
    counts = {token: token % 3 for token in range(0, 5000, 2)}
    row = {"repetition": 1.3, "frequency": 0.2, "presence": 0.3, "bias": dict.fromkeys(counts, 2.0)}
    late = {**row, "counts": counts, "pending": 0}
    # The pending token is an entry of the last tile, of the first tile, and no entry at all.
    for pending in (4998, 0, 3):
        assert_adjusts_as_the_reference([late, {}, row], 5000, [pending])


def test_a_pending_token_is_worth_the_same_as_one_that_is_known():
    options = {"repetition": 1.5, "frequency": 0.7, "presence": 0.4, "bias": {5: 3.0, 7: -1.0}}
    known = [{"counts": {5: 2, 9: 1}, **options}, {"counts": {7: 1, 9: 0}, **options}]
    unknown = [
        {"counts": {5: 1, 9: 1}, "pending": 1, **options},
        {"counts": {9: 0}, "pending": 0, **options},
    ]
    wanted, ours = make_logits(2, 33), make_logits(2, 33)
    adjust_logits(wanted, make_penalties(known))
    adjust_logits(ours, make_penalties(unknown, previous=[7, 5]))
    assert torch.equal(ours, wanted)


def test_a_row_with_nothing_to_do_keeps_its_bits():
    logits = make_logits(2, 33)
    before = logits.clone()
    adjust_logits(logits, make_penalties([{"repetition": 3.0, "presence": 1.0}, {}]))
    assert torch.equal(logits, before)


def test_penalties_of_rows_past_32_bits_are_their_own():
    logits = far_rows(3, 33, torch.float32)
    row = {"counts": {4: 1}, "bias": {5: 2.0}, "presence": 1.0, "pending": 0}
    adjust_logits(logits, make_penalties([{}, {}, row], previous=[6]))
    wanted = torch.zeros(3, 33)
    wanted[2, 4:7] = torch.tensor([-1.0, 2.0, -1.0])
    assert torch.equal(logits, wanted)


# ---- sampling ----


def make_work(rows):
    """Make the sampling parameters of a step as kernels take them.

    rows: dicts of temperature, min_p, top_p, top_k, u.
    """

    def column(name, default, dtype):
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    return SamplingWork(
        temperature=column("temperature", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float64),
        top_p=column("top_p", 1.0, torch.float64),
        top_k=column("top_k", 0, torch.int32),
        uniform=column("u", 0.5, torch.float64),
    )


def kept(logits, **row):
    """Mask of the tokens that the reference may draw for a row that is not greedy."""
    work = make_work([row])
    probs = sampling.probabilities(logits, work.temperature)
    return sampling.truncate(probs, work.min_p, work.top_k.long(), work.top_p)[0] > 0


PARAMS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.05, "temperature": 1.7},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 0.8},
    {"top_k": 10**6, "min_p": 1.0},
    {"top_k": 100, "min_p": 0.3},
]


@pytest.mark.parametrize("vocab", [1, 133, 20_001, *soak(7, 2048)])
def test_tokens_are_the_references(vocab):
    rows = [{**row, "u": u} for row in PARAMS for u in (0.11, 0.83)]
    logits, work = make_logits(len(rows), vocab, seed=vocab), make_work(rows)
    ours = sample(logits, work)
    assert ours.dtype == torch.int32
    assert torch.equal(ours, reference.sample(logits, work))


def test_the_lowest_and_the_highest_number_draw_tokens_that_are_kept():
    logits = make_logits(1, 133)
    for cut in ({}, {"top_k": 40}, {"top_p": 0.9}):
        rows = [{**cut, "u": u} for u in (0.0, 1 - 2**-53)]
        first, last = sample(logits.expand(2, -1), make_work(rows)).tolist()
        allowed = kept(logits, **cut).nonzero().squeeze(1).tolist()
        # Without a cut the first and the last token may weigh too little to be drawn.
        assert (first, last) == ((allowed[0], allowed[-1]) if cut else (0, 132))


@pytest.mark.parametrize(
    "row",
    [
        {"top_k": 6000},
        {"min_p": 0.7, "top_p": 0.9},
        *soak({"top_p": 0.95}, {"top_k": 5000, "top_p": 0.9}),
    ],
    ids=str,
)
def test_cuts_that_reach_past_the_likeliest_tokens_lists_are_exact(row):
    """Logits are nearly alike, so the lanes' lists do not hold all tokens above the cut."""
    logits = make_logits(3, 9001, spread=0.1)
    rows = [{**row, "u": u} for u in (0.001, 0.4, 0.999)]
    assert torch.equal(sample(logits, make_work(rows)), reference.sample(logits, make_work(rows)))


def test_a_lane_with_many_of_the_likeliest_tokens_loses_none():
    """The likeliest tokens are all in one lane, which keeps four; the cut lies among the rest."""
    logits = make_logits(1, 14_400, spread=0.5)
    likeliest = torch.arange(12, 14_400, 2048)[:7]
    logits[0, likeliest] = torch.linspace(19, 20, 7)
    for cut in ({"top_k": 6}, {"top_p": 0.8}):
        assert 4 < kept(logits, **cut).sum() < 7
        rows = [{**cut, "u": u} for u in (0.01, 0.2, 0.99)]
        drawn = sample(logits.expand(3, -1), make_work(rows)).tolist()
        assert drawn == reference.sample(logits.expand(3, -1), make_work(rows)).tolist()


def test_of_equal_logits_greedy_takes_the_lowest_token():
    logits = torch.zeros(3, 9001)
    logits[1, [8999, 4500, 4097]] = 1.0
    logits[2] = -1e30
    assert sample(logits, make_work([{"temperature": 0.0}] * 3)).tolist() == [0, 4097, 0]


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}], ids=str)
def test_equal_tokens_share_their_fate(cut):
    logits = torch.tensor([[2.0, 5.0, 4.0, 5.0, 4.0, 5.0, 0.0]])
    rows = [{**cut, "u": (i + 0.5) / 6} for i in range(6)]
    drawn = sample(logits.expand(6, -1), make_work(rows))
    assert set(drawn.tolist()) == set(kept(logits, **cut).nonzero().squeeze(1).tolist())
    assert drawn.bincount().tolist() == [0, 2, 0, 2, 0, 2]


@NUMPY_WARNS
def test_a_row_with_bad_logits_fails_alone():
    rows = [{"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {}] * 2
    logits = make_logits(8, 133)
    wanted = sample(logits, make_work(rows))
    for place, bad in zip((0, 2, 5, 7), (math.nan, math.inf, -math.inf, math.nan), strict=True):
        logits[place, 17 * place] = bad
        wanted[place] = -1
    assert torch.equal(sample(logits, make_work(rows)), wanted)


@NUMPY_WARNS
def test_extreme_temperatures_choose_the_likeliest_or_anything():
    logits = make_logits(1, 50)
    coldest = [{"temperature": t, "u": 0.999} for t in (1e-5, 1e-38, 1e-42)]
    drawn = sample(logits.expand(3, -1), make_work(coldest))
    assert drawn.tolist() == [logits.argmax().item()] * 3
    hottest = [{"temperature": 1e30, "u": (i + 0.5) / 50} for i in range(50)]
    assert sample(logits.expand(50, -1), make_work(hottest)).tolist() == list(range(50))


def test_a_rows_token_does_not_depend_on_its_neighbours():
    rows = [{**row, "u": 0.37} for row in PARAMS]
    logits = make_logits(len(rows), 700)
    alone = [sample(logits[i : i + 1], make_work([row])) for i, row in enumerate(rows)]
    assert torch.equal(sample(logits, make_work(rows)), torch.cat(alone))


@pytest.mark.parametrize(
    "cut", [{"temperature": 0.5}, {"top_p": 0.7}, *soak({}, {"top_k": 6})], ids=str
)
def test_frequencies_are_the_probabilities(cut):
    """The uniform numbers are evenly spread, so that chance moves no count by more than one."""
    logits, count = torch.linspace(1, -1, 10)[None], 20
    rows = [{**cut, "u": (i + 0.5) / count} for i in range(count)]
    drawn = sample(logits.expand(count, -1), make_work(rows))
    weights = (logits[0].double() / cut.get("temperature", 1.0)).exp() * kept(logits, **cut)
    expected = weights / weights.sum() * count
    counts = drawn.bincount(minlength=10)
    assert ((counts - expected).abs() <= 1).all()
    assert not counts[expected == 0].any()


any_row = st.fixed_dictionaries(
    {"u": st.floats(0, 1, exclude_max=True)},
    optional={
        "temperature": st.floats(1e-3, 1e3),
        "min_p": st.floats(0, 1),
        "top_p": st.floats(1e-3, 1),
        "top_k": st.integers(1, 300),
    },
)


@given(any_row, st.sampled_from([0.0, 0.01, 1.0, 10.0]), st.integers(1, 300), st.integers(0, 99))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_a_token_is_always_one_that_was_kept(row, spread, vocab, seed):
    """Tokens at the very edge of a cut are allowed, because rounding decides there."""
    logits = make_logits(1, vocab, seed=seed, spread=spread)
    (token,) = sample(logits, make_work([row])).tolist()
    looser = {"min_p": row.get("min_p", 0.0) * (1 - 1e-5), "top_p": row.get("top_p", 1.0) + 1e-5}
    allowed = kept(logits, **{**row, **looser})
    near = logits[0] >= logits[0][allowed].min() - 1e-5 * row.get("temperature", 1.0)
    assert 0 <= token < vocab
    assert near[token]


def test_logits_of_rows_past_32_bits_are_their_own():
    logits = far_rows(3, 33, torch.float32)
    logits[1, 5], logits[2, 9] = 50.0, 50.0
    drawn = sample(logits, make_work([{"u": 0.99}, {"top_k": 3}, {"temperature": 0.0}]))
    assert drawn.tolist() == [32, 5, 9]


def test_no_rows_are_no_tokens():
    assert sample(torch.empty(0, 9), make_work([])).tolist() == []
