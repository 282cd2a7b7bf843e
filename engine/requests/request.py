"""Requests in the engine: mutable records that the scheduler and its parts share.

`engine.scheduling.in_flight` writes what is launched and computed, `engine.scheduling.starts` and
`engine.scheduling.queues` write turns and adapters, `engine.scheduling.step_plan` charges,
`engine.kv.cache` blocks, `engine.scheduling.outputs` tokens and ends,
`engine.scheduling.beam_searches` which answer computes which beam, and `engine.drafts.speculation`
what became of drafts. No other module writes to a request.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from engine.grammar.compilation import Compilation
from engine.grammar.constraint import Constraint
from engine.requests.bad_words import BadWords
from engine.requests.reasoning import Reasoning
from engine.requests.stops import StopMatcher
from engine.wire.messages import (
    AddRequest,
    FinishReason,
    LoadTier,
    Priority,
    SamplingParams,
    StopCause,
    Timings,
    TokenLogprobs,
)
from registry.ref import AdapterRef

PENDING_TOKEN = -2
"""Placeholder for a token that the previous step, still running, will choose for this answer."""


@dataclass(eq=False)
class Prompt:
    """One prompt of a request, with its n answers.

    num_tokens_done: prompt tokens that were computed or found in the prefix cache, counted once for
    all answers; they are billed.   num_cached_tokens: how many of them were found in the cache.
    adapter_start: result of `find_adapter_start`, known once the adapter has reached the host.
    """

    token_ids: tuple[int, ...]
    answers: list["Request"] = field(default_factory=list)
    num_tokens_done: int = 0
    num_cached_tokens: int = 0
    adapter_start: int | None = None

    @cached_property
    def distinct_token_ids(self) -> tuple[int, ...]:
        return tuple(set(self.token_ids))


@dataclass(eq=False)
class RequestGroup:
    """All answers that one AddRequest asked for, each a `Request`, under one hold and one id.

    applied_digest: digest of the adapter that the steps report as applied; None before that.
    num_accepted_tokens, num_rejected_tokens: drafts of its answers.
    load_tier: tier that its adapter was in when it arrived; None for the arena, or no adapter.
    loading_until: when its adapter was last seen missing before it started.   fetching_until: when
    it was last seen missing on disk as well.
    timings: known once it has ended.
    compilation: its grammar; None if answers are free.
    """

    gateway_id: str
    message: AddRequest
    arrived_at: float
    prompts: list[Prompt] = field(default_factory=list)
    requests: list["Request"] = field(default_factory=list)
    load_tier: LoadTier | None = None
    loading_until: float | None = None
    fetching_until: float | None = None
    compilation: Compilation | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    timings: Timings | None = None
    applied_digest: str | None = None
    num_outputs_sent: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0

    @cached_property
    def bad_words(self) -> BadWords:
        return BadWords(self.message.sampling_params.bad_words)

    @property
    def decisive(self) -> "Request":
        """The answer whose end counts for the group: a failed one, else an aborted one, else the
        first.
        """
        ranks = {"error": 0, "abort": 1}
        return min(self.requests, key=lambda r: ranks.get(r.finish_reason or "", 2))

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def adapter(self) -> AdapterRef | None:
        return self.message.adapter

    @property
    def digest(self) -> str | None:
        return self.adapter.digest if self.adapter else None

    @property
    def num_prompt_tokens(self) -> int:
        return self.message.num_prompt_tokens

    @property
    def num_prompt_tokens_done(self) -> int:
        if len(self.prompts) == 1:
            return self.prompts[0].num_tokens_done
        return sum(prompt.num_tokens_done for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        if len(self.prompts) == 1:
            return self.prompts[0].num_cached_tokens
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    @property
    def output_token_ids(self) -> list[int]:
        """Token ids of all answers, one after the other."""
        return [token for request in self.requests for token in request.output_token_ids]

    @property
    def num_completion_tokens(self) -> int:
        if len(self.requests) == 1:
            return len(self.requests[0].output_token_ids)
        return sum(len(request.output_token_ids) for request in self.requests)

    def end(self, now: float) -> None:
        """Note its timings, as its last answer ends."""
        loading_until, first_at = self.loading_until, self.first_token_at
        fetching_until = self.fetching_until if self.load_tier == "store" else None
        queued_at = self.arrived_at if loading_until is None else loading_until
        started_at = now if self.started_at is None else self.started_at
        self.timings = Timings(
            load_s=None if loading_until is None else loading_until - self.arrived_at,
            load_tier=None if loading_until is None else self.load_tier,
            queue_s=started_at - queued_at,
            prefill_s=None if first_at is None else first_at - started_at,
            decode_s=None if first_at is None else now - first_at,
            fetch_s=None if fetching_until is None else fetching_until - self.arrived_at,
        )

    @property
    def is_over(self) -> bool:
        """Whether every answer has ended."""
        return all(request.finish_reason is not None for request in self.requests)

    def extend_lease(self, token_lease: int) -> None:
        self.message = replace(self.message, token_lease=token_lease)
        for request in self.requests:
            request.take_lease()


@dataclass(eq=False)
class Request:
    """One answer: steps compute its tokens until `num_computed_tokens` reaches `num_tokens`.

    [0, num_computed)                           in the KV blocks
    [num_computed, + num_in_flight)             in steps that were launched and have not finished
    [.., num_tokens + num_pending)              to do; such a step will choose the pending token

    Drafts are in flight, too, behind num_tokens. Those that are accepted become tokens that are
    computed, and the others are taken back. Until then there is nothing to do.

    base_scope, scope: hash scopes of blocks before the adapter's start, and of all other blocks.
    arrival: number that orders answers by age.   swapped: swap slots of its blocks.
    num_dead_blocks: its first blocks, which are behind the sliding window and given back for good.
    num_found_tokens: tokens found in the prefix cache when it was last admitted.
    num_scored_tokens: prompt tokens whose logprobs have been sent.
    needs_only_room: whether nothing keeps it waiting, now or later, but for room and its last step:
    a first answer of the base model, without a grammar.
    num_skips: how often another request was admitted past it while it lacked room.
    constraint: what it may say next, once its grammar is compiled.
    is_beam: whether it computes beams of a search (engine.scheduling.beam_search). Then its tokens
    are those of its beam, and it ends with other ones if those are better. is_parked: whether it
    has no beam now, or waits for the other beams. sampling: parameters of its rows. token_lease:
    completion tokens that it may use: an equal part of what the hold covers. announced_lease: the
    lease that was last said to end soon. max_tokens: completion tokens after which it ends, unless
    its lease grows. reasoning: how far it has come in its reasoning; None without a limit on that.

    What its message says of it is kept here, since a step asks for it for every row.
    """

    group: RequestGroup
    prompt: Prompt
    index: int
    arrival: int
    seed: int
    base_scope: bytes
    scope: bytes
    stops: StopMatcher
    output_token_ids: list[int] = field(default_factory=list)
    held_logprobs: deque[TokenLogprobs] = field(default_factory=deque)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_pending_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_dead_blocks: int = 0
    num_published_blocks: int = 0
    num_public_blocks: int = 0
    num_found_tokens: int = 0
    num_scored_tokens: int = 0
    swapped: list[int] = field(default_factory=list)
    holds_adapter: bool = False
    constraint: Constraint | None = None
    is_parked: bool = False
    finish_reason: FinishReason | None = None
    stop_cause: StopCause | None = None
    needs_only_room: bool = False
    num_skips: int = 0
    # Prompt tokens charged to its tenant; tokens that are computed again are not charged again.
    num_charged_tokens: int = 0
    # Service of the adapter load that it started; the tenant is charged when the answer runs.
    load_service: float = 0.0
    # Key of its adapter in the adapter manager: the tenant's own object in the store.
    adapter_key: str | None = field(init=False)
    request_id: str = field(init=False)
    tenant_id: str = field(init=False)
    priority: Priority = field(init=False)
    params: SamplingParams = field(init=False)
    sampling: SamplingParams = field(init=False)
    is_beam: bool = field(init=False)
    num_prompt_tokens: int = field(init=False)
    token_lease: int = field(init=False)
    announced_lease: int = 0
    max_tokens: int = field(init=False)
    has_penalties: bool = field(init=False)
    reasoning: Reasoning | None = field(init=False)

    def __post_init__(self) -> None:
        message = self.group.message
        self.adapter_key = message.adapter.object_key if message.adapter else None
        self.request_id, self.tenant_id = message.request_id, message.tenant_id
        self.priority, self.params = message.priority, message.sampling_params
        self.sampling, self.has_penalties = self.params, self.params.has_penalties
        self.reasoning = Reasoning(self.params.reasoning) if self.params.reasoning else None
        # Without a token to choose, nothing is searched for.
        self.is_beam = self.params.beam_search and self.params.max_tokens > 0
        if self.is_beam:
            num_top = max(2 * self.params.n, self.params.logprobs or 0)
            self.sampling = replace(self.params, temperature=0.0, logprobs=num_top)
        self.num_prompt_tokens = len(self.prompt.token_ids)
        self.take_lease()

    @property
    def is_unleased(self) -> bool:
        """Whether it has used up its lease, and waits for more or for its end."""
        return self.token_lease > 0 and self.num_leased_tokens <= 0

    @property
    def num_leased_tokens(self) -> int:
        """Completion tokens that its lease has left."""
        return self.token_lease - len(self.output_token_ids)

    def take_lease(self) -> None:
        """Take its part of the message's lease."""
        message = self.group.message
        self.token_lease = message.token_lease // message.num_answers
        self.max_tokens = min(self.params.max_tokens, self.token_lease)

    @property
    def message(self) -> AddRequest:
        return self.group.message

    @property
    def adapter(self) -> AdapterRef | None:
        return self.group.message.adapter

    @property
    def adapter_start(self) -> int:
        """First position at which its adapter applies; it is known before any token is computed."""
        assert self.prompt.adapter_start is not None
        return self.prompt.adapter_start

    @property
    def is_first(self) -> bool:
        """Whether this is the first answer to its prompt."""
        return self.prompt.answers[0] is self

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that are computed, or part of a launched step."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_tokens_to_do(self) -> int:
        num_known = self.num_prompt_tokens + len(self.output_token_ids)
        num_scheduled = self.num_computed_tokens + self.num_in_flight_tokens
        return num_known + self.num_pending_tokens - num_scheduled

    @property
    def num_tokens_to_score(self) -> int:
        """How many tokens of the prompt still need a logprob; the first token never has one."""
        if self.params.prompt_logprobs is None or not self.is_first:
            return 0
        return self.num_prompt_tokens - 1 - self.num_scored_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its first tokens may be taken from the cache instead of being computed.

        The last token must be computed, since its logits choose the next token, and so must every
        prompt token whose successor still needs a logprob.
        """
        return self.num_scored_tokens if self.num_tokens_to_score else self.num_tokens - 1

    def samples_after(self, num_tokens: int) -> bool:
        """Whether a token is chosen once the next `num_tokens` tokens are computed."""
        return num_tokens == self.num_tokens_to_do and self.params.max_tokens > 0

    def needs_mask(self, num_drafts: int) -> bool:
        """Whether what may be chosen depends on a grammar, or on tokens that a step guesses."""
        if self.constraint is not None or self.params.bad_words:
            return True
        num_unsure = self.num_pending_tokens + num_drafts
        return self.reasoning is not None and self.reasoning.may_change_within(num_unsure)

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens_to_do <= 1

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids at positions [start, end) of prompt and output; unknown ones are pending."""
        split = self.num_prompt_tokens
        if split <= start and end <= split + len(self.output_token_ids):
            return tuple(self.output_token_ids[start - split : end - split])
        prompt = self.prompt.token_ids[start : min(end, split)]
        output = self.output_token_ids[max(start - split, 0) : max(end - split, 0)]
        return (*prompt, *output, *[PENDING_TOKEN] * (end - max(start, self.num_tokens)))


def find_adapter_start(
    adapter: AdapterRef | None, prompt: tuple[int, ...], invocation_tokens: Sequence[int] | None
) -> int | None:
    """The first position at which an adapter applies to a prompt; None if it applies nowhere.

    [0, start)   base model only, also for keys and values; the whole prompt without an adapter
    [start, ..)  with the adapter, generated tokens included
    invocation_tokens: those of an activated LoRA, None for other adapters. An activated LoRA starts
    at their last occurrence in the prompt, as in PEFT (`calculate_alora_offsets`).
    """
    if adapter is None:
        return len(prompt)
    if invocation_tokens is None:
        return 0
    # Searching in text is a single call, so that a long prompt does not hold up the step.
    start = _as_text(prompt).rfind(_as_text(invocation_tokens))
    return start if start >= 0 else None


def _as_text(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))
