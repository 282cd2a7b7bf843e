"""Verification: a row with drafts gets the tokens that it gets one by one, as probable."""

import math
import random
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.steps.batch import BAD_LOGITS
from engine.steps.sampler import choose
from engine.steps.verification import Choices
from tests.engine.test_sampler import CHI_SQUARE_9, VOCAB, make_logits, make_mask, make_row

PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 1.5])},
    optional={
        "top_k": st.sampled_from([3, 50]),
        "top_p": st.just(0.8),
        "min_p": st.just(0.05),
        "repetition_penalty": st.just(1.6),
        "presence_penalty": st.just(1.0),
        "frequency_penalty": st.just(0.7),
        "logit_bias": st.just(((3, 2.0), (9, 30.0))),
        "logprobs": st.sampled_from([0, 3]),
    },
)


def with_drafts(row, drafts):
    return row._replace(token_ids=(*row.token_ids, *drafts), num_drafts=len(drafts))


def one_by_one(logits, row, most, masks):
    """(tokens, logprobs) of a row that chooses without drafts, from the logits of each place."""
    said, told = [], []
    for place in range(most):
        alone = row._replace(
            num_output_tokens=row.num_output_tokens + place,
            output_token_ids=(*row.output_token_ids, *said) if row.sampling.has_penalties else (),
        )
        mask = {0: masks[place]} if masks else None
        (token,), named = choose(logits[place : place + 1].clone(), [alone], mask)
        said.append(token)
        told.append(named.get(0))
    return said, told


def verified(logits, rows, masks):
    """(tokens, logprobs) of each row, from the logits of all places side by side."""
    choices = Choices.of(rows, masks)
    token_ids, logprobs = choose(logits[list(choices.places)], choices.rows, choices.masks)
    kept = choices.verify(rows, token_ids)
    return {n: ([token_ids[i] for i in k], [logprobs.get(i) for i in k]) for n, k in kept.items()}


@given(
    st.lists(st.tuples(PARAMS, st.integers(0, 7), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_rows_with_drafts_get_what_they_get_one_by_one(kinds, seed):
    chance = random.Random(seed)
    logits = make_logits(8 * len(kinds), seed=seed % 1000)
    rows, masks, expected, places = [], {}, {}, []
    for number, (params, num_drafts, is_constrained) in enumerate(kinds):
        row = make_row(
            prompt=(1, 2) if params.get("repetition_penalty") else (),
            output=(3, 3, 5), seed=chance.getrandbits(60), **params,
        )  # fmt: skip
        row = row._replace(is_constrained=is_constrained)
        if not row.sampling.has_penalties:
            row = row._replace(output_token_ids=())
        own = logits[8 * number : 8 * number + 1 + num_drafts]
        if is_constrained:
            masks[number] = [
                make_mask(chance.sample(range(VOCAB), 20)) for _ in range(1 + num_drafts)
            ]
        said, told = one_by_one(own, row, 1 + num_drafts, masks.get(number))
        drafts = [t if chance.random() < 0.8 else (t + 1) % VOCAB for t in said[:num_drafts]]
        wrong = [i for i, (a, b) in enumerate(zip(drafts, said, strict=False)) if a != b]
        count = 1 + (wrong[0] if wrong else num_drafts)
        expected[number] = said[:count], told[:count]
        rows.append(with_drafts(row, drafts))
        places += range(8 * number, 8 * number + 1 + num_drafts)
    assert verified(logits[places], rows, masks) == expected


def test_a_row_with_fewer_masks_verifies_fewer_drafts():
    logits = make_logits(4)
    row = make_row(temperature=0.0)._replace(is_constrained=True)
    said, _ = one_by_one(logits, row, 4, [make_mask(range(VOCAB))] * 4)
    masks = {0: [make_mask(range(VOCAB))] * 2}
    assert verified(logits, [with_drafts(row, said[:3])], masks)[0][0] == said[:2]
    assert verified(logits, [with_drafts(row, said[:3])], {}) == {}


def test_bad_logits_fail_a_row_unless_they_are_behind_a_rejected_draft():
    row, logits = make_row(temperature=0.0), make_logits(4)
    said, _ = one_by_one(logits, row, 4, None)
    logits[2, 7] = math.nan
    wrong = [(said[0] + 1) % VOCAB, *said[1:3]]
    assert verified(logits.clone(), [with_drafts(row, wrong)], {})[0][0] == said[:1]
    assert verified(logits.clone(), [with_drafts(row, said[:3])], {})[0][0] == [BAD_LOGITS]


DRAFT, TRIALS = 2, 10_000
LOGITS = torch.linspace(1, -1, 10)


def chi_square(counts):
    """How far the counts of tokens are from the probabilities of LOGITS."""
    expected = (TRIALS * LOGITS.softmax(-1)).tolist()
    return sum((counts[t] - expected[t]) ** 2 / expected[t] for t in range(10))


def test_a_token_in_a_drafts_place_has_the_models_distribution():
    rows = [with_drafts(make_row(seed=s), [DRAFT]) for s in range(TRIALS)]
    found = verified(LOGITS.repeat(2 * TRIALS, 1), rows, {})
    assert chi_square(Counter(tokens[0] for tokens, _ in found.values())) < CHI_SQUARE_9
    second = Counter(tokens[1] for tokens, _ in found.values() if len(tokens) == 2)
    share = second.total() / TRIALS
    assert math.isclose(share, LOGITS.softmax(-1)[DRAFT], abs_tol=0.01)
