"""Sampling against exact probabilities, against transformers, and row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels import sampling
from kernels.sampling import draw, likeliest, probabilities, truncate


def cut(probs, *, min_p=0.0, top_k=0, top_p=1.0):
    rows = len(probs)
    return truncate(
        probs,
        torch.full((rows,), min_p, dtype=torch.float64),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
    )


def drawn(logits, *, temperature=1.0, u=0.5, **cuts):
    probs = probabilities(logits, torch.full((len(logits),), temperature))
    return draw(cut(probs, **cuts), torch.full((len(logits),), u, dtype=torch.float64))


@pytest.mark.parametrize("vocab", [7, 133, 2000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize(
    ("warper", "cuts"),
    [
        (TopKLogitsWarper(1), {"top_k": 1}),
        (TopKLogitsWarper(300), {"top_k": 300}),
        (TopPLogitsWarper(0.1), {"top_p": 0.1}),
        (TopPLogitsWarper(0.97), {"top_p": 0.97}),
        (MinPLogitsWarper(0.2), {"min_p": 0.2}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else type(value).__name__,
)
def test_every_cut_keeps_what_transformers_keeps(warper, cuts, vocab, spread):
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab) * spread
    kept = cut(logits.softmax(-1), **cuts) > 0
    assert torch.equal(kept, warper(None, logits.clone()).isfinite())


def test_cuts_follow_one_another_min_p_then_top_k_then_top_p():
    torch.manual_seed(0)
    logits = torch.randn(4, 500) * 2
    wanted = logits.clone()
    for warper in (MinPLogitsWarper(0.02), TopKLogitsWarper(20), TopPLogitsWarper(0.8)):
        wanted = warper(None, wanted)
    kept = cut(logits.softmax(-1), min_p=0.02, top_k=20, top_p=0.8) > 0
    assert torch.equal(kept, wanted.isfinite())


def test_the_repetition_penalty_is_transformers_own():
    torch.manual_seed(0)
    logits, seen = torch.randn(3, 50), torch.randint(0, 50, (3, 20))
    wanted = RepetitionPenaltyLogitsProcessor(1.3)(seen, logits.clone())
    positions = (torch.arange(3)[:, None] * 50 + seen).flatten()
    sampling.penalize_repetition(logits, positions, torch.full((3,), 1.3))
    assert torch.equal(logits, wanted)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=400),
    st.integers(0, 405),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0, exclude_max=True),
    st.floats(0.05, 5.0),
)
@settings(max_examples=300, deadline=None)
def test_a_drawn_token_is_always_within_every_cut(values, top_k, top_p, min_p, u, temperature):
    logits = torch.tensor([values])
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    token = drawn(logits, temperature=temperature, u=u, **cuts).item()
    probs = (logits[0].double() / temperature).softmax(-1)
    likelier = probs[probs > probs[token] * (1 + 1e-5)]
    assert probs[token] >= min_p * probs.max() * (1 - 1e-5)
    if top_k:
        assert len(likelier) < top_k
    floor = max(min_p * probs.max(), probs.sort().values[-min(top_k or len(probs), len(probs))])
    total = probs[probs >= floor * (1 - 1e-5)].sum()
    assert likelier.sum() / total < top_p + 1e-5


@given(st.integers(1, 6), st.sampled_from([50, 300, 1500]), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_a_rows_token_does_not_depend_on_its_neighbours(rows, vocab, seed):
    torch.manual_seed(seed)
    # For some rows the likeliest few tokens are enough, others need the whole vocabulary.
    logits = torch.randn(rows, vocab) * torch.tensor([0.01, 3.0]).repeat(rows)[:rows, None]
    cuts = {"top_p": 0.9, "top_k": 280, "min_p": 0.001, "u": 0.37}
    alone = torch.cat([drawn(row[None], **cuts) for row in logits])
    assert torch.equal(drawn(logits, **cuts), alone)
    assert torch.equal(drawn(logits.flip(0), **cuts).flip(0), alone)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_give_tokens_that_are_kept(u):
    torch.manual_seed(0)
    for vocab in (1, 7, 133):
        probs = cut(torch.randn(50, vocab).softmax(-1), top_p=0.5)
        token = draw(probs, torch.full((50,), u, dtype=torch.float64))
        assert (probs.gather(1, token[:, None]) > 0).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e5])
def test_no_temperature_overflows(temperature):
    probs = probabilities(torch.tensor([[3e38, -3e38, 0.0]]), torch.tensor([temperature]))
    assert probs.isfinite().all()
    assert probs.sum() == pytest.approx(1)


@given(st.lists(st.sampled_from([-1.0, -2.0, -2.5, -9.0]), min_size=1, max_size=30), st.data())
@settings(max_examples=200, deadline=None)
def test_the_likeliest_of_equals_is_the_one_with_the_lower_id(values, data):
    values = values * data.draw(st.sampled_from([1, 9, 128]))
    k = data.draw(st.integers(1, min(40, len(values))))
    rows = torch.tensor([values, values[::-1]])
    logprobs, tokens = likeliest(rows, k)
    for row, got, ids in zip(rows.tolist(), logprobs.tolist(), tokens.tolist(), strict=True):
        assert ids == sorted(range(len(row)), key=lambda t: (-row[t], t))[:k]
        assert got == [row[t] for t in ids]
