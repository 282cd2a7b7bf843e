"""The journal: what an engine generated, on disk before anybody sees it. Every bill rests on it.

It consists of append-only segments of numbered records. A step's progress is written before its
tokens leave, so that it survives a killed process; a step that ends requests is fdatasynced before
their final outputs leave, so that it survives a crash of the machine. On opening, every request
without an end is ended as `engine_failure` at its last progress. Settled segments are deleted.

On a full disk nothing of the step leaves, every open request ends as `engine_failure` in space that
was reserved for this, and no request is accepted until the space can be reserved again.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

from engine.journal.files import Disk, DiskFull, JournalFiles
from engine.journal.lines import (
    SET_ASIDE,
    Record,
    SegmentDamaged,
    encode,
    read_segment,
    readable_records,
    segment_paths,
)
from engine.journal.state import Ending, JournalState
from engine.requests.request import RequestGroup
from engine.steps.batch import StepResult
from engine.wire.messages import PROOF_TENANT, ReadJournal
from engine.wire.records import (
    EndRecord,
    JournalRecords,
    ProgressRecord,
    ResidencyItem,
    ResidencyRecord,
    StartRecord,
)

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
    """A step could not be written, so all open requests ended. ends: their records, on disk."""

    def __init__(self, ends: Sequence[EndRecord]) -> None:
        self.ends = ends
        super().__init__("the journal's disk is full: make room, and the engine serves again")


class Journal:
    """One engine's journal in `directory`; opening it ends the requests that a crash left open.

    clock: Unix seconds.   max_open: most requests open at once; the reserve holds their ends.
    is_full: whether the reserve is missing, so that nothing may be accepted; `make_room` tries to
    get it.   damaged: what becomes of a segment with a damaged line. "set_aside" keeps the file for
    a person, and uses its other lines; "stop" raises SegmentDamaged. The totals in later records
    count the ends that were in damaged lines, so the audit finds them missing.
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
        self.clock = clock
        self.max_open = max_open
        self.is_full = False
        reserve_bytes = max(_LEAST_RESERVE_BYTES, max_open * END_RECORD_BYTES + _CHECKPOINT_BYTES)
        self.files = JournalFiles(directory, segment_bytes, reserve_bytes, disk or Disk())
        self._state = JournalState(base_revision)
        self._accepted: dict[str, StartRecord] = {}  # to be written with the next step
        self._residencies: list[ResidencyRecord] = []  # likewise
        self._tried_at = 0.0
        _read_segments(self.files, self._state, damaged)
        try:
            self._reserve()
        except DiskFull as full:
            self._note_full(full)

    @property
    def num_unsettled(self) -> int:
        return len(self._state.unsettled)

    @property
    def is_idle(self) -> bool:
        """Whether no request is open, apart from those of proofs, which nobody pays for."""
        starts = [*(each.start for each in self._state.open.values()), *self._accepted.values()]
        return all(start.tenant_id == PROOF_TENANT for start in starts)

    @property
    def is_settled(self) -> bool:
        """Whether no request is open, and every record is posted."""
        return self.is_idle and not self._state.unsettled and not self._residencies

    @property
    def last_seq(self) -> int:
        return self._state.now.seq

    @property
    def has_place(self) -> bool:
        """Whether the reserve has room for the end of one more request."""
        return len(self._state.open) + len(self._accepted) < self.max_open

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

    def commit(self, result: StepResult) -> None:
        """Write a step. When this returns, its outputs may leave.

        Raises JournalFull: its outputs must not leave, and every open request has ended. A request
        whose start could not be written counts as never accepted. Raises OSError if the disk fails
        in another way; the engine must then end.
        """
        if self.is_full:
            assert not result.progress, "it ran what it could not count"
            return
        try:
            self._write_step(result)
        except DiskFull as full:
            self._note_full(full)
            self._accepted.clear()
            raise JournalFull(self._fail_open()) from full

    def _write_step(self, result: StepResult) -> None:
        """Write a step's records. Raises DiskFull; those that were written before that stay."""
        records: list[Record] = [*self._accepted.values(), *self._residencies]
        if result.progress:
            requests = tuple(result.progress)
            records.append(
                ProgressRecord(seq=0, at=self.clock(), step=result.step, requests=requests)
            )
        # Residency is synced: the settler may read it at once, and must not be ahead of the disk.
        self._append(records, sync=bool(self._residencies))
        self._accepted.clear()
        self._residencies.clear()
        if result.ended:
            endings = map(self._ending, result.ended)
            self._append(self._state.ends(endings, self.clock()), sync=True)

    def _ending(self, request: RequestGroup) -> Ending:
        reason, cause = request.decisive.finish_reason, request.decisive.stop_cause
        assert reason is not None
        assert cause is not None
        counted = self._state.open[request.request_id].output_token_ids
        assert counted == request.output_token_ids, "journal and engine disagree"
        return Ending(request.request_id, reason, cause, request.timings)

    def _append(self, records: Sequence[Record], *, sync: bool) -> None:
        """Number records and append them, all or none. Raises DiskFull."""
        if not records:
            return
        if self.files.is_long:
            self._begin_segment()
        numbered = [replace(r, seq=seq) for seq, r in enumerate(records, self.last_seq + 1)]
        self.files.append(b"".join(map(encode, numbered)), sync=sync)
        self._state.apply(numbered)

    def _begin_segment(self, ends: Sequence[EndRecord] = (), *, in_reserve: bool = False) -> None:
        records: list[Record] = [self._state.now.checkpoint(self.clock()), *ends]
        data = b"".join(map(encode, records))
        self.files.begin(self.last_seq + 1, data, in_reserve=in_reserve)
        self._state.apply(records)

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

    def _reserve(self) -> None:
        """Allocate the reserve, and end open requests, which nobody continues. Raises DiskFull."""
        self.files.allocate_reserve()
        if self._state.open or self._state.has_gap:
            self._fail_open()
            self.files.allocate_reserve()
        self.is_full = False

    def _note_full(self, full: DiskFull) -> None:
        self.is_full = True
        logger.error(
            "no room in %s (%s): requests are refused until %d bytes are free",
            self.files.directory, full, self.files.reserve_bytes,
        )  # fmt: skip

    def _fail_open(self) -> list[EndRecord]:
        """End every open request as `engine_failure`, in the reserve's space. Raises DiskFull."""
        endings = (Ending(name, "error", "engine_failure") for name in self._state.open)
        ends = self._state.ends(endings, self.clock())
        self._begin_segment(ends, in_reserve=True)
        return ends

    # ---- the settler's side ----

    def answer(self, message: ReadJournal) -> JournalRecords:
        """The answer to a settler, which may mean another engine that had this one's place."""
        if message.engine_id != self.engine_id:
            return JournalRecords(
                read_id=message.read_id, engine_id=self.engine_id, last_seq=0, complete=False
            )
        return replace(self.read(message.settled_seq, message.limit), read_id=message.read_id)

    def read(self, settled_seq: int, limit: int) -> JournalRecords:
        """Read the next records to post after `settled_seq`, and delete what is settled."""
        self.files.delete_through(self._state.forget_settled(settled_seq))
        records = list(islice(self._state.unsettled, limit))
        return JournalRecords(
            engine_id=self.engine_id,
            ends=tuple(record for record in records if isinstance(record, EndRecord)),
            residencies=tuple(record for record in records if isinstance(record, ResidencyRecord)),
            last_seq=self.last_seq,
            complete=len(records) == self.num_unsettled,
            open_request_ids=(*self._state.open, *self._accepted),
        )

    def close(self) -> None:
        self.files.close()


def _read_segments(
    files: JournalFiles, state: JournalState, damaged: Literal["set_aside", "stop"]
) -> None:
    """Apply an earlier run's records to `state`, and take over its files.

    A damaged segment is dealt with as Journal says. Raises JournalCorrupt.
    """
    damage = None
    for path in segment_paths(files.directory):
        data, before = path.read_bytes(), state.now.seq
        try:
            state.apply(list(read_segment(data, path.name)))
            files.found(path, data.rindex(b"\n") + 1, before)
        except SegmentDamaged as error:
            damage, is_new = error, path.suffix != SET_ASIDE
            if is_new and damaged == "stop":
                raise
            num_lost = state.pass_over(readable_records(data), len(data), is_new=is_new)
            if is_new:
                path.rename(path.with_suffix(SET_ASIDE))
                logger.error(
                    "%s; the segment is set aside as *%s, and all but damaged lines is used: they "
                    "held %d ends or more, which are free if they were not settled before",
                    damage, SET_ASIDE, num_lost,
                )  # fmt: skip
    if damage and state.position is None:
        raise damage  # Nothing says which numbers were given.
