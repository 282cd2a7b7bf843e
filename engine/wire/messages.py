"""Every message between gateway and engine: frozen, plain data.

Gateway to engine: Hello, AddRequest, ExtendLease, AbortRequests, Prefetch, PinAdapters,
ProveAdapter, ForgetDrafts, ReadJournal, TenantService, Heartbeat.

Engine to gateway: Welcome, StepOutputs, LeaseLow, Residency, ProofResult, TenantService,
EngineStats; and JournalRecords (engine.wire.records).

Only `engine.wire.encoding` encodes messages. A failure is a value in `RequestOutput`; no exception
crosses the wire.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

from lora.tiers import LoadTier as LoadTier
from lora.tiers import Residency as Residency
from lora.tiers import ResidentTier as ResidentTier
from lora.tiers import Tier as Tier
from lora.tiers import TierStats as TierStats
from registry.ref import AdapterRef
from registry.uploads.proof import Proof

FinishReason = Literal["stop", "length", "abort", "error"]
StopCause = Literal[
    "eos", "stop_string", "stop_token", "max_tokens", "max_model_len", "budget",
    "aborted", "deadline", "first_token_timeout", "gateway_lost",
    "adapter_loading", "adapter_missing", "adapter_corrupt", "adapter_incompatible",
    "adapter_too_large", "request_too_long", "adapter_not_invoked", "constraint_too_slow",
    "engine_failure",
]  # fmt: skip

NOT_METERED = "metering_unavailable"
"""Error of requests that are refused, or ended, because the journal takes no more records."""

LEAVING = "leaving"
"""Error of requests that are refused because the engine is leaving its pool."""

PROVING = "proving"
"""Error of requests that are refused for a moment, as the engine proves an adapter alone."""

SILENCE_S = 30.0
"""Silence after which a gateway treats an engine as hung that has announced no long work.

The engine's supervisor has a shorter limit (lora.beat), and kills the engine before.
"""
PROOF_TENANT = "canary"
"""Tenant and gateway id of a proof's requests, which are journaled like others but not billed.

The value must not change: journals of every release contain `canary`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBudget:
    """A limit on the reasoning that an answer begins with.

    max_tokens: between its marks; then the answer gets `closing`, token by token, and goes on.
    is_begun: the prompt ends within it.   opens, closes: the texts of its marks.
    opening: tokens that open it.   words: (token id, its bytes) as in SamplingParams, for marks.
    """

    max_tokens: int
    is_begun: bool
    opens: tuple[bytes, ...]
    closes: tuple[bytes, ...]
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    words: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when an answer stops; the defaults leave the distribution as it is.

    temperature 0 is greedy; top_k 0 is off.
    min_p: least probability of a token, as a share of the likeliest token's.
    presence_penalty, frequency_penalty: over generated tokens (OpenAI's formula).
    repetition_penalty: over prompt and generated tokens (CTRL's, arXiv 1909.05858).
    logit_bias: (token id, value added to its logit).   n: answers to each prompt.
    logprobs: how many of the likeliest tokens to report beside the chosen one; None reports no
    logprobs at all.   prompt_logprobs: the same for every token of the prompt but the first.
    logprob_token_ids: if any, `logprobs` reports these tokens and not the likeliest ones.
    max_tokens 0: the request ends when its prompt has been computed.
    min_tokens: least length of an answer. Before that, EOS and stop_token_ids cannot be chosen, and
    stop strings are searched for only in later tokens.
    allowed_token_ids: only these can be chosen, if any are given; if each of them would end the
    answer, min_tokens has no effect.
    bad_words: sequences of tokens that an answer must not have.
    include_stop_str_in_output: whether a stop string, and a token that ends the answer, are text.
    eos_token_ids: tokens that are EOS beside the model's own.   words: (token id, its bytes) of
    tokens that have other bytes than in the engine's vocabulary, for stop strings.
    reasoning: None for no limit on it.
    beam_search: whether the answers are the n likeliest ones (engine.scheduling.beam_search);
    tokens are then chosen by nothing but that.   length_penalty: exponent of the length in the
    score of a beam.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[bytes, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False
    eos_token_ids: tuple[int, ...] = ()
    words: tuple[tuple[int, bytes], ...] = ()
    reasoning: ReasoningBudget | None = None
    beam_search: bool = False
    length_penalty: float = 1.0

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty makes the choice of a token depend on the tokens before it."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class Priority(IntEnum):
    """Priority class of a request; the lower number goes first."""

    INTERACTIVE = 0
    BATCH = 1


# ---- gateway to engine ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message on a connection. gateway_id: names the gateway's process for its lifetime."""

    gateway_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One tokenized request, sent only after its hold is durable.

    prompt_token_ids, more_prompts: its first prompt, and the others; each has n answers.
    token_lease: completion tokens that the hold covers, in equal parts for all answers; the engine
    stops an answer at the end of its part, unless the lease is extended then.
    deadline_s: seconds from receipt after which the engine ends the request.
    first_token_timeout_s: seconds from receipt after which it ends one without a generated token.
    weight: the tenant's weight in fair scheduling.
    grammar: what every answer must be, in llguidance's JSON form; "" if answers are free.
    predicted_token_ids: text that the answers may turn out to be, in whole or in part.
    drafts: whether a step may give an answer several tokens: drafted ones, and those that its
    grammar forces. The answers are the same.
    shares_drafts: whether the answers may be drafted from answers to other requests of the tenant
    with this adapter that said the same, and be kept for those to come.
    """

    request_id: str
    tenant_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    token_lease: int
    deadline_s: float
    first_token_timeout_s: float = 30.0
    adapter: AdapterRef | None = None
    cache_salt: str = ""
    weight: float = 1.0
    priority: Priority = Priority.INTERACTIVE
    more_prompts: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    predicted_token_ids: tuple[int, ...] = ()
    drafts: bool = True
    shares_drafts: bool = False

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return (self.prompt_token_ids, *self.more_prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_answers(self) -> int:
        return self.sampling_params.n * len(self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendLease:
    """The hold was raised. token_lease: completion tokens that it covers now, in total."""

    request_id: str
    token_lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """End requests whose clients are gone. Tokens generated so far stay counted."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Hint that a request for this adapter is on its way; the engine may start to fetch it."""

    tenant_id: str
    adapter: AdapterRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PinAdapters:
    """Keep exactly these adapters in the arena, used or not; each message replaces the last one.

    Adapters beyond the engine's limit for pinned slabs are served like those that are not pinned.
    """

    adapters: tuple[AdapterRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveAdapter:
    """Prove that serving this adapter gives the results of its merged weights; see engine.proofs.

    object_path: file of its canonical object, which the engine can read until it has answered.
    alone: whether the engine may serve nobody else meanwhile, since one ended in the last try.
    """

    proof_id: str
    adapter: AdapterRef
    object_path: str
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetDrafts:
    """Forget the drafts that a tenant's answers with an adapter left, as nobody may ask it again.

    adapter_digest: None for all answers of the tenant.
    """

    tenant_id: str
    adapter_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJournal:
    """Delete records up to `settled_seq`, which the settler has posted, and send the next ones.

    engine_id: engine that owns the journal; another one in its place deletes and sends nothing.
    read_id: its answer has the same.
    """

    read_id: str = ""
    engine_id: str
    settled_seq: int
    limit: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sign of life. The engine ends the requests of a gateway silent for `gateway_timeout_s`."""


# ---- engine to gateway ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answer to Hello, on each new connection: what the engine serves.

    epoch: number of the engine's start.   block_size: tokens in a block of its prefix cache.
    max_model_len: 0 from a journal without an engine, whose settings say no length.
    """

    engine_id: str
    epoch: int
    base_revision: str
    max_model_len: int
    max_num_seqs: int
    device: str
    dtype: str
    block_size: int = 16
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs at one token: natural logarithms of the softmax of the raw logits, in float32.

    rank: the token's place among all tokens, the likeliest first, of equal ones the lower id.
    top: (token id, logprob) of the likeliest tokens, likeliest first, or of the tokens that were
    asked for. If the token itself is among them, its value there is the same to the last bit.
    """

    logprob: float
    rank: int = 1
    top: tuple[tuple[int, float], ...] = ()


class Timings(NamedTuple):
    """Seconds that a request spent in the engine, by what they were spent on.

    load_s: wait for its adapter, which was in `load_tier` when the request arrived; both are None
    if it did not wait for one.   queue_s: wait for its turn after that.
    fetch_s: the part of `load_s` until it was on disk; None if it did not come from the store.
    prefill_s: from the start of its computing to its first token; None if it got no token.
    decode_s: from there to its end; None if it got no token.
    """

    load_s: float | None = None
    load_tier: LoadTier | None = None
    queue_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    fetch_s: float | None = None


class RequestOutput(NamedTuple):
    """Output of one step for one of a request's answers; an answer's last has a `finish_reason`.

    There is one for each token of each stream, so it is a tuple: a dataclass takes three times as
    long to make and to decode, and six times to encode. The wire has no names of its fields: a new
    one goes to the end.

    seq: number of the output within its request, from 0; a gap means that the engine failed.
    index: number of the answer: those to the first prompt come first, then those to the next.
    is_last: whether this is the last output of the request.
    new_token_ids: tokens that are certain: none of them can still become part of a stop string.
    logprobs: one for every new token, if they were requested.
    prompt_logprobs: those of the prompt tokens that the step scored, if they were requested. They
    cover the prompt in order from its second token on, each token once, before the first new token.
    Only the first answer to each prompt has them.
    num_completion_tokens: tokens billed so far in all answers, with stop tokens and stop strings.
    num_accepted_tokens: how many of these were drafted.   num_rejected_tokens: drafted tokens that
    steps verified in vain, which nobody pays.
    num_stop_bytes: on a stop string, how many trailing bytes of the text belong to it or follow it;
    if it is text, how many follow it.
    adapter_digest: digest of the adapter that steps applied; None until a step has.
    retry_after_s: with "adapter_loading", seconds after which a retry may succeed.
    timings: on the last output, those of the request; None if it was refused, or failed because
    its end could not be journaled.
    """

    request_id: str
    seq: int
    index: int = 0  # type: ignore[assignment]  # tuple's method of that name is not used
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_cause: StopCause | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    num_stop_bytes: int = 0
    adapter_digest: str | None = None
    retry_after_s: float | None = None
    timings: Timings | None = None
    is_last: bool = False

    @property
    def is_of_prompt(self) -> bool:
        """Whether the output has logprobs of the prompt, and nothing of an answer yet."""
        has_begun = self.new_token_ids or self.finish_reason is not None
        return self.prompt_logprobs is not None and not has_begun


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLow:
    """The lease ends soon: extend it, or the request waits a moment there, and stops."""

    request_id: str
    num_completion_tokens: int
    token_lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    proof_id: str
    proof: Proof


@dataclass(slots=True, kw_only=True)
class GrammarStats:
    """Work for grammars since the engine started; seconds are processor time beside the steps.

    forced_tokens: tokens that a grammar left no choice about, which the model was not asked for.
    masks_late: times that a row chose no token in a step, since its mask was not there in time.
    masks_failed: answers that failed because a mask took too much work.
    tenants: (tenant id, seconds) of those that took most.
    """

    compiles: int = 0
    compiles_failed: int = 0
    compile_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    forced_tokens: int = 0
    masks_late: int = 0
    masks_failed: int = 0
    tenants: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True, kw_only=True)
class DraftStats:
    """Drafted tokens since the engine started, and the tenants' pools of drafts.

    drafted_tokens: those that steps verified.   accepted_tokens: those of them that answers got.
    verified_rows: how often a row had drafts.
    """

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verified_rows: int = 0
    pools: int = 0
    pool_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine's heartbeat, with figures: current gauges, and counters since it started.

    batch_*: the largest step since the previous message.   tiers: nearest first.
    step_seconds: (phase, seconds that steps spent in it).
    is_leaving: whether it takes no new requests, and exits once all it has is ended and settled.
    silence_s: silence after which the engine counts as hung.
    """

    running: int = 0
    waiting: int = 0
    batch_requests: int = 0
    batch_tokens: int = 0
    batch_adapters: int = 0
    free_slabs: int = 0
    total_slabs: int = 0
    adapter_slabs: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swapped: int = 0
    prefix_slabs: int = 0
    prefix_evictions: int = 0
    prefill_tokens_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    adapter_evictions: int = 0
    pinned_slabs: int = 0
    unsettled_records: int = 0
    tiers: tuple[TierStats, ...] = ()
    grammars: GrammarStats = field(default_factory=GrammarStats)
    drafts: DraftStats = field(default_factory=DraftStats)
    step_seconds: tuple[tuple[str, float], ...] = ()
    is_leaving: bool = False
    silence_s: float = SILENCE_S


# ---- both ways ----


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantService:
    """Service that an engine gave to tenants since it started; gateways tell all other engines.

    epoch: number of that engine's start.   totals: (tenant id, prefill tokens' worth of service
    divided by the tenant's weight), for tenants served since the last message. Totals only grow
    within an epoch, so it does not matter how often, or by how many gateways, they are passed on.
    """

    engine_id: str
    epoch: int
    totals: tuple[tuple[str, float], ...]
