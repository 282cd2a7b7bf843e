"""Finds the adapter of each token of a step, and checks that it is the one its request named."""

from collections.abc import Callable, Sequence

from engine.steps.batch import ScheduledRow
from lora.batch import DeviceTables, Segment

Tables = Callable[[str], tuple[int, DeviceTables]]
"""Look-up of a resident adapter: key -> (generation, tables)."""


def find_segments(
    rows: Sequence[ScheduledRow], firsts: Sequence[int], tables: Tables, base_revision: str
) -> tuple[list[Segment], dict[int, str]]:
    """Find segments of adjacent tokens of one adapter, and adapter digests by row number.

    firsts: start of each row's tokens in the step.
    """
    segments: list[Segment] = []
    digests: dict[int, str] = {}
    for number, (first, row) in enumerate(zip(firsts, rows, strict=True)):
        num_before = max(0, row.adapter_start - row.start)
        if row.adapter_key is None or num_before >= len(row.token_ids):
            continue
        start, end = first + num_before, first + len(row.token_ids)
        found = _check(tables(row.adapter_key), row, base_revision)
        digests[number] = found.digest
        if segments and segments[-1].tables is found and segments[-1].end == start:
            start = segments.pop().start
        segments.append(Segment(start, end, found))
    return segments, digests


def find_firsts(rows: Sequence[ScheduledRow]) -> list[int]:
    """Start of each row's tokens in the step, followed by the end of the last row."""
    firsts = [0]
    for row in rows:
        firsts.append(firsts[-1] + len(row.token_ids))
    return firsts


def _check(placed: tuple[int, DeviceTables], row: ScheduledRow, base_revision: str) -> DeviceTables:
    """Assert that the adapter in the arena is the one that the request named."""
    generation, tables = placed
    assert tables.digest == row.adapter_digest, "another adapter lies in the arena"
    assert tables.base_revision == base_revision, "packed for another base model"
    assert generation == row.adapter_generation, "the adapter was replaced since scheduling"
    return tables
