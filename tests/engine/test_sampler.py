"""The sampler: penalties by formula, distributions, seeds, logprobs."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.matcher import mask_bytes
from engine.steps.batch import BAD_LOGITS, ScheduledRow
from engine.steps.sampler import choose, uniform
from engine.wire.messages import SamplingParams

VOCAB = 133
# CHI_SQUARE_9 is the 0.999 quantile of chi-square with 9 degrees of freedom.
CHI_SQUARE_9 = 27.88
NUM_DRAWS = 8000


def make_row(*, prompt=(), output=(), seed=0, index=None, banned=(), **sampling) -> ScheduledRow:
    return ScheduledRow(
        request_id="r", token_ids=(1,), start=0, block_ids=(0,),
        sampling=SamplingParams(max_tokens=9, **sampling), seed=seed,
        num_output_tokens=len(output) if index is None else index,
        prompt_token_ids=tuple(prompt), output_token_ids=tuple(output), banned_token_ids=banned,
    )  # fmt: skip


def make_mask(token_ids, vocab=VOCAB):
    bits = np.isin(np.arange(8 * mask_bytes(vocab)), list(token_ids))
    return np.packbits(bits, bitorder="little")


def make_logits(rows, vocab=VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(logits, row):
    """Logits after the bias and penalties of OpenAI's and CTRL's formulas, token by token."""
    params, result = row.sampling, list(logits)
    for token, bias in params.logit_bias:
        if 0 <= token < len(result):
            result[token] += bias
    for token in {*row.prompt_token_ids, *row.output_token_ids}:
        value, factor = result[token], params.repetition_penalty
        result[token] = value / factor if value > 0 else value * factor
    for token, count in Counter(row.output_token_ids).items():
        result[token] -= count * params.frequency_penalty + params.presence_penalty
    return result


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)
penalized = st.builds(
    make_row,
    prompt=tokens,
    output=tokens,
    repetition_penalty=st.floats(0.1, 10),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB + 5) | st.just(2**40), st.floats(-100, 100), max_size=9
    ).map(lambda bias: tuple(bias.items())),
    temperature=st.just(0.0),
)


@given(st.lists(penalized, min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_bias_and_penalties_are_their_formulas(rows, seed):
    logits = make_logits(len(rows), seed=seed)
    wanted = [
        adjusted(row_logits, row) for row_logits, row in zip(logits.tolist(), rows, strict=True)
    ]
    choose(logits, rows)
    assert torch.allclose(logits, torch.tensor(wanted), rtol=1e-5, atol=1e-5)


any_params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([1, 5, 200]),
        "top_p": st.sampled_from([0.05, 0.9]),
        "min_p": st.sampled_from([0.01, 1.0]),
        "repetition_penalty": st.just(1.3),
        "presence_penalty": st.just(0.5),
        "logit_bias": st.just(((3, 2.0), (10**9, 1.0))),
        "logprobs": st.sampled_from([0, 3]),
    },
)


@given(
    st.lists(st.tuples(any_params, st.integers(0, 2**64 - 1)), min_size=1, max_size=7), st.data()
)
@settings(max_examples=60, deadline=None)
def test_a_rows_choice_depends_on_itself_only(given_rows, data):
    rows = [make_row(prompt=(1, 2), output=(3, 3), seed=s, **p) for p, s in given_rows]
    logits = make_logits(len(rows), vocab=700)
    alone = [choose(logits[i : i + 1].clone(), [row]) for i, row in enumerate(rows)]
    order = data.draw(st.permutations(range(len(rows))))
    together, logprobs = choose(logits[list(order)], [rows[i] for i in order])
    assert together == [alone[i][0][0] for i in order]
    for place, i in enumerate(order):
        assert logprobs.get(place) == alone[i][1].get(0)


@given(
    st.lists(st.sampled_from([0, 5, 7, 130, 10**6]), max_size=4),
    st.lists(st.sampled_from([2, 5, 9, 10**6]), max_size=4),
    any_params,
    st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_nothing_is_chosen_but_what_is_allowed_and_not_banned(allowed, banned, params, seed):
    params = {**params, "logit_bias": ((9, 50.0), (5, 100.0)), "repetition_penalty": 10.0}
    limits = {"allowed_token_ids": tuple(allowed), "banned": tuple(banned)}
    row = make_row(prompt=(2, 9, 7), seed=seed, **params, **limits)
    logits, raw = make_logits(2, seed=seed), make_logits(2, seed=seed).log_softmax(-1)
    (token, other), logprobs = choose(logits, [row, make_row(temperature=0.0)])
    candidates = {t for t in allowed or range(VOCAB) if t < VOCAB} - set(banned)
    assert token in candidates or not candidates
    assert other == raw[1].argmax()
    assert not logprobs or logprobs[0].logprob == raw[0, token]


def test_the_same_seed_draws_the_same_and_the_position_matters():
    logits = make_logits(1).repeat(40, 1) * 0
    rows = [make_row(seed=7, index=i) for i in range(40)]
    first, again = choose(logits.clone(), rows)[0], choose(logits.clone(), rows)[0]
    assert first == again
    assert len(set(first)) > 20


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, 10),
        ({"mask": (0, 3, 4, 9)}, 4),
        ({"mask": (1, 2, 3, 7, 8), "temperature": 1.3, "top_p": 0.8}, 4),
        ({"temperature": 0.5}, 10),
        ({"top_k": 4}, 4),
        ({"min_p": 0.3}, None),
        ({"top_p": 0.7, "temperature": 1.7}, None),
        ({"frequency_penalty": 1.0, "output": (0, 0, 1)}, 10),
    ],
    ids=str,
)
def test_draws_follow_the_exact_probabilities(params, kept):
    """The test is a chi-square test of draws with fixed seeds over the allowed tokens."""
    logits = torch.linspace(1, -1, 10)
    params, masks = dict(params), None
    if (allowed := params.pop("mask", None)) is not None:
        masks = dict.fromkeys(range(NUM_DRAWS), make_mask(allowed, 10))
    rows = [make_row(seed=s, **params) for s in range(NUM_DRAWS)]
    counts = Counter(choose(logits.repeat(len(rows), 1), rows, masks)[0])
    values = adjusted(logits.tolist(), rows[0])
    values = [x if i in (allowed or range(10)) else -math.inf for i, x in enumerate(values)]
    weights = exact_weights(values, rows[0].sampling)
    assert kept in (None, sum(w > 0 for w in weights))
    chi_square = 0.0
    for token, weight in enumerate(weights):
        expected = len(rows) * weight / sum(weights)
        assert expected or not counts[token]
        chi_square += (counts[token] - expected) ** 2 / expected if expected else 0
    assert chi_square < CHI_SQUARE_9


def exact_weights(logits, params):
    """Weight of each token after all cuts, 0 if it is cut; the logits must be distinct."""
    weights = [math.exp(x / params.temperature) for x in logits]
    ranked = sorted(weights, reverse=True)
    ranked = [w for w in ranked if w >= params.min_p * ranked[0]][: params.top_k or None]
    nucleus = [w for i, w in enumerate(ranked) if sum(ranked[:i]) < params.top_p * sum(ranked)]
    return [w if w in nucleus else 0.0 for w in weights]


def test_logprobs_are_of_the_raw_logits_and_only_for_rows_that_asked():
    logits = make_logits(3)
    raw = logits.log_softmax(-1)
    bias = ((5, 100.0),)
    rows = [
        make_row(logprobs=2, logit_bias=bias, temperature=0.0),
        make_row(temperature=0.0),
        make_row(logprobs=0, temperature=2.0, top_k=3),
    ]
    token_ids, logprobs = choose(logits.clone(), rows)
    assert token_ids[0] == 5
    assert logprobs.keys() == {0, 2}
    assert logprobs[0].logprob == raw[0, 5].item()
    values, ids = raw[0].topk(2)
    assert logprobs[0].top == tuple(zip(ids.tolist(), values.tolist(), strict=True))
    assert logprobs[2].logprob == raw[2, token_ids[2]].item()
    assert logprobs[2].top == ()


def test_logprobs_of_given_tokens_stand_in_their_order_in_place_of_the_likeliest():
    logits = make_logits(2)
    raw = logits.log_softmax(-1)
    given = (7, 40, 7, 0, 2**30)
    rows = [make_row(logprobs=3, logprob_token_ids=given, logit_bias=((7, 9.0),)),
            make_row(logprobs=3)]  # fmt: skip
    _, logprobs = choose(logits, rows)
    assert logprobs[0].top == tuple((i, raw[0, i].item()) for i in (7, 40, 0))
    assert [token for token, _ in logprobs[1].top] == raw[1].topk(3).indices.tolist()


def test_a_rank_is_the_tokens_place_among_all_and_of_equal_ones_the_lower_comes_first():
    logits = make_logits(9).round()
    order = logits.sort(dim=-1, descending=True, stable=True).indices.tolist()
    token_ids, logprobs = choose(logits, [make_row(logprobs=0, seed=i) for i in range(9)])
    ranks = [logprobs[i].rank for i in range(9)]
    assert ranks == [order[i].index(token_id) + 1 for i, token_id in enumerate(token_ids)]
    assert max(ranks) > 9


def test_a_row_with_bad_logits_fails_alone_and_has_no_logprobs():
    for bad in (math.nan, math.inf, -math.inf):
        logits = make_logits(3)
        row = make_row(logprobs=1, top_p=0.5, repetition_penalty=1.2, output=(7,), seed=3)
        wanted = choose(logits.clone(), [row] * 3)
        logits[1, 7] = bad
        token_ids, logprobs = choose(logits, [row] * 3)
        assert token_ids == [wanted[0][0], BAD_LOGITS, wanted[0][2]]
        assert logprobs == {0: wanted[1][0], 2: wanted[1][2]}


def test_more_logprobs_than_the_vocabulary_has_are_all_of_them():
    _, logprobs = choose(make_logits(1, vocab=4), [make_row(logprobs=20)])
    assert sorted(token for token, _ in logprobs[0].top) == [0, 1, 2, 3]


def test_half_precision_logits_are_penalized_in_full_precision():
    logits = torch.tensor([[64.0, 64.0]], dtype=torch.bfloat16)
    row = make_row(temperature=0.0, output=(0,), presence_penalty=0.01)
    assert choose(logits, [row])[0] == [1]


def test_uniforms_of_a_seed_are_spread_evenly_and_differ_between_seeds():
    numbers = torch.tensor([uniform(7, i) for i in range(20_000)])
    counts = torch.histc(numbers, bins=20, min=0, max=1) / 1000
    assert counts.min() > 0.88
    assert counts.max() < 1.12
    assert numbers.max() < 1
    assert len({uniform(seed, 0) for seed in range(1000)}) == 1000
