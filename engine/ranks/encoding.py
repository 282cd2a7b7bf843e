"""Encodes a step for the ranks that only compute it, without what only the first rank needs: how
tokens are chosen. An adapter has the number that all ranks were given when it was placed.
"""

from dataclasses import replace

import msgspec

from engine.steps.batch import Batch
from engine.steps.segments import Tables
from engine.wire.messages import SamplingParams

_CHOSEN = SamplingParams(max_tokens=1)
"""Placeholder for the sampling parameters of a row; only the first rank samples and has them."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[Batch, tuple[bool, ...]])


def encode(batch: Batch, tables: Tables) -> bytes:
    """Encode a batch on the first rank.   tables: finds an adapter's place in its arena by key."""
    numbers = {key: tables(key)[1].number for key in batch.adapters}
    rows = tuple(
        row._replace(
            adapter_key=str(numbers[row.adapter_key]) if row.adapter_key else None,
            adapter_generation=numbers[row.adapter_key] if row.adapter_key else 0,
            sampling=None,
            prompt_token_ids=(),
            output_token_ids=(),
            banned_token_ids=(),
            is_constrained=False,
        )
        for row in batch.rows
    )
    samples = [row.sampling is not None for row in batch.rows]
    return _ENCODER.encode((replace(batch, rows=rows), samples))


def decode(data: bytes | bytearray) -> Batch:
    """Decode a batch on another rank, where a placement's number is adapter key and generation."""
    batch, samples = _DECODER.decode(data)
    pairs = zip(batch.rows, samples, strict=True)
    rows = tuple(row._replace(sampling=_CHOSEN) if chooses else row for row, chooses in pairs)
    return replace(batch, rows=rows)
