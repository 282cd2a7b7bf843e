"""Every record of the journal, and what of it goes to the settler: frozen, plain data.

`engine.journal_records` makes bytes of them, `engine.wire` of JournalRecords.
"""

from dataclasses import dataclass, field

from engine.messages import FinishReason, ResidentTier, StopCause


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """The first of a segment: what came before it, which may have been deleted.

    seq: of the last record before it, it has none of its own.   The others: as of its last end.
    """

    seq: int
    at: float
    number: int
    total_prompt_tokens: int
    total_cached_tokens: int
    total_completion_tokens: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """Since the last record: prompt tokens done in all, and new tokens of one of the answers.

    num_cached_tokens: prompt tokens that were found in the prefix cache, not computed.
    """

    request_id: str
    num_prompt_tokens: int
    new_token_ids: tuple[int, ...]
    index: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """What one step added, for every request in it: written before the tokens leave."""

    seq: int
    at: float
    step: int
    requests: tuple[RequestProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """All that a usage event and a receipt need; on disk before the final output leaves.

    number: of this end among all of this journal, from 1, without gaps.   total_*: sums over all
    ends up to and with this one: a ledger that lost a row, or changed a count, does not add up.
    started_at, first_token_at, at: Unix seconds.   output_sha256: of the output ids as uint32 LE,
    one answer after the other.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyItem:
    """How long one adapter was in one tier, in all, since the last record; pinned or not.

    slabs: of the arena, so slab-seconds are `slabs * duration_ms / 1000`; 0 in the other tiers.
    size_bytes: that it takes there; on the device, what its slabs take.
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
    """Where adapters were between `started_at` and `at`, Unix seconds; on disk before it is read.

    A long list comes as several records.
    """

    seq: int
    at: float
    started_at: float
    items: tuple[ResidencyItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecords:
    """What is to be posted after the settled position, oldest first.

    last_seq: of the newest record of any kind.   open_request_ids: started and not ended; a hold
    that has expired and is neither here nor in an unread end record can never be used.
    """

    engine_id: str
    records: tuple[EndRecord | ResidencyRecord, ...]
    last_seq: int
    complete: bool
    open_request_ids: tuple[str, ...] = field(default=())
