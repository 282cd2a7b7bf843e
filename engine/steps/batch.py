"""One step: what is to be computed, and its results. Plain data, testable without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.requests.request import RequestGroup
from engine.wire.messages import LeaseLow, RequestOutput, SamplingParams, TokenLogprobs
from engine.wire.records import RequestProgress

BAD_LOGITS = -1
"""Placeholder for the token of a row whose logits are not finite; only its request fails."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Consecutive prompt tokens whose logprobs a row gives; each follows one of the row's tokens.

    first: place in the row of the token before the first of them.
    num_top: how many of the likeliest tokens to report beside each.
    """

    first: int
    token_ids: tuple[int, ...]
    num_top: int


class ScheduledRow(NamedTuple):
    """One answer's part of a step: plain data, so that it can be broadcast; a tuple, which takes a
    fifth of a dataclass's time to make.

    index: number of the answer within its request.
    token_ids: tokens to compute, at positions start, start + 1, ...; the last one before the drafts
    may be PENDING_TOKEN, which the previous step chooses for this request and index.
    block_ids: KV blocks from position 0 on, which cover all of these tokens.
    adapter_key: None for the base model.
    sampling: None if no token is chosen, as long as the prompt is not finished.
    scoring: None if no logprobs of the prompt are wanted.
    num_output_tokens: index of the token to choose; with the seed it decides the choice.
    adapter_start: first position at which the adapter applies; before it, the base model does.
    banned_token_ids: tokens that cannot be chosen.
    num_drafts: how many of the last token_ids are drafts. The row chooses the token after those
    before them, and after each draft; drafts that are not what it chooses are thrown away.
    is_constrained: whether the token is chosen under a mask, which comes after the launch.
    prompt_token_ids, output_token_ids: tokens before the one to choose, only if penalties need
    them; each distinct token of the prompt once.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    adapter_key: str | None = None
    adapter_digest: str | None = None
    adapter_generation: int = 0
    sampling: SamplingParams | None = None
    seed: int = 0
    num_output_tokens: int = 0
    adapter_start: int = 0
    index: int = 0  # type: ignore[assignment]  # tuple's method of that name is not used
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    scoring: Scoring | None = None
    banned_token_ids: tuple[int, ...] = ()
    is_constrained: bool = False
    num_drafts: int = 0

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def end(self) -> int:
        """The position that follows the row's last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A KV block copied to its slot of the swap space, or back from it."""

    block_id: int
    slot: int
    is_out: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Rows of one adapter are adjacent; the base model's come first.

    copies: KV blocks, (from, to), that are copied first; no block is in both places.
    transfers: copies, which run next, in this order, before the rows are computed.
    """

    step: int
    rows: tuple[ScheduledRow, ...]
    transfers: tuple[Transfer, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self.transfers and not self.copies

    @property
    def is_constrained(self) -> bool:
        """Whether the step's tokens are chosen only when the masks of its rows are known."""
        return any(row.is_constrained for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def adapters(self) -> set[str]:
        return {row.adapter_key for row in self.rows if row.adapter_key}


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens that a runner chose in a step.

    token_ids: one for every row that chose, None for the others; BAD_LOGITS fails a row. A row that
    has accepted drafts chose it after the last of them.
    num_accepted: by row number, how many of its drafts were accepted, if any were.
    logprobs: by row number, for rows that asked for them: of accepted drafts, then of the token.
    prompt_logprobs: by row number, for every token that its `scoring` names.
    adapter_digests: by row number, of the adapter that was applied to it.
    """

    token_ids: Sequence[int | None]
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    adapter_digests: Mapping[int, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    num_accepted: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class StepResult:
    """The outputs of a step by gateway, and what the journal must know before they leave.

    ended: requests whose last output is among them.
    num_forced: tokens among the progress that no row chose: those that grammars left no choice
    about, and those that several answers of a beam search share.
    """

    step: int = 0
    outputs: list[tuple[str, RequestOutput]] = field(default_factory=list)
    leases_low: list[tuple[str, LeaseLow]] = field(default_factory=list)
    progress: list[RequestProgress] = field(default_factory=list)
    num_forced: int = 0
    ended: list[RequestGroup] = field(default_factory=list)
