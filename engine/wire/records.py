"""The journal's records, and the message that takes them to the settler: frozen, plain data.

`engine.journal.lines` encodes the records, `engine.wire.encoding` encodes JournalRecords.
"""

from dataclasses import dataclass
from typing import NamedTuple

from engine.wire.messages import FinishReason, LoadTier, ResidentTier, StopCause

JOURNAL_VERSION = 1
"""Version of all records; a change that a build of the version before would misread adds one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """First record of a segment: the state before it, since older segments may be deleted.

    seq: number of the last record before it; a checkpoint has no number of its own.
    number, total_*: those of the last end record before it.   version: of the segment's records.
    """

    seq: int
    at: float
    number: int
    total_prompt_tokens: int
    total_cached_tokens: int
    total_completion_tokens: int
    version: int = JOURNAL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """A request was accepted. at: Unix seconds on the engine's clock."""

    seq: int
    at: float
    request_id: str
    tenant_id: str
    adapter_digest: str | None
    num_prompt_tokens: int
    token_lease: int


class RequestProgress(NamedTuple):
    """Progress of a request in a step: its prompt tokens so far, and new tokens of one answer.

    num_prompt_tokens: done in total.   num_cached_tokens: how many of them were found in the prefix
    cache instead of computed.   index: number of the answer.
    """

    request_id: str
    num_prompt_tokens: int
    new_token_ids: tuple[int, ...]
    index: int = 0  # type: ignore[assignment]  # tuple's method of that name is not used
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """Progress of every request in one step; it is written before the step's tokens leave."""

    seq: int
    at: float
    step: int
    requests: tuple[RequestProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """End of a request, with all that its usage event and its receipt need.

    The record is on disk before the request's final output leaves.
    number: position among all ends of this journal, from 1, without gaps.   total_*: sums over all
    ends up to and including this one, so that a ledger which lost a row, or changed a count, does
    not add up.   started_at, first_token_at, at: Unix seconds.
    output_sha256: hash of the output ids as uint32 LE, one answer after the other.
    load_s, load_tier, queue_s: see engine.wire.messages.Timings; None if a crash ended the request.
    """

    seq: int
    at: float
    number: int
    total_prompt_tokens: int
    total_cached_tokens: int
    total_completion_tokens: int
    request_id: str
    tenant_id: str
    adapter_digest: str | None
    base_revision: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    finish_reason: FinishReason
    stop_cause: StopCause
    output_sha256: str
    started_at: float
    first_token_at: float | None
    load_s: float | None = None
    load_tier: LoadTier | None = None
    queue_s: float | None = None


class ResidencyItem(NamedTuple):
    """Total time that one adapter was in one tier since the last record, either pinned or not.

    slabs: its slabs of the arena, so that slab-seconds are `slabs * duration_ms / 1000`; 0 in the
    other tiers.   size_bytes: its size in the tier; on the device, the size of its slabs.
    """

    object_key: str
    adapter_id: str
    version: int
    digest: str
    tier: ResidentTier
    size_bytes: int
    slabs: int
    duration_ms: int
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyRecord:
    """Tiers that adapters were in between `started_at` and `at`, in Unix seconds.

    The record is on disk before the settler reads it. A long list is split into several records.
    """

    seq: int
    at: float
    started_at: float
    items: tuple[ResidencyItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecords:
    """Records after the settled position that the settler has to post.   read_id: see ReadJournal.

    ends, residencies: by kind, as the wire cannot tell kinds apart in one list.
    last_seq: number of the newest record of any kind.   complete: whether these are all records to
    post.   open_request_ids: requests that have started and not ended. An expired hold whose
    request is neither among them nor in an unread end record can never be used.
    """

    read_id: str = ""
    engine_id: str
    ends: tuple[EndRecord, ...] = ()
    residencies: tuple[ResidencyRecord, ...] = ()
    last_seq: int
    complete: bool
    open_request_ids: tuple[str, ...] = ()

    @property
    def records(self) -> tuple[EndRecord | ResidencyRecord, ...]:
        """All records, oldest first."""
        return tuple(sorted((*self.ends, *self.residencies), key=lambda record: record.seq))
