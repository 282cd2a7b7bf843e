"""Requests in the engine: mutable records that the scheduler and its parts share.

The scheduler writes what is launched and computed, `engine.admission` and `engine.queues` write
turns, adapters and charges, `engine.kv_cache` writes blocks, `engine.outputs` writes tokens and
ends. Nobody else writes here.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from engine.messages import (
    AddRequest,
    FinishReason,
    Priority,
    SamplingParams,
    StopCause,
    TokenLogprobs,
)
from engine.stops import StopMatcher
from registry.ref import AdapterRef

PENDING_TOKEN = -2
"""Stands for the token that the step before, still running, will choose for the same row."""


@dataclass(eq=False)
class Prompt:
    """One prompt of a request, with its n answers.

    num_tokens_done: its tokens that have been computed or found in the prefix cache, once for all
    answers: what is billed.   num_cached_tokens: those of them that were found.
    adapter_start: as `find_adapter_start` says, once the adapter has reached the host.
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

    applied_digest: the digest of the adapter that the steps say they applied.
    """

    gateway_id: str
    message: AddRequest
    arrived_at: float
    prompts: list[Prompt] = field(default_factory=list)
    requests: list["Request"] = field(default_factory=list)
    first_token_at: float | None = None
    applied_digest: str | None = None
    num_outputs_sent: int = 0

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._decisive.finish_reason

    @property
    def stop_cause(self) -> StopCause | None:
        return self._decisive.stop_cause

    @property
    def _decisive(self) -> "Request":
        """The answer that says how the whole ended: a failed one, else an aborted one, else the
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
        return sum(prompt.num_tokens_done for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    @property
    def output_token_ids(self) -> list[int]:
        """All answers, one after the other."""
        return [token for request in self.requests for token in request.output_token_ids]

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(request.output_token_ids) for request in self.requests)

    @property
    def is_over(self) -> bool:
        """Whether every answer has ended."""
        return all(request.finish_reason is not None for request in self.requests)


@dataclass(eq=False)
class Request:
    """One answer. `num_computed_tokens` catches up with `num_tokens`; everything else follows.

    [0, num_computed)                           in the KV blocks
    [num_computed, + num_in_flight)             in steps that have been launched and not finished
    [.., num_tokens + num_pending)              to do; the pending token is chosen by such a step

    base_scope, scope: of blocks before the adapter's start, and of all others.
    arrival: counts requests, so it orders them.   swapped: its blocks' places in the swap space.
    num_restarts: times that what it had computed was lost to it.
    num_dead_blocks: the first ones, behind the sliding window: given back for good.
    num_found_tokens: in the prefix cache, when it was last admitted.
    num_scored_tokens: of the prompt, those whose logprobs have been given out.
    num_skips: times that somebody was admitted past it while it wanted for room.
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
    finish_reason: FinishReason | None = None
    stop_cause: StopCause | None = None
    num_restarts: int = 0
    num_skips: int = 0
    # Prompt tokens that its tenant has been charged for: what is computed again is on the house.
    num_charged_tokens: int = 0
    # Service of the load that it started, charged when it gets to run.
    load_service: float = 0.0

    @property
    def message(self) -> AddRequest:
        return self.group.message

    @property
    def request_id(self) -> str:
        return self.group.message.request_id

    @property
    def tenant_id(self) -> str:
        return self.group.message.tenant_id

    @property
    def priority(self) -> Priority:
        return self.group.message.priority

    @property
    def adapter(self) -> AdapterRef | None:
        return self.group.message.adapter

    @property
    def adapter_key(self) -> str | None:
        """The adapter manager's key: the tenant's own object in the store."""
        adapter = self.group.message.adapter
        return adapter.object_key if adapter else None

    @property
    def adapter_start(self) -> int:
        """First position at which its adapter applies: known before anything is computed."""
        assert self.prompt.adapter_start is not None
        return self.prompt.adapter_start

    @property
    def params(self) -> SamplingParams:
        return self.group.message.sampling_params

    @property
    def is_first(self) -> bool:
        """Whether it is the first answer to its prompt."""
        return self.prompt.answers[0] is self

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_scheduled_tokens(self) -> int:
        """Computed, or about to be."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_tokens_to_do(self) -> int:
        return self.num_tokens + self.num_pending_tokens - self.num_scheduled_tokens

    @property
    def num_tokens_to_score(self) -> int:
        """How many tokens of the prompt still need a logprob; the first token never has one."""
        if self.params.prompt_logprobs is None or not self.is_first:
            return 0
        return self.num_prompt_tokens - 1 - self.num_scored_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its first tokens may be taken from the cache instead of being computed.

        The last token is asked for what follows it, and so is everything before a token that is
        still to be scored.
        """
        return self.num_scored_tokens if self.num_tokens_to_score else self.num_tokens - 1

    def samples_after(self, num_tokens: int) -> bool:
        """Whether a token is chosen once its next `num_tokens` are computed."""
        return num_tokens == self.num_tokens_to_do and self.params.max_tokens > 0

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens_to_do <= 1

    @property
    def token_lease(self) -> int:
        """Completion tokens that this answer may use: an equal part of what the hold covers."""
        return self.message.token_lease // self.message.num_answers

    @property
    def max_tokens(self) -> int:
        """Completion tokens after which it ends for certain."""
        return min(self.params.max_tokens, self.token_lease)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids at positions [start, end) of prompt and output; the unknown are pending."""
        split = self.num_prompt_tokens
        prompt = self.prompt.token_ids[start : min(end, split)]
        output = self.output_token_ids[max(start - split, 0) : max(end - split, 0)]
        return (*prompt, *output, *[PENDING_TOKEN] * (end - max(start, self.num_tokens)))


def find_adapter_start(
    adapter: AdapterRef | None, prompt: tuple[int, ...], invocation_tokens: Sequence[int] | None
) -> int | None:
    """The first position at which an adapter applies to a prompt; None if it applies nowhere.

    [0, start)   the base model's, their keys and values, too; without an adapter the whole prompt
    [start, ..)  the adapter's, generated tokens included
    invocation_tokens: of an activated LoRA, None for others. It starts where they begin for the
    last time in the prompt, as in PEFT (`calculate_alora_offsets`).
    """
    if adapter is None:
        return len(prompt)
    if invocation_tokens is None:
        return 0
    # As text, so that the search is one call: a long prompt must not hold up the step.
    start = _as_text(prompt).rfind(_as_text(invocation_tokens))
    return start if start >= 0 else None


def _as_text(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))
