"""Decides which tokens a step verifies beside those that it has to compute, and learns from it.

A draft costs time that everybody in the step pays for, so a step has drafts only as far as they
bring more tokens a second: by the measured time of steps (`engine.steps.curve`), and by how often
the drafts of each answer were accepted. A draft model costs time before that, so it is decided
first whether it drafts, and how many tokens.

Where a step is planned while the one before it runs, a row's last token may be pending. Then its
first draft is a guess at that token, and only those behind it are verified. A row with drafts is
not in the next step, which is planned before anybody knows where the row goes on. So two steps are
weighed there: with drafts a row gets 1 and the accepted ones in them, without drafts it gets 2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.drafts.acceptance import Acceptance
from engine.drafts.estimate import StepEstimate
from engine.drafts.model import ModelDrafter
from engine.drafts.ngrams import BY_MODEL, NO_DRAFT, Draft
from engine.drafts.pools import DraftPools
from engine.requests.request import Request
from engine.steps.curve import StepCurve
from engine.wire.messages import DraftStats

MOST_DRAFTS = 7
"""Drafts of a row, which then has 8 tokens: kernels for decoding take as many."""
_LEAST_GAIN = 1.1
"""How many times the tokens a second drafts must bring, as measurements are uncertain."""
_SURE_MATCH = 3
"""Tokens of a match from which on a draft from text is taken instead of a model's."""
_LEAST_CHANCE = 0.05
"""A draft that is less likely is not weighed: it would take more time than it saves."""
_MOST_DELAY = 1.1
"""How many times as long a step may take if there are rows of other tenants without drafts."""

BeforeEnd = Callable[[Request, Sequence[int]], Sequence[int]]
"""See `engine.scheduling.outputs.Outputs.before_end`."""


class Drafter(Protocol):
    """Guesses what answers will say."""

    def drafts(self, requests: Sequence[Request], most: int) -> Mapping[Request, Draft]:
        """Guess up to `most` tokens after the last one of each answer; answers may be left out."""
        ...

    def end(self, request: Request) -> None:
        """Note that an answer has ended, which has no drafts any more."""
        ...


class NoDrafter:
    """Guesses nothing."""

    def drafts(self, requests: Sequence[Request], most: int) -> Mapping[Request, Draft]:
        return {}

    def end(self, request: Request) -> None:
        pass


@dataclass(slots=True)
class _Record:
    """Knowledge of one answer's drafts.

    match: of the draft in the step that runs.   guess: at the token that was pending, if one was.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    match: int = 0
    guess: int | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """A step before it has drafts.

    deciding: requests that get a token.   most: drafts in it.   num_away: requests whose drafts are
    in flight, so that they are not in this step but in the next one.
    """

    num_tokens: int
    deciding: Sequence[Request]
    most: int
    num_away: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One more draft for a row.   chance: that it and all before it are accepted, and that the
    guess at a pending token is right.

    cost_s: time that attention takes for it.
    """

    request: Request
    chance: float
    cost_s: float


class Speculation:
    """Drafts for all answers of an engine.

    curve: times of its steps.   drafter: one whose drafts cost next to no time.   pools: those that
    it uses.   model: drafts where the drafter is not sure; None without a draft model, which is for
    runners without lag.   lag: see engine.core.Runner.   most_choices: rows and drafts of a step.
    estimate: learns from the steps that run.
    """

    def __init__(
        self,
        curve: StepCurve,
        drafter: Drafter,
        pools: DraftPools | None = None,
        model: ModelDrafter | None = None,
        lag: int = 0,
        most_choices: int | None = None,
    ) -> None:
        self.estimate = StepEstimate(curve)
        self._drafter = drafter
        self._model = model
        self._pools = DraftPools(0) if pools is None else pools
        self._lag, self._most_choices = lag, most_choices
        self._num_away = 0
        self._records: dict[Request, _Record] = {}
        self._figures = DraftStats()

    @classmethod
    def off(cls) -> "Speculation":
        """Speculation of an engine that drafts nothing, as no step has places for drafts."""
        return cls(StepCurve(((1, 0.0), (2, 0.0))), NoDrafter(), most_choices=0)

    def choose(
        self, plan: Mapping[Request, int], budget: int, before_end: BeforeEnd
    ) -> dict[Request, tuple[int, ...]]:
        """Drafts for the rows of a step, by request.

        plan: tokens that the step has to compute, by request.   budget: how many more it may.
        """
        num_away, self._num_away = self._num_away, 0
        if self._most_choices is not None:
            budget = min(budget, self._most_choices - len(plan))
        if budget <= 0:
            return {}
        deciding = [r for r, count in plan.items() if r.samples_after(count)]
        most = min(budget, MOST_DRAFTS * len(deciding))
        step = _Step(sum(plan.values()), deciding, most, num_away)
        if not self._can_gain(step):
            return {}
        requests = [r for r in deciding if _may_draft(r)]
        for request in requests:
            self._records.setdefault(request, _Record()).acceptance.pass_time()
        drafts = _cut(self._drafter.drafts(requests, MOST_DRAFTS + self._lag), before_end)
        modelled, spent_s = self._have_modelled(step, requests, drafts)
        drafts |= _cut(modelled, before_end)
        _, counts = self._best(step, drafts, spent_s, spent_s)
        if self._lag:
            self._num_away = len(counts)
        return {
            request: self._take(request, drafts[request], count)
            for request, count in counts.items()
        }

    def _take(self, request: Request, draft: Draft, count: int) -> tuple[int, ...]:
        """The draft's tokens that a step verifies, of which it is noted what they come from."""
        record, first = self._records[request], request.num_pending_tokens
        record.match, record.guess = draft.match, draft.token_ids[0] if first else None
        return draft.token_ids[first : first + count]

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Note that a row with drafts was verified, before the answer gets what it chose."""
        request.group.num_accepted_tokens += num_accepted
        request.group.num_rejected_tokens += num_drafts - num_accepted
        self._figures.verified_rows += 1
        self._figures.drafted_tokens += num_drafts
        self._figures.accepted_tokens += num_accepted
        if (record := self._records.get(request)) is None:
            return
        if record.guess is not None:
            # A guess is a draft that the step before has verified.
            is_right = record.guess == request.output_token_ids[-1]
            num_drafts, num_accepted = num_drafts + 1, num_accepted + 1 if is_right else 0
        record.acceptance.note(record.match, num_drafts, num_accepted)

    def end(self, request: Request) -> None:
        """Note that an answer has ended."""
        self._records.pop(request, None)
        self._drafter.end(request)
        if self._model is not None:
            self._model.end(request)

    def keep_only(self, running: Mapping[Request, object]) -> None:
        """Give back the slabs of answers that do not run any more."""
        if self._model is not None:
            self._model.keep_only(running)

    @property
    def num_slabs(self) -> int:
        """Slabs of the arena that hold a draft model's KV: they are free for everything else."""
        return self._model.num_slabs if self._model is not None else 0

    def check_integrity(self) -> None:
        if self._model is not None:
            self._model.check_integrity()

    def forget_drafts(self, tenant_id: str, adapter_digest: str | None) -> None:
        """Forget what a tenant's adapter said, or all its adapters if the digest is None."""
        self._pools.forget(tenant_id, adapter_digest)

    def figures(self) -> DraftStats:
        return replace(self._figures, pools=len(self._pools), pool_bytes=self._pools.size_bytes)

    def _can_gain(self, step: _Step) -> bool:
        """Whether drafts would pay if all of them were accepted: not in a step that is full."""
        base_s, num_deciding = self.estimate.seconds(step.num_tokens), len(step.deciding)
        next_tokens, next_s = self._next(step, 0)
        least = _LEAST_GAIN * (num_deciding + next_tokens)
        for before in range(0, step.most, MOST_DRAFTS):
            more_tokens, more_s = self._next(step, before // MOST_DRAFTS + 1)
            for count in range(before + 1, min(before + MOST_DRAFTS, step.most) + 1):
                seconds = self.estimate.seconds(step.num_tokens, count) + more_s
                if (num_deciding + count + more_tokens) * (base_s + next_s) > least * seconds:
                    return True
        return False

    def _next(self, step: _Step, num_drafting: int) -> tuple[int, float]:
        """Tokens that the next step chooses, and its seconds, if so many rows of this one have
        drafts, for which it does not wait; nothing if it does.
        """
        if not self._lag:
            return 0, 0.0
        num_coming = step.num_away - num_drafting
        num_tokens = step.num_tokens + num_coming
        seconds = self.estimate.seconds(num_tokens) if num_tokens else self.estimate.pause_s
        return len(step.deciding) + num_coming, seconds

    def _have_modelled(
        self, step: _Step, requests: Sequence[Request], drafts: Mapping[Request, Draft]
    ) -> tuple[Mapping[Request, Draft], float]:
        """Have the model draft as many tokens as bring most, and return the seconds it takes.

        drafts: those from text.   The number is chosen as if the model had read every answer: if it
        would draft for one then, it reads it now.
        """
        if self._model is None:
            return {}, 0.0
        unsure = [r for r in requests if drafts.get(r, NO_DRAFT).match < _SURE_MATCH]
        unsure = self._model.candidates(unsure, MOST_DRAFTS)
        if not unsure:
            return {}, 0.0
        best_rate, best, spent_s = self._best(step, drafts)[0], 0, 0.0
        for count in range(1, MOST_DRAFTS + 1):
            seconds = self._model.seconds(unsure, count)
            modelled = dict.fromkeys(unsure, Draft((0,) * count, BY_MODEL))
            rate, _ = self._best(step, {**drafts, **modelled}, seconds)
            if rate > best_rate:
                best_rate, best, spent_s = rate, count, seconds
        return (self._model.drafts(unsure, best) if best else {}), spent_s

    def _candidates(self, drafts: Mapping[Request, Draft]) -> Iterator[_Candidate]:
        for request, draft in drafts.items():
            chance = self._records[request].acceptance.chance(draft.match)
            if chance < _LEAST_CHANCE:
                continue
            cost_s = self.estimate.curve.key_s * request.num_tokens
            for place in range(request.num_pending_tokens + 1, len(draft.token_ids) + 1):
                yield _Candidate(request, chance**place, cost_s)

    def _best(
        self,
        step: _Step,
        drafts: Mapping[Request, Draft],
        drafting_s: float = 0.0,
        spent_s: float = 0.0,
    ) -> tuple[float, dict[Request, int]]:
        """The step that brings most tokens a second: how many these are, and how many drafts each
        request has in it.

        drafting_s: time that drafts cost before it.   spent_s: how much of it is spent already.
        """
        candidates = sorted(self._candidates(drafts), key=lambda c: -c.chance)[: step.most]
        base_s = self.estimate.seconds(step.num_tokens) + spent_s
        next_tokens, next_s = self._next(step, 0)
        best_rate = _LEAST_GAIN * (len(step.deciding) + next_tokens) / (base_s + next_s)
        best = 0
        expected, extra_s = float(len(step.deciding)), drafting_s
        drafting: set[Request] = set()
        others = set(step.deciding)
        for count, candidate in enumerate(candidates, start=1):
            expected += candidate.chance
            extra_s += candidate.cost_s
            drafting.add(candidate.request)
            others.discard(candidate.request)
            seconds = self.estimate.seconds(step.num_tokens, count) + extra_s
            if seconds > _MOST_DELAY * base_s and _slows_others(drafting, others):
                continue
            next_tokens, next_s = self._next(step, len(drafting))
            rate = (expected + next_tokens) / (seconds + next_s)
            if rate > best_rate:
                best_rate, best = rate, count
        counts: dict[Request, int] = {}
        for candidate in candidates[:best]:
            counts[candidate.request] = counts.get(candidate.request, 0) + 1
        return best_rate, counts


def _cut(drafts: Mapping[Request, Draft], before_end: BeforeEnd) -> dict[Request, Draft]:
    """Drafts as far as they are certain not to end their answers, without those that leave nothing
    to verify.
    """
    cut: dict[Request, Draft] = {}
    for request, draft in drafts.items():
        num_guesses = request.num_pending_tokens
        token_ids = before_end(request, draft.token_ids[: num_guesses + MOST_DRAFTS])
        if len(token_ids) > num_guesses:
            cut[request] = Draft(tuple(token_ids), draft.match)
    return cut


def _may_draft(request: Request) -> bool:
    """Whether an answer may have drafts now: its first token is known."""
    is_ahead = request.constraint is None or request.constraint.can_look_ahead
    may_draft = request.message.drafts and not request.is_beam
    return may_draft and bool(request.output_token_ids) and is_ahead


def _slows_others(drafting: set[Request], others: set[Request]) -> bool:
    """Whether a tenant waits for another's drafts without having one itself."""
    helped = {request.tenant_id for request in drafting}
    return any(request.tenant_id not in helped for request in others)
