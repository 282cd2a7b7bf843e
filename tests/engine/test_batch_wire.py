"""A step as plain values holds all that a rank needs, and nothing of what was asked for."""

import marshal

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

from engine.ranks.batch_row import decode, encode
from engine.requests.request import PENDING_TOKEN
from engine.steps.batch import Batch, ScheduledRow, Scoring, Transfer
from engine.wire.messages import SamplingParams
from lora.batch import DeviceTables

ADAPTERS = {f"tenants/t/{k}": f"{k:x}" * 64 for k in (0, 7, 15)}
NUMBERS = {key: 40 + place for place, key in enumerate(ADAPTERS)}

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


def sees(row, adapter):
    """Fields of a row that a rank's computation uses. adapter: the rank's name of the adapter."""
    return (
        row.request_id, row.index, row.token_ids, row.start, row.block_ids, adapter,
        row.adapter_digest,
        row.adapter_start if row.adapter_key else None, row.sampling is not None,
        row.num_drafts, row.scoring and (row.scoring.first, len(row.scoring.token_ids)),
    )  # fmt: skip


@given(batches.map(lambda parts: Batch(*parts)))
@settings(max_examples=100, deadline=None)
def test_a_step_read_back_is_the_step_as_far_as_a_rank_needs_it(batch):
    found = decode(marshal.loads(marshal.dumps(encode(batch, tables))))
    assert (found.step, found.transfers, found.copies) == (
        batch.step, batch.transfers, batch.copies,
    )  # fmt: skip
    for ours, theirs in zip(found.rows, batch.rows, strict=True):
        number = NUMBERS[theirs.adapter_key] if theirs.adapter_key else None
        assert ours.adapter_key == (number and str(number))
        assert ours.adapter_generation == (number or 0)
        assert sees(ours, number) == sees(theirs, number)
        assert ours.sampling in (None, SamplingParams(max_tokens=1)), "nothing of what was asked"
