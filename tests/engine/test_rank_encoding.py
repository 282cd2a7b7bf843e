"""A step that is encoded holds all that a rank needs, and not how its tokens are chosen."""

from hypothesis import given, settings
from hypothesis.strategies import (
    booleans,
    builds,
    composite,
    integers,
    just,
    lists,
    none,
    sampled_from,
    tuples,
)

from engine.ranks.encoding import decode, encode
from engine.requests.request import PENDING_TOKEN
from engine.steps.batch import Batch, ScheduledRow, Scoring, Transfer
from engine.wire.messages import SamplingParams
from lora.batch import DeviceTables

ADAPTERS = {f"tenants/t/{k}": f"{k:x}" * 64 for k in (0, 7, 15)}
NUMBERS = {key: 40 + place for place, key in enumerate(ADAPTERS)}

NOT_SENT = {
    "prompt_token_ids": (), "output_token_ids": (), "banned_token_ids": (), "is_constrained": False,
}  # fmt: skip
WITH_PENALTIES = {
    "prompt_token_ids": (7,), "output_token_ids": (8,), "banned_token_ids": (9,),
    "is_constrained": True,
}  # fmt: skip

tokens = lists(integers(0, 1 << 20) | just(PENDING_TOKEN), min_size=1, max_size=9).map(tuple)
blocks = lists(integers(0, 1 << 30), min_size=1, max_size=5).map(tuple)


def tables(key):
    return 3, DeviceTables(ADAPTERS[key], "base-1", None, None, NUMBERS[key])


@composite
def rows(draw):
    key = draw(none() | sampled_from(sorted(ADAPTERS)))
    return ScheduledRow(
        request_id=draw(sampled_from("abcde")),
        index=draw(integers(0, 2)),
        token_ids=draw(tokens),
        start=draw(integers(0, 1 << 17)),
        block_ids=draw(blocks),
        adapter_key=key,
        adapter_digest=key and ADAPTERS[key],
        adapter_generation=3 if key else 0,
        adapter_start=draw(integers(0, 99)),
        sampling=draw(none() | just(SamplingParams(max_tokens=5, temperature=0.7))),
        seed=draw(integers(0, 9)),
        num_output_tokens=draw(integers(0, 9)),
        scoring=draw(none() | builds(Scoring, integers(0, 8), tokens, integers(0, 20))),
        num_drafts=draw(integers(0, 7)),
    )


transfers = tuples(integers(0, 999), integers(0, 99), booleans()).map(lambda t: Transfer(*t))
copies = tuples(integers(0, 999), integers(0, 999))
batches = lists(rows(), max_size=7).flatmap(
    lambda found: tuples(
        integers(0, 1 << 40),
        just(tuple(found)),
        lists(transfers).map(tuple),
        lists(copies).map(tuple),
    )
)


@given(batches.map(lambda parts: Batch(*parts)))
@settings(max_examples=100, deadline=None)
def test_a_step_read_back_is_the_step_as_far_as_a_rank_needs_it(batch):
    found = decode(encode(batch, tables))
    assert (found.step, found.transfers) == (batch.step, batch.transfers)
    assert found.copies == batch.copies
    for ours, theirs in zip(found.rows, batch.rows, strict=True):
        number = NUMBERS[theirs.adapter_key] if theirs.adapter_key else None
        named = {"adapter_key": number and str(number), "adapter_generation": number or 0}
        assert (ours.sampling is None) == (theirs.sampling is None)
        assert ours == theirs._replace(**named, sampling=ours.sampling, **NOT_SENT)


def test_a_step_does_not_say_how_its_tokens_are_chosen():
    params = SamplingParams(max_tokens=5, stop=(b"a secret",), logit_bias=((123456, 1.0),))
    row = ScheduledRow("a", (1,), 0, (0,), sampling=params, **WITH_PENALTIES)
    batch = Batch(1, (row,))
    assert encode(batch, tables) == encode(Batch(1, (row._replace(**NOT_SENT),)), tables)
    assert b"secret" not in encode(batch, tables)
    assert not decode(encode(batch, tables)).is_constrained
