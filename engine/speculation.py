"""Decides which tokens a step verifies beside those that it has to compute, and learns from it.

A draft costs time that everybody in the step pays for, so a step has drafts only as far as they
bring more tokens a second: by the measured time of steps (`engine.step_curve`), and by how often
the drafts of each answer were accepted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.drafts.acceptance import Acceptance
from engine.drafts.ngrams import NO_DRAFT, Draft
from engine.drafts.pools import DraftPools
from engine.messages import DraftStats
from engine.request import Request
from engine.step_curve import StepCurve

MOST_DRAFTS = 7
"""Drafts of a row, which then has 8 tokens: kernels for decoding take as many."""
_LEAST_GAIN = 1.04
"""How many times the tokens a second drafts must bring, as measurements are uncertain."""
_MOST_DELAY = 1.1
"""How many times as long a step may take if there are rows of other tenants without drafts."""

BeforeEnd = Callable[[Request, Sequence[int]], Sequence[int]]
"""See `engine.outputs.Outputs.before_end`."""


class Drafter(Protocol):
    """Guesses what answers will say."""

    def drafts(self, requests: Sequence[Request], most: int) -> Mapping[Request, Draft]:
        """Up to `most` tokens that may follow each answer's last one; some may have no draft."""
        ...

    def end(self, request: Request) -> None:
        """Note that an answer has ended, which has no drafts any more."""
        ...


@dataclass(slots=True)
class _Record:
    """Knowledge of one answer's drafts.   verified: the draft in the step that runs."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    verified: Draft = NO_DRAFT


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One more draft for a row.   chance: that it and all before it are accepted.

    cost_s: time that attention takes for it.
    """

    request: Request
    chance: float
    cost_s: float


class Speculation:
    """Drafts for all answers of an engine.   curve: times of its steps.   pools: those that the
    drafter uses.
    """

    def __init__(self, curve: StepCurve, drafter: Drafter, pools: DraftPools | None = None) -> None:
        self._curve = curve
        self._drafter = drafter
        self._pools = DraftPools(0) if pools is None else pools
        self._records: dict[Request, _Record] = {}
        self._drafted = self._accepted = self._verified = 0

    def choose(
        self, plan: Mapping[Request, int], budget: int, before_end: BeforeEnd
    ) -> dict[Request, tuple[int, ...]]:
        """Drafts for the rows of a step, by request.

        plan: tokens that the step has to compute, by request.   budget: how many more it may.
        """
        num_tokens = sum(plan.values())
        deciding = [r for r, count in plan.items() if r.samples_after(count)]
        most = min(budget, MOST_DRAFTS * len(deciding))
        if not self._can_gain(num_tokens, len(deciding), most):
            return {}
        drafts = self._drafts([r for r in deciding if _may_draft(r)], before_end)
        candidates = sorted(self._candidates(drafts), key=lambda c: -c.chance)[:most]
        counts = self._worthwhile(num_tokens, deciding, candidates)
        for request, count in counts.items():
            token_ids = drafts[request].token_ids[:count]
            self._records[request].verified = Draft(token_ids, drafts[request].match)
        return {request: drafts[request].token_ids[:count] for request, count in counts.items()}

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Note that a row with drafts was verified."""
        self._verified += 1
        self._drafted += num_drafts
        self._accepted += num_accepted
        if (record := self._records.get(request)) is not None:
            record.acceptance.note(record.verified.match, num_drafts, num_accepted)

    def end(self, request: Request) -> None:
        """Note that an answer has ended."""
        self._records.pop(request, None)
        self._drafter.end(request)

    def forget_drafts(self, tenant_id: str, adapter_digest: str | None) -> None:
        """Forget what a tenant's adapter said, or all its adapters if the digest is None."""
        self._pools.forget(tenant_id, adapter_digest)

    def figures(self) -> DraftStats:
        return DraftStats(
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            verified_rows=self._verified,
            pools=len(self._pools),
            pool_bytes=self._pools.size_bytes,
        )

    def _can_gain(self, num_tokens: int, num_deciding: int, most: int) -> bool:
        """Whether drafts would pay if all of them were accepted: not in a step that is full."""
        base_s = self._curve.seconds(num_tokens)
        return any(
            (num_deciding + count) * base_s
            > _LEAST_GAIN * num_deciding * self._curve.seconds(num_tokens + count)
            for count in range(1, most + 1)
        )

    def _drafts(self, requests: Sequence[Request], before_end: BeforeEnd) -> dict[Request, Draft]:
        for request in requests:
            self._records.setdefault(request, _Record()).acceptance.pass_time()
        drafts = {
            request: Draft(tuple(before_end(request, draft.token_ids)), draft.match)
            for request, draft in self._drafter.drafts(requests, MOST_DRAFTS).items()
        }
        return {request: draft for request, draft in drafts.items() if draft.token_ids}

    def _candidates(self, drafts: Mapping[Request, Draft]) -> Iterator[_Candidate]:
        for request, draft in drafts.items():
            chance = self._records[request].acceptance.chance(draft.match)
            cost_s = self._curve.key_s * request.num_tokens
            for place in range(1, len(draft.token_ids) + 1):
                yield _Candidate(request, chance**place, cost_s)

    def _worthwhile(
        self, num_tokens: int, deciding: Sequence[Request], candidates: Sequence[_Candidate]
    ) -> dict[Request, int]:
        """How many drafts each request has in the step that brings most tokens a second.

        candidates: the likeliest first.
        """
        base_s = self._curve.seconds(num_tokens)
        best_rate, best = _LEAST_GAIN * len(deciding) / base_s, 0
        expected, extra_s = float(len(deciding)), 0.0
        drafting: set[Request] = set()
        others = set(deciding)
        for count, candidate in enumerate(candidates, start=1):
            expected += candidate.chance
            extra_s += candidate.cost_s
            drafting.add(candidate.request)
            others.discard(candidate.request)
            seconds = self._curve.seconds(num_tokens + count) + extra_s
            if seconds > _MOST_DELAY * base_s and _slows_others(drafting, others):
                continue
            if expected / seconds > best_rate:
                best_rate, best = expected / seconds, count
        counts: dict[Request, int] = {}
        for candidate in candidates[:best]:
            counts[candidate.request] = counts.get(candidate.request, 0) + 1
        return counts


def _may_draft(request: Request) -> bool:
    """Whether an answer may have drafts now: it has a token, and its last one is known."""
    is_ahead = request.constraint is None or request.constraint.can_look_ahead
    is_known = bool(request.output_token_ids) and not request.num_pending_tokens
    return request.message.drafts and is_known and is_ahead


def _slows_others(drafting: set[Request], others: set[Request]) -> bool:
    """Whether a tenant waits for another's drafts without having one itself."""
    helped = {request.tenant_id for request in drafting}
    return any(request.tenant_id not in helped for request in others)
