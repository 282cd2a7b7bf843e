"""Every message between gateway and engine: frozen, plain data.

Gateway to engine: Hello, AddRequest, ExtendLease, AbortRequests, Prefetch, PinAdapters,
ProveAdapter, ReadJournal, TenantService, Heartbeat.

Engine to gateway: Welcome, StepOutputs, LeaseLow, Residency, ProofResult, TenantService,
EngineStats; and JournalRecords, of engine.records.

Only `engine.wire` encodes them. Failure is a value in `RequestOutput`, never raised across the
wire.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from registry.proof import Proof
from registry.ref import AdapterRef

FinishReason = Literal["stop", "length", "abort", "error"]
StopCause = Literal[
    "eos", "stop_string", "stop_token", "max_tokens", "max_model_len", "budget",
    "aborted", "deadline", "first_token_timeout", "gateway_lost",
    "adapter_loading", "adapter_missing", "adapter_corrupt", "adapter_incompatible",
    "adapter_too_large", "adapter_not_invoked", "engine_failure",
]  # fmt: skip
Tier = Literal["remote", "fetching", "disk", "host", "loading", "device", "failed"]
ResidentTier = Literal["device", "host", "disk"]


PROOF_TENANT = "canary"
"""Tenant and gateway of the requests that a proof makes: journaled like others, and nobody pays.

Journals of every release say `canary`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; the defaults change nothing.

    temperature 0 is greedy; top_k 0 is off.   min_p: share of the likeliest token's probability.
    presence_penalty, frequency_penalty: over generated tokens (OpenAI's formula).
    repetition_penalty: over prompt and generated tokens (CTRL's, arXiv 1909.05858).
    logit_bias: (token id, added to its logit).   logprobs: how many of the likeliest tokens to
    name beside the chosen one's logprob; None is none at all.   n: independent answers.
    prompt_logprobs: the same for every token of the prompt but the first.
    max_tokens 0: the request ends when its prompt has been computed.
    min_tokens: until there are so many, nothing ends the answer: EOS and stop_token_ids cannot be
    chosen, and stop strings are looked for behind them.
    allowed_token_ids: only these can be chosen, if any are given; where they are all tokens that
    end the answer, min_tokens gives way.
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
    seed: int | None = None
    stop: tuple[bytes, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on those before it."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class Priority(IntEnum):
    """The class of a request: the lower number goes first."""

    INTERACTIVE = 0
    BATCH = 1


# ---- gateway to engine ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a gateway on a connection. gateway_id: its process, for its lifetime."""

    gateway_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One request, tokenized and paid for: its hold is durable before this is sent.

    prompt_token_ids, more_prompts: its first prompt, and the others; each has n answers.
    token_lease: completion tokens that the hold covers, all answers together, in equal parts; the
    engine stops at the last one.
    deadline_s: seconds from receipt after which the engine ends the request.
    first_token_timeout_s: the same, while no token has been generated.
    weight: the tenant's share.
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
    """The gateway paid for more: completion tokens the lease covers now, in all."""

    request_id: str
    token_lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """Their clients are gone. What was generated stays counted."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """A request for this adapter is on its way: start fetching, promise nothing."""

    tenant_id: str
    adapter: AdapterRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PinAdapters:
    """Keep exactly these in the arena, whoever uses them; it replaces what was said before.

    What does not fit under the engine's limit for pinned slabs is served like any other.
    """

    adapters: tuple[AdapterRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveAdapter:
    """Show that this adapter, served, is its merged weights: see engine.proof.

    object_path: its canonical object, in a file that the engine can read until it has answered.
    """

    proof_id: str
    adapter: AdapterRef
    object_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJournal:
    """The settler has posted everything up to `settled_seq`: delete it, and send what follows.

    engine_id: whose journal is meant; another engine in its place deletes and sends nothing.
    """

    engine_id: str
    settled_seq: int
    limit: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Still here. A gateway silent for `gateway_timeout_s` has its requests ended."""


# ---- engine to gateway ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The engine's answer to Hello, and again after it came back: what it serves.

    block_size: tokens of a block of its prefix cache.
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
    """Of one token: natural logarithms of model probabilities (softmax of the raw logits, in
    float32). If the token is among the likeliest, its number there is the same to the last bit.

    top: (token id, logprob) of the likeliest tokens, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step added to one of a request's n answers; its last one carries `finish_reason`.

    seq: outputs of this request so far, from 0; a gap is an engine failure.
    index: which of the answers: those to the first prompt, then those to the next.
    is_last: of the request; nothing follows.
    new_token_ids are certain: none of them can still become part of a stop string.
    logprobs: one for every new token, where they were asked for.
    prompt_logprobs: where they were asked for, of those tokens of the prompt that the step scored:
    in order from the second on, each once, before the first new token. They come with the first
    answer to each prompt only.
    num_completion_tokens: what is billed so far, all answers, stop token or string included.
    num_stop_bytes: on a stop string, how many trailing bytes of the text belong to it or follow it.
    adapter_digest: what the steps applied; None until one has.
    retry_after_s: with "adapter_loading", when another try is worth it.
    """

    request_id: str
    seq: int
    index: int = 0
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_cause: StopCause | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_stop_bytes: int = 0
    adapter_digest: str | None = None
    retry_after_s: float | None = None
    is_last: bool = False

    @property
    def is_of_prompt(self) -> bool:
        """Whether it carries logprobs of the prompt, and nothing of an answer yet."""
        return not self.new_token_ids and self.finish_reason is None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLow:
    """The lease ends soon: extend it, or the request stops at its last leased token."""

    request_id: str
    num_completion_tokens: int
    token_lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """An adapter moved. object_key: whose it is.   size_bytes: what it takes at this tier."""

    object_key: str
    digest: str
    tier: Tier
    size_bytes: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    proof_id: str
    proof: Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier of adapters: counters since the engine started, bytes of now.

    hits, misses: arriving requests that found their adapter there, or had to ask the next tier.
    loads: adapters that came into it, load_bytes in all, load_seconds under way.
    limit_bytes: 0 where there is none.
    """

    tier: Literal["device", "host", "disk", "store"]
    hits: int = 0
    misses: int = 0
    loads: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    used_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A heartbeat with figures: gauges of now, counters since the engine started.

    batch_*: of the largest step since the previous figures.   tiers: nearest first.
    is_leaving: it takes no new requests, and exits once it has ended and settled all it has.
    """

    running: int
    waiting: int
    batch_requests: int
    batch_tokens: int
    batch_adapters: int
    free_slabs: int
    total_slabs: int
    adapter_slabs: int
    steps: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    preemptions: int
    swapped: int
    prefix_slabs: int
    prefix_evictions: int
    prefill_tokens_per_s: float
    copy_bytes_per_s: float
    adapter_evictions: int
    pinned_slabs: int
    unsettled_records: int
    tiers: tuple[TierStats, ...] = ()
    is_leaving: bool = False


# ---- both ways ----


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantService:
    """Service that an engine gave to tenants since its start; gateways tell it to all others.

    epoch: of that engine's start.   totals: (tenant id, prefill tokens' worth of service divided by
    the tenant's weight), of tenants that were served since the last message. They only grow within
    an epoch, so it does not matter how often, or by how many gateways, they are passed on.
    """

    engine_id: str
    epoch: int
    totals: tuple[tuple[str, float], ...]
