"""The sampler of a device gives what `engine.steps.sampler` gives for the same rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gpu.sampler import (
    MOST_GIVEN_LOGPROBS,
    MOST_TOP_LOGPROBS,
    Logprobs,
    SamplingInputs,
    choose,
    pack_mask,
)
from engine.grammar.matcher import mask_bytes
from engine.requests.request import PENDING_TOKEN
from engine.steps import sampler
from engine.steps.batch import BAD_LOGITS
from engine.wire.messages import SamplingParams
from kernels import reference
from tests.engine.test_sampler import VOCAB, make_logits, make_mask, make_row

MOST_ROWS = 9
POISON = -(2**31)


@pytest.fixture(autouse=True, scope="module")
def logprobs_of_two_rows_at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.gpu.sampler._TOLD_BYTES", 2 * 4 * VOCAB)
        yield


def chosen(logits, rows, masks=None, *, sources=None, previous=()):
    """Call the device's sampler as engine.steps.sampler.choose, with ints packed amid others."""
    inputs = SamplingInputs.of(rows, sources or [-1] * len(rows), logits.shape[1])
    packed = inputs.pack()
    ints = torch.full((len(packed) + 8,), POISON, dtype=torch.int32)
    ints[4:-4] = torch.from_numpy(packed)
    tokens = torch.full((MOST_ROWS,), POISON, dtype=torch.int32)
    tokens[: len(previous)] = torch.tensor(previous, dtype=torch.int32)
    there, here = (Logprobs.empty(MOST_ROWS, torch.empty, MOST_GIVEN_LOGPROBS) for _ in range(2))
    packed_masks = torch.zeros(len(masks or ()), 8 + mask_bytes(logits.shape[1]), dtype=torch.uint8)
    for target, (place, mask) in zip(packed_masks, (masks or {}).items(), strict=True):
        pack_mask(place, mask, target)
    choose(reference, logits, inputs, ints[4:-4], tokens, there, packed_masks)
    for target, source in zip(here.used(inputs.told), there.used(inputs.told), strict=True):
        target.copy_(source)
    assert (tokens[max(len(rows), len(previous)) :] == POISON).all()
    named = zip(inputs.told_rows.tolist(), here.read(inputs.told), strict=True)
    token_ids = tokens[: len(rows)].tolist()
    return token_ids, {i: told for i, told in named if token_ids[i] != BAD_LOGITS}


token = st.integers(0, VOCAB - 1)
any_row = st.builds(
    make_row,
    prompt=st.lists(token, max_size=9),
    output=st.lists(token, max_size=9),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 1e-300, 9.9e-6, 1.1e-5, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 200, 2**40]),
    top_p=st.sampled_from([1.0, 0.05, 0.9]),
    min_p=st.sampled_from([0.0, 0.01, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(
        st.integers(-3, VOCAB + 5) | st.just(2**40), st.floats(-20, 20, width=32), max_size=5
    ).map(lambda bias: tuple(bias.items())),
    logprobs=st.sampled_from([None, 0, 3, MOST_TOP_LOGPROBS]),
    logprob_token_ids=st.sampled_from(
        [(), (), (4,), (9, 0, 9, VOCAB), tuple(range(MOST_GIVEN_LOGPROBS))]
    ),
    allowed_token_ids=st.sampled_from([(), (), (4, 4, 99, VOCAB), (7,)]),
    banned=st.sampled_from([(), (4, 50, VOCAB)]),
)


any_mask = st.none() | st.sets(token, min_size=1, max_size=40).map(make_mask)


@given(
    st.lists(st.tuples(any_row, any_mask), max_size=MOST_ROWS), st.integers(0, 1000), st.booleans()
)
@settings(max_examples=200, deadline=None)
def test_tokens_and_logprobs_are_those_of_the_cpu(given_rows, seed, has_equal):
    rows = [row for row, _ in given_rows]
    masks = {place: mask for place, (_, mask) in enumerate(given_rows) if mask is not None}
    logits = make_logits(len(rows), seed=seed)
    if has_equal:
        logits = logits.round()
    assert chosen(logits.clone(), rows, masks) == sampler.choose(logits.clone(), rows, masks)


@pytest.mark.parametrize("known", [5, 0, VOCAB - 1])
def test_a_pending_token_counts_as_if_it_were_known(known):
    options = {"prompt": (5, 7), "presence_penalty": 1.0, "logit_bias": ((5, 2.0),)}
    for penalties in ({"repetition_penalty": 1.8}, {"frequency_penalty": 2.0}):
        row = make_row(output=(3, 5, known), seed=4, top_p=0.95, **options, **penalties)
        pending = row._replace(output_token_ids=(3, 5, PENDING_TOKEN))
        rows, unknown = [make_row(), row, row], [make_row(), pending, pending]
        wanted, ours = make_logits(3), make_logits(3)
        tokens, _ = sampler.choose(wanted, rows)
        assert chosen(ours, unknown, sources=[0, 2, 2], previous=[9, 9, known])[0] == tokens
        torch.testing.assert_close(ours, wanted)


def test_a_row_without_penalties_does_not_look_for_its_pending_token():
    rows = [make_row(logit_bias=((3, 1.0),)), make_row(output=(4,), presence_penalty=1.0)]
    inputs = SamplingInputs.of(rows, [0, 1], VOCAB)
    assert inputs.penalties["pending"].tolist() == [-1, 1]
    assert not SamplingInputs.of([make_row()] * 2, [0, 1], VOCAB).penalties, "no work for nobody"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_float64_is_aligned_in_the_packed_ints(count):
    rows = [make_row(output=(1, 2), presence_penalty=1.0, min_p=0.25)] * count
    inputs = SamplingInputs.of(rows, [-1] * count, VOCAB)
    packed = inputs.pack()
    assert packed.dtype == np.int32
    assert packed[: 2 * count].view(np.float64).tolist() == [0.25] * count
    views = inputs.views(torch.from_numpy(packed))
    assert views["uniform"].tolist() == [sampler.uniform(0, 2)] * count


def test_a_row_with_bad_logits_fails_alone_and_has_no_logprobs():
    row = make_row(logprobs=1, top_p=0.5, presence_penalty=1.0, output=(7,), seed=3)
    limits = SamplingParams(max_tokens=9, logprobs=1, allowed_token_ids=(1, 2))
    rows = [row, row._replace(sampling=limits, banned_token_ids=(7,)), row]
    for bad in (math.nan, math.inf, -math.inf):
        logits = make_logits(3)
        wanted = chosen(logits.clone(), rows)
        logits[1, 7] = bad
        token_ids, logprobs = chosen(logits, rows)
        assert token_ids == [wanted[0][0], BAD_LOGITS, wanted[0][2]]
        assert logprobs == {0: wanted[1][0], 2: wanted[1][2]}


def test_more_logprobs_than_the_vocabulary_has_are_all_of_them():
    _, logprobs = chosen(make_logits(1, vocab=4), [make_row(logprobs=20)])
    assert sorted(token for token, _ in logprobs[0].top) == [0, 1, 2, 3]


def test_a_bias_given_twice_is_added_twice():
    logits = torch.zeros(1, VOCAB)
    chosen(logits, [make_row(logit_bias=((3, 1.0), (3, 2.5)))])
    assert logits[0, 3].item() == 3.5
