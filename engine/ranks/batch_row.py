"""A step as plain values, for the ranks that only compute it.

    step       number, rows, transfers, copies
    row        request_id, token_ids, start, block_ids, number of its adapter's placement or 0,
               digest, adapter_start, index, num_drafts, whether it chooses tokens, place of the
               token before the first scored one, count of scored tokens
    transfer   block_id, slot, is_out
    copy       block that is copied, and to which

Nothing else of a request is sent. An adapter has the number that all ranks were given when it was
placed.
"""

from typing import Any

from engine.steps.batch import Batch, ScheduledRow, Scoring, Transfer
from engine.steps.segments import Tables
from engine.wire.messages import SamplingParams

_CHOSEN = SamplingParams(max_tokens=1)
"""Placeholder for the sampling parameters of a row; only the first rank samples and has them."""

_NOT_SCORED = Scoring(0, (), 0)


def encode(batch: Batch, tables: Tables) -> tuple[object, ...]:
    """Encode a batch on the first rank.   tables: finds an adapter's place in its arena by key."""
    keys = {row.adapter_key for row in batch.rows if row.adapter_key}
    numbers: dict[str | None, int] = {key: tables(key)[1].number for key in keys}
    rows: list[tuple[object, ...]] = []
    for row in batch.rows:
        scoring = row.scoring or _NOT_SCORED
        rows.append((
            row.request_id, row.token_ids, row.start, row.block_ids,
            numbers.get(row.adapter_key, 0), row.adapter_digest, row.adapter_start, row.index,
            row.num_drafts, row.sampling is not None, scoring.first, len(scoring.token_ids),
        ))  # fmt: skip
    transfers = [
        (transfer.block_id, transfer.slot, transfer.is_out) for transfer in batch.transfers
    ]
    return batch.step, rows, transfers, batch.copies


def decode(step: Any) -> Batch:
    """Decode a batch on another rank, where a placement's number is adapter key and generation."""
    number, rows, transfers, copies = step
    decoded = tuple(_row(*row) for row in rows)
    return Batch(number, decoded, tuple(Transfer(*each) for each in transfers), copies)


def _row(
    request_id: str,
    token_ids: tuple[int, ...],
    start: int,
    block_ids: tuple[int, ...],
    number: int,
    digest: str | None,
    adapter_start: int,
    index: int,
    num_drafts: int,
    samples: bool,
    first_scored: int,
    num_scored: int,
) -> ScheduledRow:
    return ScheduledRow(
        request_id,
        token_ids,
        start,
        block_ids,
        str(number) if number else None,
        digest,
        number,
        _CHOSEN if samples else None,
        adapter_start=adapter_start,
        index=index,
        scoring=Scoring(first_scored, (0,) * num_scored, 0) if num_scored else None,
        num_drafts=num_drafts,
    )
