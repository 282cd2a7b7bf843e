"""Encodes a step as one row of numbers, for the ranks that only compute it.

    step, counts of adapters, rows, transfers and copies
    adapter    number of its placement, digest (4)
    row        request, index, start, adapter's place in the list or -1, adapter_start, whether it
               chooses tokens, number of drafts, place of the token before the first scored one,
               counts of scored tokens, tokens and blocks, tokens, blocks
    transfer   block_id, slot, is_out
    copy       block that is copied, and to which

Strings are not sent: a request has a number for as long as it is in every step, an adapter has the
number that all ranks were given when it was placed.
"""

import struct
from collections.abc import Callable, Sequence
from itertools import count

from engine.steps.batch import Batch, ScheduledRow, Scoring, Transfer
from engine.steps.segments import Tables
from engine.wire.messages import SamplingParams

_CHOSEN = SamplingParams(max_tokens=1)
"""Placeholder for the sampling parameters of a row; only the first rank samples and has them."""

_NOT_SCORED = Scoring(0, (), 0)

_DIGEST = struct.Struct("<4q")
_Adapter = tuple[int, str | None]
"""Number and digest of a placement."""


class BatchEncoder:
    """Encodes batches on the first rank.   tables: finds an adapter's place in its arena by key."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._requests: dict[str, int] = {}
        self._next_request = count(1)

    def encode(self, batch: Batch) -> list[int]:
        digests = {r.adapter_key: r.adapter_digest for r in batch.rows if r.adapter_key}
        places = {key: place for place, key in enumerate(digests)}
        self._number_requests(batch)
        counts = len(digests), len(batch.rows), len(batch.transfers), len(batch.copies)
        numbers = [batch.step, *counts]
        for key, digest in digests.items():
            assert digest is not None, "an adapter without a name"
            numbers += [self._tables(key)[1].number, *digest_numbers(digest)]
        for row in batch.rows:
            place = places[row.adapter_key] if row.adapter_key else -1
            scoring = row.scoring or _NOT_SCORED
            numbers += [
                self._requests[row.request_id], row.index, row.start, place, row.adapter_start,
                int(row.sampling is not None), row.num_drafts,
                scoring.first, len(scoring.token_ids),
                len(row.token_ids), len(row.block_ids),
                *row.token_ids, *row.block_ids,
            ]  # fmt: skip
        for transfer in batch.transfers:
            numbers += [transfer.block_id, transfer.slot, int(transfer.is_out)]
        for copy in batch.copies:
            numbers += copy
        return numbers

    def _number_requests(self, batch: Batch) -> None:
        if not batch.rows:
            return
        # A step refers to rows of the previous step only, so older numbers are dropped.
        known, self._requests = self._requests, {}
        for row in batch.rows:
            if (name := row.request_id) not in self._requests:
                self._requests[name] = known.get(name) or next(self._next_request)


def decode(numbers: Sequence[int]) -> Batch:
    """Decode a batch on another rank, where a placement's number is adapter key and generation."""
    numbers, at = tuple(numbers), 0

    def take(size: int) -> tuple[int, ...]:
        nonlocal at
        taken, at = numbers[at : at + size], at + size
        assert len(taken) == size, "less than a step"
        return taken

    step, num_adapters, num_rows, num_transfers, num_copies = take(5)
    named = [take(5) for _ in range(num_adapters)]
    adapters: list[_Adapter] = [(number, digest_of(digest)) for number, *digest in named]
    adapters.append((0, None))  # at place -1: no adapter
    rows = tuple(_row(take, adapters) for _ in range(num_rows))
    moves = [take(3) for _ in range(num_transfers)]
    transfers = tuple(Transfer(block_id, slot, bool(is_out)) for block_id, slot, is_out in moves)
    copies = tuple((source, target) for source, target in (take(2) for _ in range(num_copies)))
    assert at == len(numbers), "more than a step"
    return Batch(step, rows, transfers, copies)


def _row(take: Callable[[int], tuple[int, ...]], adapters: Sequence[_Adapter]) -> ScheduledRow:
    request, index, start, place, adapter_start, samples, num_drafts = take(7)
    first_scored, num_scored, num_tokens, num_blocks = take(4)
    number, digest = adapters[place]
    return ScheduledRow(
        request_id=str(request),
        index=index,
        token_ids=take(num_tokens),
        start=start,
        block_ids=take(num_blocks),
        adapter_key=str(number) if digest else None,
        adapter_digest=digest,
        adapter_generation=number,
        adapter_start=adapter_start,
        sampling=_CHOSEN if samples else None,
        num_drafts=num_drafts,
        scoring=Scoring(first_scored, (0,) * num_scored, 0) if num_scored else None,
    )


def digest_numbers(digest: str) -> tuple[int, ...]:
    return _DIGEST.unpack(bytes.fromhex(digest))


def digest_of(numbers: Sequence[int]) -> str:
    return _DIGEST.pack(*numbers).hex()
