"""One request in the engine: mutable, written by the scheduler only."""

from dataclasses import dataclass, field

from engine.messages import AddRequest, FinishReason, SamplingParams, StopCause
from engine.stops import StopMatcher
from registry.ref import AdapterRef


@dataclass(eq=False)
class Request:
    """`num_computed_tokens` catches up with `num_tokens`; everything else follows.

    [0, num_computed)  in the KV blocks      [num_computed, num_tokens)  to do
    """

    gateway_id: str
    message: AddRequest
    arrived_at: float
    seed: int
    stops: StopMatcher
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    holds_adapter: bool = False
    first_token_at: float | None = None
    finish_reason: FinishReason | None = None
    stop_cause: StopCause | None = None
    num_outputs_sent: int = 0
    # Prompt tokens computed at least once: what is billed, recomputation not included.
    num_prompt_tokens_done: int = 0
    num_preemptions: int = 0

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def adapter(self) -> AdapterRef | None:
        return self.message.adapter

    @property
    def adapter_key(self) -> str | None:
        """By which the adapter manager knows it: the tenant's own object."""
        return self.adapter.object_key if self.adapter else None

    @property
    def digest(self) -> str | None:
        return self.adapter.digest if self.adapter else None

    @property
    def params(self) -> SamplingParams:
        return self.message.sampling_params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.message.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_tokens_to_do(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def max_tokens(self) -> int:
        """Completion tokens after which it ends for certain."""
        return min(self.params.max_tokens, self.message.token_lease)

    @property
    def deadline_at(self) -> float:
        return self.arrived_at + self.message.deadline_s

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids at positions [start, end) of prompt and output together."""
        split = self.num_prompt_tokens
        prompt = self.message.prompt_token_ids[start : min(end, split)]
        output = self.output_token_ids[max(start - split, 0) : max(end - split, 0)]
        return (*prompt, *output)
