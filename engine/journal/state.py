"""The fold of a journal's records: its position, the open requests, and the records to post.

Nothing here writes or reads a file. The writer applies each record once it is on disk, and opening
a journal applies the records that are there.
"""

import hashlib
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.journal.lines import Position, Record, follow
from engine.wire.messages import FinishReason, StopCause, Timings
from engine.wire.records import (
    CheckpointRecord,
    EndRecord,
    ProgressRecord,
    RequestProgress,
    ResidencyRecord,
    StartRecord,
)


@dataclass(slots=True)
class OpenRequest:
    """A request that has started and not ended."""

    start: StartRecord
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    first_token_at: float | None = None

    @property
    def output_token_ids(self) -> list[int]:
        """Token ids of all answers, one after the other."""
        return [token for _, tokens in sorted(self.outputs.items()) for token in tokens]

    def add(self, progress: RequestProgress, at: float) -> None:
        self.num_prompt_tokens = progress.num_prompt_tokens
        self.num_cached_tokens = progress.num_cached_tokens
        self.outputs.setdefault(progress.index, []).extend(progress.new_token_ids)
        if progress.new_token_ids and self.first_token_at is None:
            self.first_token_at = at


class Ending(NamedTuple):
    """How a request ended. timings: None if its engine did not end it."""

    request_id: str
    finish_reason: FinishReason
    stop_cause: StopCause
    timings: Timings | None = None


class JournalState:
    """The fold of a journal's records.

    base_revision: of the end records that it makes.
    position: None before the first record.   open: by request id.   unsettled: records to post,
    oldest first.   has_gap: whether records after `position` may be missing, as they are before the
    first one, so that a checkpoint must come next.
    """

    def __init__(self, base_revision: str) -> None:
        self._base_revision = base_revision
        self.position: Position | None = None
        self.has_gap = True
        self.open: dict[str, OpenRequest] = {}
        self.unsettled: deque[EndRecord | ResidencyRecord] = deque()

    @property
    def now(self) -> Position:
        return self.position or Position()

    def apply(self, records: Iterable[Record]) -> None:
        """Take the next records. Raises JournalCorrupt if one does not come next."""
        for record in records:
            self.position = follow(None if self.has_gap else self.position, record)
            self.has_gap = False
            self._note(record)

    def pass_over(self, records: Iterable[Record], size_bytes: int, *, is_new: bool) -> int:
        """Take what can be read of a damaged segment, and return how many ends it lacks at least.

        size_bytes: of the segment.   is_new: whether requests that began in it may be open. Later
        on they have ended, maybe in segments that are deleted.
        """
        num_lost = 0
        for record in records:
            if isinstance(record, CheckpointRecord | EndRecord):
                known = self.position.number if self.position else record.number
                num_lost += max(0, record.number - known - isinstance(record, EndRecord))
                self.position = Position.of(record)
            if is_new or isinstance(record, EndRecord | ResidencyRecord):
                self._note(record)
        if self.position:
            # Damaged lines may have had numbers, at most one for each byte: none is given again.
            self.position = self.position._replace(seq=self.position.seq + size_bytes)
        self.has_gap = True
        return num_lost

    def ends(self, endings: Iterable[Ending], at: float) -> list[EndRecord]:
        """Make the end records of open requests, numbered as the next records."""
        ends, position = [], self.now
        for ending in endings:
            opened, timings = self.open[ending.request_id], ending.timings
            start, ids = opened.start, opened.output_token_ids
            position = position.ended(opened.num_prompt_tokens, opened.num_cached_tokens, len(ids))
            end = EndRecord(
                **position._asdict(),
                at=at,
                request_id=start.request_id,
                tenant_id=start.tenant_id,
                adapter_digest=start.adapter_digest,
                base_revision=self._base_revision,
                num_prompt_tokens=opened.num_prompt_tokens,
                num_cached_tokens=opened.num_cached_tokens,
                num_completion_tokens=len(ids),
                finish_reason=ending.finish_reason,
                stop_cause=ending.stop_cause,
                output_sha256=output_sha256(ids),
                started_at=start.at,
                first_token_at=opened.first_token_at,
                load_s=_rounded(timings.load_s) if timings else None,
                load_tier=timings.load_tier if timings else None,
                queue_s=_rounded(timings.queue_s) if timings else None,
            )
            ends.append(end)
        return ends

    def forget_settled(self, settled_seq: int) -> int:
        """Forget records that are posted; return the last one that nothing needs any more.

        A request's records are needed while it is open.
        """
        while self.unsettled and self.unsettled[0].seq <= settled_seq:
            self.unsettled.popleft()
        return min([settled_seq, *(opened.start.seq - 1 for opened in self.open.values())])

    def _note(self, record: Record) -> None:
        match record:
            case StartRecord():
                self.open[record.request_id] = OpenRequest(record)
            case ProgressRecord():
                for progress in record.requests:
                    # A request that has ended may have its start in a settled, deleted segment.
                    if opened := self.open.get(progress.request_id):
                        opened.add(progress, record.at)
            case EndRecord():
                self.open.pop(record.request_id, None)
                self.unsettled.append(record)
            case ResidencyRecord():
                self.unsettled.append(record)


def output_sha256(token_ids: list[int]) -> str:
    """Hex digest of output ids as uint32, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


def _rounded(seconds: float | None) -> float | None:
    """The time in whole microseconds, so that the record stays short."""
    return None if seconds is None else round(seconds, 6)
