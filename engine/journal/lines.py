"""Encodes and reads the journal's lines, `<crc32 hex> <json>`, each of which is one record.

A segment is a file of lines that begins with a checkpoint; it is named for the number of the next
record. Numbers and totals continue from record to record and from segment to segment, so that a
missing record is noticed.
"""

import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from engine.wire.records import (
    JOURNAL_VERSION,
    CheckpointRecord,
    EndRecord,
    ProgressRecord,
    RequestProgress,
    ResidencyItem,
    ResidencyRecord,
    StartRecord,
)

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
Record = CheckpointRecord | StartRecord | ProgressRecord | EndRecord | ResidencyRecord
_KINDS: dict[str, type[Record]] = {
    "checkpoint": CheckpointRecord,
    "start": StartRecord,
    "progress": ProgressRecord,
    "end": EndRecord,
    "residency": ResidencyRecord,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_PARTS: dict[str, tuple[str, Callable[..., object]]] = {
    "progress": ("requests", RequestProgress),
    "residency": ("items", ResidencyItem),
}
"""Kinds of records that have a list of parts: the list's field, and the type of its parts, each of
which is a list of its values in the file.
"""

SET_ASIDE = ".damaged"
"""Suffix of a segment that cannot be read to its end and is kept for a person to look at."""


class JournalCorrupt(Exception):
    """Records that were once whole are damaged: usage may be lost, so nothing is guessed."""


class OtherJournalVersion(JournalCorrupt):
    """A segment's records have another version."""

    def __init__(self, found: object) -> None:
        super().__init__(
            f"the journal has version {found}, and this build reads version {JOURNAL_VERSION}: let "
            "the release that wrote it settle it"
        )


class SegmentDamaged(JournalCorrupt):
    """A line of a segment is not what its checksum says."""


class Position(NamedTuple):
    """Place in the journal after a record: its seq, the number of ends so far, and their totals, as
    records of ends and checkpoints state them.
    """

    seq: int = 0
    number: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_completion_tokens: int = 0

    @classmethod
    def of(cls, record: EndRecord | CheckpointRecord) -> "Position":
        """The position that the record itself states."""
        return cls._make(_STATED(record))

    def checkpoint(self, at: float) -> CheckpointRecord:
        """The record that states this position."""
        return CheckpointRecord(at=at, **self._asdict())

    def ended(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> "Position":
        """The position after the next record, if that is an end record with these counts."""
        return Position(
            self.seq + 1,
            self.number + 1,
            self.total_prompt_tokens + prompt_tokens,
            self.total_cached_tokens + cached_tokens,
            self.total_completion_tokens + completion_tokens,
        )

    def after(self, record: Record) -> "Position":
        """The position after `record`. Raises JournalCorrupt if the record does not come next."""
        match record:
            case CheckpointRecord():
                stated, due = Position.of(record), self
            case EndRecord(num_prompt_tokens=p, num_cached_tokens=c, num_completion_tokens=n):
                stated, due = Position.of(record), self.ended(p, c, n)
            case _:
                stated, due = self._replace(seq=record.seq), self._replace(seq=self.seq + 1)
        if stated != due:
            raise JournalCorrupt(f"where {due} was due the journal says {stated}")
        return due


_STATED = attrgetter(*Position._fields)


def read_records(directory: Path) -> Iterator[Record]:
    """Yield the whole records in a journal's directory, oldest first, without a torn last line.

    Nothing is written, so this may run beside the engine. Raises JournalCorrupt.
    """
    position: Position | None = None
    with ExitStack() as files:
        opened: list[BinaryIO | None] = []
        # All segments are opened first, since the engine deletes settled ones, oldest first.
        for path in segment_paths(directory):
            if path.suffix == SET_ASIDE:
                opened.append(None)
                continue
            try:
                opened.append(files.enter_context(path.open("rb")))
            except FileNotFoundError:
                opened.clear()
        for file in opened:
            if file is None:  # The next segment's checkpoint says where the journal goes on.
                position = None
                continue
            for record in read_segment(file.read(), file.name):
                position = follow(position, record)
                yield record


def segment_paths(directory: Path) -> list[Path]:
    """Paths of a journal's segments, oldest first; some may be set aside."""
    return sorted([*directory.glob("*.journal"), *directory.glob(f"*{SET_ASIDE}")])


def readable_records(data: bytes) -> Iterator[Record]:
    """Yield the records of a damaged segment that can be read, in their order.

    Raises OtherJournalVersion.
    """
    for line in io.BytesIO(data):
        with suppress(ValueError):
            yield _decode(line)


def follow(position: Position | None, record: Record) -> Position:
    """The position after `record`, which comes first if `position` is None.

    Raises JournalCorrupt.
    """
    if position is not None:
        return position.after(record)
    if not isinstance(record, CheckpointRecord):
        raise JournalCorrupt(f"record {record.seq} comes first, and is no checkpoint")
    return Position.of(record)


def read_segment(data: bytes, name: str) -> Iterator[Record]:
    """Yield the record of every line; a crash may have cut off the last line.

    Raises SegmentDamaged, OtherJournalVersion.
    """
    if b"\n" not in data:  # the first line was on disk before the file had its name
        raise SegmentDamaged(f"{name}: its first line is cut off")
    end = 0
    for line in io.BytesIO(data):
        if not line.endswith(b"\n"):
            return
        try:
            yield _decode(line)
        except ValueError as error:
            raise SegmentDamaged(f"{name}, byte {end}: {error}") from None
        end += len(line)


def encode(record: Record) -> bytes:
    """Encode a record as a line."""
    fields = {name: getattr(record, name) for name in record.__slots__}
    body = _ENCODER.encode([_NAMES[type(record)], fields]).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _decode(line: bytes) -> Record:
    """Decode a line. Raises ValueError for a damaged one, OtherJournalVersion."""
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        raise ValueError("the line is not what its checksum says")
    name, fields = json.loads(body)
    if name == "checkpoint" and (found := fields.get("version")) != JOURNAL_VERSION:
        raise OtherJournalVersion(found)
    try:
        if name in _PARTS:
            key, kind = _PARTS[name]
            fields[key] = tuple(kind(*map(_frozen, part)) for part in fields[key])
        return _KINDS[name](**fields)
    except (KeyError, TypeError):
        raise ValueError(f"the line is no {name} record of version {JOURNAL_VERSION}") from None


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
