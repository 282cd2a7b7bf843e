"""What this engine generated, on disk before anybody sees it: the source of every bill.

Append-only segments of lines, `<crc32 hex> <json>`, records numbered without gaps. One `write()` a
step carries the step's progress before its tokens leave (it survives a killed process); a step that
ends requests is fdatasynced before their final outputs leave (it survives the machine). On opening,
every request without an end is ended as `engine_failure` at its last progress. Segments go when
settled.
"""

import hashlib
import json
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.batch import StepResult
from engine.messages import (
    EndRecord,
    FinishReason,
    JournalRecords,
    ProgressRecord,
    RequestProgress,
    StartRecord,
    StopCause,
)
from engine.request import RequestGroup

SEGMENT_BYTES = 16 << 20

Record = StartRecord | ProgressRecord | EndRecord
_KINDS: dict[str, type[Record]] = {
    "start": StartRecord,
    "progress": ProgressRecord,
    "end": EndRecord,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class JournalCorrupt(Exception):
    """A record that was once whole is not any more: usage may be lost, so nothing is guessed."""


class _TornRecord(Exception):
    """A line whose write was cut off by a crash; only ever the last one."""


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
        """All answers, one after the other."""
        return [token for _, tokens in sorted(self.outputs.items()) for token in tokens]

    def add(self, progress: RequestProgress, at: float) -> None:
        self.num_prompt_tokens = progress.num_prompt_tokens
        self.num_cached_tokens = progress.num_cached_tokens
        self.outputs.setdefault(progress.index, []).extend(progress.new_token_ids)
        if progress.new_token_ids and self.first_token_at is None:
            self.first_token_at = at


def output_sha256(token_ids: list[int]) -> str:
    """Hex digest of output ids as uint32, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


def _encode(record: Record) -> bytes:
    fields = _fields(record)
    if isinstance(record, ProgressRecord):
        fields["requests"] = [_fields(progress) for progress in record.requests]
    body = json.dumps([_NAMES[type(record)], fields], separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _fields(record: Record | RequestProgress) -> dict[str, Any]:
    # dataclasses.asdict copies deeply: 0.5 ms of a step of 64 requests.
    return {name: getattr(record, name) for name in record.__slots__}


def _decode(line: bytes) -> Record:
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
        raise _TornRecord
    name, fields = json.loads(body)
    if name == "progress":
        fields["requests"] = tuple(_progress(p) for p in fields["requests"])
    return _KINDS[name](**fields)


def _progress(fields: dict[str, Any]) -> RequestProgress:
    return RequestProgress(**{**fields, "new_token_ids": tuple(fields["new_token_ids"])})


class Journal:
    """One engine's journal in `directory`; opening it recovers and closes what a crash left open.

    clock: Unix seconds.   unsettled end records are kept in memory until the settler has them.
    """

    def __init__(
        self,
        directory: Path,
        engine_id: str,
        base_revision: str,
        clock: Callable[[], float] = time.time,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.directory = directory
        self.engine_id = engine_id
        self.base_revision = base_revision
        self.clock = clock
        self.segment_bytes = segment_bytes
        self.last_seq = 0
        self._totals = (0, 0, 0, 0)  # ends, and their prompt, cached and completion tokens
        self._open: dict[str, _Open] = {}
        self._unsettled: deque[EndRecord] = deque()
        self._segments: deque[tuple[int, Path]] = deque()  # (last seq, file), oldest first
        self._pending: list[Record] = []
        directory.mkdir(parents=True, exist_ok=True)
        self._recover()

    @property
    def num_unsettled(self) -> int:
        return len(self._unsettled)

    # ---- writing ----

    def start(self, request: RequestGroup) -> None:
        """A request was accepted; its record is written with the next commit, before any token."""
        record = StartRecord(
            seq=self._next_seq(),
            at=self.clock(),
            request_id=request.request_id,
            tenant_id=request.message.tenant_id,
            adapter_digest=request.digest,
            num_prompt_tokens=request.num_prompt_tokens,
            token_lease=request.message.token_lease,
        )
        self._note(record)

    def commit(self, result: StepResult) -> StepResult:
        """Write a step. When this returns, its outputs may leave. Raises OSError: then they may
        not.
        """
        if result.progress:
            self._note(
                ProgressRecord(
                    seq=self._next_seq(),
                    at=self.clock(),
                    step=result.step,
                    requests=tuple(result.progress),
                )
            )
        for request in result.ended:
            assert request.finish_reason is not None
            assert request.stop_cause is not None
            opened = self._open[request.request_id]
            assert opened.output_token_ids == request.output_token_ids, (
                "journal and engine disagree"
            )
            self._end(opened, request.finish_reason, request.stop_cause)
        self._write(sync=bool(result.ended))
        return result

    def _end(self, opened: _Open, reason: FinishReason, cause: StopCause) -> None:
        start, ids = opened.start, opened.output_token_ids
        number, prompt, cached, completion = self._totals
        self._note(
            EndRecord(
                seq=self._next_seq(),
                at=self.clock(),
                number=number + 1,
                total_prompt_tokens=prompt + opened.num_prompt_tokens,
                total_cached_tokens=cached + opened.num_cached_tokens,
                total_completion_tokens=completion + len(ids),
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
            )
        )

    def _next_seq(self) -> int:
        self.last_seq += 1
        return self.last_seq

    def _note(self, record: Record) -> None:
        self._pending.append(record)
        self._apply(record)

    def _write(self, *, sync: bool) -> None:
        if not self._pending:
            return
        data = memoryview(b"".join(_encode(record) for record in self._pending))
        while data:
            data = data[os.write(self._file, data) :]
        if sync:
            os.fdatasync(self._file)
        self._pending = []
        self._segments[-1] = (self.last_seq, self._segments[-1][1])
        if os.fstat(self._file).st_size >= self.segment_bytes:
            os.fdatasync(self._file)
            os.close(self._file)
            self._begin_segment()

    # ---- the settler's side ----

    def read(self, settled_seq: int, limit: int) -> JournalRecords:
        """End records after `settled_seq`; what lies before it is deleted."""
        while self._unsettled and self._unsettled[0].seq <= settled_seq:
            self._unsettled.popleft()
        self._delete_settled(settled_seq)
        records = tuple(record for record, _ in zip(self._unsettled, range(limit), strict=False))
        return JournalRecords(
            engine_id=self.engine_id,
            records=records,
            last_seq=self.last_seq,
            complete=len(records) == len(self._unsettled),
            open_request_ids=tuple(self._open),
        )

    def _delete_settled(self, settled_seq: int) -> None:
        """Drop whole segments, but never the one in use, nor one that an open request began in."""
        oldest_open = min((o.start.seq for o in self._open.values()), default=self.last_seq + 1)
        while len(self._segments) > 1 and self._segments[0][0] <= min(settled_seq, oldest_open - 1):
            self._segments.popleft()[1].unlink()

    # ---- recovery ----

    def _recover(self) -> None:
        paths = sorted(self.directory.glob("*.journal"))
        # A segment is named for its first record, so that numbers go on when all else is deleted.
        self.last_seq = int(paths[0].stem) - 1 if paths else 0
        for path in paths:
            for record in self._read_segment(path):
                if record.seq != self.last_seq + 1:
                    raise JournalCorrupt(f"{path.name}: record {record.seq} after {self.last_seq}")
                self.last_seq = record.seq
                self._apply(record)
            self._segments.append((self.last_seq, path))
        self._begin_segment()
        for opened in list(self._open.values()):
            self._end(opened, "error", "engine_failure")
        self._write(sync=True)

    def _read_segment(self, path: Path) -> Iterator[Record]:
        """The records of a file; a torn last line is cut off, other damage is JournalCorrupt."""
        data = path.read_bytes()
        end = 0
        for line in data.splitlines(keepends=True):
            try:
                record = _decode(line)
            except _TornRecord:
                if end + len(line) < len(data):
                    raise JournalCorrupt(f"{path.name}: damaged at byte {end}") from None
                os.truncate(path, end)
                return
            yield record
            end += len(line)

    def _begin_segment(self) -> None:
        path = self.directory / f"{self.last_seq + 1:020d}.journal"
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        if not self._segments or self._segments[-1][1] != path:
            self._segments.append((self.last_seq, path))
        directory = os.open(self.directory, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def _apply(self, record: Record) -> None:
        """What a record means for what is open and what is unsettled."""
        if isinstance(record, StartRecord):
            self._open[record.request_id] = _Open(record)
        elif isinstance(record, ProgressRecord):
            for progress in record.requests:
                # A request that has ended may have begun in a segment that is settled and deleted.
                if opened := self._open.get(progress.request_id):
                    opened.add(progress, record.at)
        else:
            self._open.pop(record.request_id, None)
            self._totals = (
                record.number,
                record.total_prompt_tokens,
                record.total_cached_tokens,
                record.total_completion_tokens,
            )
            self._unsettled.append(record)

    def close(self) -> None:
        os.close(self._file)
