"""The journal: what an engine generated, on disk before anybody sees it. Every bill rests on it.

It consists of append-only segments of numbered records. A step's progress is written before its
tokens leave, so that it survives a killed process; a step that ends requests is fdatasynced before
their final outputs leave, so that it survives a crash of the machine. On opening, every request
without an end is ended as `engine_failure` at its last progress. Settled segments are deleted.

On a full disk nothing of the step leaves, every open request ends as `engine_failure` in space that
was reserved for this, and no request is accepted until the space can be reserved again.
"""

import hashlib
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from engine.batch import StepResult
from engine.journal_files import Disk, DiskFull, JournalFiles
from engine.journal_records import (
    SET_ASIDE,
    Position,
    Record,
    SegmentDamaged,
    encode,
    follow,
    read_segment,
    readable_records,
    segment_paths,
)
from engine.messages import PROOF_TENANT, FinishReason, StopCause, Timings
from engine.records import (
    CheckpointRecord,
    EndRecord,
    JournalRecords,
    ProgressRecord,
    RequestProgress,
    ResidencyItem,
    ResidencyRecord,
    StartRecord,
)
from engine.request import RequestGroup

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 16 << 20
MAX_OPEN = 1088
"""Most requests open at once: 64 that run and 1,024 that wait, the defaults of engine.config."""
END_RECORD_BYTES = 1024
"""Most bytes of an end record; it takes about 700 with ids and digests as they are now."""
_LEAST_RESERVE_BYTES = 1 << 20
_CHECKPOINT_BYTES = 1024
_RETRY_S = 1.0
_MAX_ITEMS = 64
"""Most items of one residency record, so that a page of 256 records stays below 6 MB."""


class JournalFull(Exception):
    """The step could not be written. ends: of every open request; these records are on disk."""

    def __init__(self, ends: Sequence[EndRecord]) -> None:
        self.ends = ends
        super().__init__("the journal's disk is full: make room, and the engine serves again")


@dataclass(slots=True)
class _Open:
    """A request that has started and not ended, as the journal knows it."""

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


_Ending = tuple[_Open, FinishReason, StopCause, Timings | None]


def output_sha256(token_ids: list[int]) -> str:
    """Hex digest of output ids as uint32, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


class Journal:
    """One engine's journal in `directory`; opening it ends the requests that a crash left open.

    clock: Unix seconds.   max_open: most requests open at once; the reserve holds their ends.
    is_full: whether the reserve is missing, so that nothing may be accepted; `make_room` tries to
    get it.   damaged: whether a segment with a damaged line is set aside, without that line, or
    opening fails with SegmentDamaged. The totals count ends of such lines, so the audit finds them.
    Unsettled records are kept in memory until the settler has posted them.
    """

    def __init__(
        self,
        directory: Path,
        engine_id: str,
        base_revision: str,
        clock: Callable[[], float] = time.time,
        segment_bytes: int = SEGMENT_BYTES,
        max_open: int = MAX_OPEN,
        disk: Disk | None = None,
        damaged: Literal["set_aside", "stop"] = "stop",
    ) -> None:
        self.engine_id = engine_id
        self.base_revision = base_revision
        self.clock = clock
        self.max_open = max_open
        self.is_full = False
        self.files = JournalFiles(
            directory,
            segment_bytes=segment_bytes,
            reserve_bytes=max(
                _LEAST_RESERVE_BYTES, max_open * END_RECORD_BYTES + _CHECKPOINT_BYTES
            ),
            disk=disk or Disk(),
        )
        self._position: Position | None = None
        self._open: dict[str, _Open] = {}
        self._unsettled: deque[EndRecord | ResidencyRecord] = deque()
        self._accepted: dict[str, StartRecord] = {}  # to be written with the next step
        self._residencies: list[ResidencyRecord] = []  # likewise
        self._tried_at = 0.0
        self._damaged = damaged
        self._gap: SegmentDamaged | None = None  # the damage behind the last whole segment
        self._recover()

    @property
    def num_unsettled(self) -> int:
        return len(self._unsettled)

    @property
    def is_idle(self) -> bool:
        """Whether no request is open, apart from those of proofs, which nobody pays for."""
        starts = [*(opened.start for opened in self._open.values()), *self._accepted.values()]
        return all(start.tenant_id == PROOF_TENANT for start in starts)

    @property
    def is_settled(self) -> bool:
        """Whether no request is open, and every record is posted."""
        return self.is_idle and not self._unsettled and not self._residencies

    @property
    def last_seq(self) -> int:
        return self._now.seq

    @property
    def has_place(self) -> bool:
        """Whether the reserve has room for the end of one more request."""
        return len(self._open) + len(self._accepted) < self.max_open

    # ---- writing ----

    def start(self, request: RequestGroup) -> None:
        """Note an accepted request; its record is written with the next step, before any token."""
        self._accepted[request.request_id] = StartRecord(
            seq=0,
            at=self.clock(),
            request_id=request.request_id,
            tenant_id=request.message.tenant_id,
            adapter_digest=request.digest,
            num_prompt_tokens=request.num_prompt_tokens,
            token_lease=request.message.token_lease,
        )

    def note_residency(self, started_at: float, items: Sequence[ResidencyItem]) -> None:
        """Note adapters' residency since `started_at`; it is written with the next step."""
        for first in range(0, len(items), _MAX_ITEMS):
            page = tuple(items[first : first + _MAX_ITEMS])
            self._residencies.append(
                ResidencyRecord(seq=0, at=self.clock(), started_at=started_at, items=page)
            )

    def commit(self, result: StepResult) -> StepResult:
        """Write a step. When this returns, its outputs may leave.

        Raises JournalFull: its outputs must not leave, and every open request has ended. A request
        whose start could not be written counts as never accepted. Raises OSError if the disk fails
        in another way; the engine must then end.
        """
        if self.is_full:
            assert not result.progress, "it ran what it could not count"
            return result
        try:
            self._write_step(result)
        except DiskFull as full:
            self._note_full(full)
            self._accepted.clear()
            raise JournalFull(self._fail_open()) from full
        return result

    def _write_step(self, result: StepResult) -> None:
        """Write a step's records. Raises DiskFull; those written by then are whole and applied."""
        records: list[Record] = [*self._accepted.values(), *self._residencies]
        if result.progress:
            requests = tuple(result.progress)
            records.append(
                ProgressRecord(seq=0, at=self.clock(), step=result.step, requests=requests)
            )
        # Residency is synced: the settler may read it at once, and must not be ahead of the disk.
        self._write(records, sync=bool(self._residencies))
        self._accepted.clear()
        self._residencies.clear()
        if result.ended:
            self._write(self._ends(map(self._ending, result.ended)), sync=True)

    def _ending(self, request: RequestGroup) -> _Ending:
        assert request.finish_reason is not None
        assert request.stop_cause is not None
        opened = self._open[request.request_id]
        assert opened.output_token_ids == request.output_token_ids, "journal and engine disagree"
        return opened, request.finish_reason, request.stop_cause, request.timings

    def _ends(self, endings: Iterable[_Ending]) -> list[EndRecord]:
        """End records of these requests, numbered as the next records."""
        ends, position = [], self._now
        for opened, reason, cause, timings in endings:
            start, ids = opened.start, opened.output_token_ids
            position = position.ended(opened.num_prompt_tokens, opened.num_cached_tokens, len(ids))
            end = EndRecord(
                seq=position.seq,
                at=self.clock(),
                number=position.number,
                total_prompt_tokens=position.prompt_tokens,
                total_cached_tokens=position.cached_tokens,
                total_completion_tokens=position.completion_tokens,
                request_id=start.request_id,
                tenant_id=start.tenant_id,
                adapter_digest=start.adapter_digest,
                base_revision=self.base_revision,
                num_prompt_tokens=opened.num_prompt_tokens,
                num_cached_tokens=opened.num_cached_tokens,
                num_completion_tokens=len(ids),
                finish_reason=reason,
                stop_cause=cause,
                output_sha256=output_sha256(ids),
                started_at=start.at,
                first_token_at=opened.first_token_at,
                load_s=_rounded(timings.load_s) if timings else None,
                load_tier=timings.load_tier if timings else None,
                queue_s=_rounded(timings.queue_s) if timings else None,
            )
            ends.append(end)
        return ends

    def _fail_open(self) -> list[EndRecord]:
        """End every open request as `engine_failure`, in the reserve's space. Raises DiskFull."""
        ends = self._ends(
            (opened, "error", "engine_failure", None) for opened in self._open.values()
        )
        self._begin_segment(ends, in_reserve=True)
        return ends

    def _write(self, records: Sequence[Record], *, sync: bool) -> None:
        """Number records and append them, all or none. Raises DiskFull."""
        if not records:
            return
        if self.files.is_long:
            self._begin_segment()
        numbered = [replace(r, seq=seq) for seq, r in enumerate(records, self.last_seq + 1)]
        self.files.append(b"".join(map(encode, numbered)), sync=sync)
        for record in numbered:
            self._apply(record)

    def _begin_segment(self, ends: Sequence[EndRecord] = (), *, in_reserve: bool = False) -> None:
        now = self._now
        checkpoint = CheckpointRecord(
            seq=now.seq,
            at=self.clock(),
            number=now.number,
            total_prompt_tokens=now.prompt_tokens,
            total_cached_tokens=now.cached_tokens,
            total_completion_tokens=now.completion_tokens,
        )
        records: list[Record] = [checkpoint, *ends]
        self.files.begin(now.seq + 1, b"".join(map(encode, records)), in_reserve=in_reserve)
        for record in records:
            self._apply(record)

    # ---- a full disk ----

    def make_room(self) -> None:
        """Try to allocate the disk reserve again if the journal is full, at most once a second."""
        if not self.is_full:
            return
        if not self._tried_at <= (now := self.clock()) < self._tried_at + _RETRY_S:
            self._tried_at = now
            with suppress(DiskFull):
                self._reserve()
                logger.info("the journal has room again: serving")

    def _note_full(self, full: DiskFull) -> None:
        self.is_full = True
        logger.error(
            "no room in %s (%s): requests are refused until %d bytes are free",
            self.files.directory, full, self.files.reserve_bytes,
        )  # fmt: skip

    def _reserve(self) -> None:
        """Allocate the reserve, and end open requests, which nobody continues. Raises DiskFull."""
        self.files.allocate_reserve()
        if self._open or self._gap or not self.files.has_segment:
            self._fail_open()
            self._gap = None
            self.files.allocate_reserve()
        self.is_full = False

    # ---- the settler's side ----

    def read(self, settled_seq: int, limit: int) -> JournalRecords:
        """Read the next records to post after `settled_seq`, and delete what is settled."""
        while self._unsettled and self._unsettled[0].seq <= settled_seq:
            self._unsettled.popleft()
        # A segment stays while a request that began in it is open.
        oldest_open = min((o.start.seq for o in self._open.values()), default=self.last_seq + 1)
        self.files.delete_through(min(settled_seq, oldest_open - 1))
        records = list(islice(self._unsettled, limit))
        return JournalRecords(
            engine_id=self.engine_id,
            ends=tuple(record for record in records if isinstance(record, EndRecord)),
            residencies=tuple(record for record in records if isinstance(record, ResidencyRecord)),
            last_seq=self.last_seq,
            complete=len(records) == len(self._unsettled),
            open_request_ids=(*self._open, *self._accepted),
        )

    # ---- recovery ----

    def _recover(self) -> None:
        """Read an earlier run's segments, and end its open requests; without room, become full."""
        for path in segment_paths(self.files.directory):
            try:
                records = list(read_segment(path.read_bytes(), path.name))
            except SegmentDamaged as damage:
                self._pass_over(path, damage)
                continue
            before = self.last_seq
            if self._gap:
                self._position, self._gap = None, None
            for record, _ in records:
                self._apply(record)
            self.files.found(path, records[-1][1], before)
        if self._gap and self._position is None:
            raise self._gap  # Nothing says which numbers were given.
        try:
            self._reserve()
        except DiskFull as full:
            self._note_full(full)

    def _pass_over(self, path: Path, damage: SegmentDamaged) -> None:
        """Take over what can be read of a damaged segment, and set it aside, or raise `damage`."""
        is_new = path.suffix != SET_ASIDE
        if is_new and self._damaged == "stop":
            raise damage
        data, position, num_lost = path.read_bytes(), self._position, 0
        for record in readable_records(data):
            if isinstance(record, CheckpointRecord | EndRecord):
                known = position.number if position else record.number
                num_lost += max(0, record.number - known - isinstance(record, EndRecord))
                position = Position.of(record)
            # Later on, requests that began in it have ended, maybe in segments that are deleted.
            if is_new or isinstance(record, EndRecord | ResidencyRecord):
                self._note(record)
        # Numbers that may have been given, at most one for each byte, are not given again.
        self._position = position and replace(position, seq=position.seq + len(data))
        self._gap = damage
        if is_new:
            path.rename(path.with_suffix(SET_ASIDE))
            logger.error(
                "%s; the segment is set aside as *%s, and all but damaged lines is used: they held "
                "%d ends or more, which are free if they were not settled before",
                damage, SET_ASIDE, num_lost,
            )  # fmt: skip

    def _apply(self, record: Record) -> None:
        """Update open requests and unsettled records by a record. Raises JournalCorrupt."""
        self._position = follow(self._position, record)
        self._note(record)

    def _note(self, record: Record) -> None:
        match record:
            case StartRecord():
                self._open[record.request_id] = _Open(record)
            case ProgressRecord():
                for progress in record.requests:
                    # A request that has ended may have its start in a settled, deleted segment.
                    if opened := self._open.get(progress.request_id):
                        opened.add(progress, record.at)
            case EndRecord():
                self._open.pop(record.request_id, None)
                self._unsettled.append(record)
            case ResidencyRecord():
                self._unsettled.append(record)

    @property
    def _now(self) -> Position:
        return self._position or Position()

    def close(self) -> None:
        self.files.close()


def _rounded(seconds: float | None) -> float | None:
    """The time in whole microseconds, so that the record stays short."""
    return None if seconds is None else round(seconds, 6)
