"""Has answers say what their grammars leave: forced tokens at once, others under a mask."""

import time
from collections.abc import Iterable, Sequence

from engine.grammar.constraint import Constraint
from engine.grammar.constraints import Constraints
from engine.grammar.matcher import Mask
from engine.requests.request import Request
from engine.scheduling.endings import Endings
from engine.scheduling.fairness import PREFILL_COST, Policy
from engine.scheduling.in_flight import Launched
from engine.scheduling.outputs import Ending, Outputs

_PATIENCE = 0.05
_LEAST_PATIENCE_S = 1e-3
"""How long a step waits for masks that a lane has not made yet: a share of the last step's time."""


class Forced:
    """Adds tokens without an alternative to answers at once; no step chooses them."""

    def __init__(
        self, constraints: Constraints, outputs: Outputs, policy: Policy, endings: Endings
    ) -> None:
        self._figures = constraints.lanes.figures
        self._outputs = outputs
        self._policy = policy
        self._endings = endings

    def add_known(self, running: Iterable[Request]) -> None:
        """Add the forced tokens that are known, for the next step to compute with those before."""
        for request in list(running):
            constraint = request.constraint
            if constraint is None or request.num_pending_tokens or not constraint.has_forced:
                continue
            if _may_force(request):
                self._add(request, constraint)

    def masks(self, launched: Launched, step_s: float) -> dict[int, Sequence[Mask]]:
        """Masks of a step's constrained rows that are to choose, by row number: of the next token,
        then of those behind drafts.

        A row whose grammar leaves no choice gets its tokens at once. A row whose mask is late
        chooses nothing, and has the next step compute its last token again.
        step_s: seconds that the step before took.
        """
        until = time.monotonic() + max(_LEAST_PATIENCE_S, _PATIENCE * step_s)
        masks: dict[int, Sequence[Mask]] = {}
        rows = zip(launched.batch.rows, launched.requests, strict=True)
        for number, (row, request) in enumerate(rows):
            constraint = request.constraint
            if not row.is_constrained or request.finish_reason is not None:
                continue
            if constraint is None:
                masks[number] = self._outputs.masks(request, row.draft_token_ids, None)
                continue
            found = constraint.wait(until)
            if constraint.error is not None:
                self._figures.masks_failed += 1
                ending = Ending("error", "constraint_too_slow", constraint.error)
                self._endings.end_group(request.group, ending)
            elif found is None:
                self._figures.masks_late += 1
                launched.leave_out(number, num_again=1 + row.num_drafts)
            elif found.forced and _may_force(request):
                launched.leave_out(number, num_again=row.num_drafts)
                self._add(request, constraint)
            else:
                ahead = constraint.wait_ahead(until) if row.num_drafts else ()
                allowed = (found.first_mask, *ahead)
                masks[number] = self._outputs.masks(request, row.draft_token_ids, allowed)
        return masks

    def _add(self, request: Request, constraint: Constraint) -> None:
        """Add the tokens that an answer's grammar forces; its tenant pays for computing them."""
        num_before = len(request.output_token_ids)
        if self._outputs.add_tokens(request, constraint.take_forced(request.num_leased_tokens)):
            self._endings.put_away(request)
        added = tuple(request.output_token_ids[num_before:])
        self._policy.charge(request, PREFILL_COST * len(added))
        self._figures.forced_tokens += len(added)
        self._outputs.note_progress(request, added)
        self._outputs.result.num_forced += len(added)


def _may_force(request: Request) -> bool:
    """Whether an answer may get tokens without the model.

    It may not get the first one, since only a step that has ended says which adapter it applied;
    nor any where logprobs are wanted, where a step may give the answer one token only, or where no
    lease covers them.
    """
    if request.num_computed_tokens < request.num_prompt_tokens or request.is_unleased:
        return False
    return request.params.logprobs is None and request.message.drafts
