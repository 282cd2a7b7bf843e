"""The plan of the next step: which tokens of which requests it computes, and what they cost."""

from collections.abc import Sequence

from engine.requests.request import Request
from engine.scheduling.fairness import DECODE_COST, PREFILL_COST, Policy


class StepPlan:
    """A step before it is launched. Tenants pay for tokens as they are planned.

    tokens: how many each request computes.   drafts: tokens that it verifies besides.
    budget: tokens that the step may still take.
    """

    def __init__(self, budget: int, policy: Policy) -> None:
        self.tokens: dict[Request, int] = {}
        self.drafts: dict[Request, tuple[int, ...]] = {}
        self.budget = budget
        self._policy = policy
        # By request: the service charged for its tokens, and its prompt tokens charged before.
        self._charges: dict[Request, tuple[float, int]] = {}

    def add(self, request: Request, num_tokens: int) -> None:
        """Plan a request's next tokens, and charge for them and for the load of its adapter; tokens
        cached or computed again are free.
        """
        service, num_charged = 0.0, request.num_charged_tokens
        if num_charged < request.num_prompt_tokens:
            start = max(request.num_scheduled_tokens, num_charged)
            end = min(request.num_scheduled_tokens + num_tokens, request.num_prompt_tokens)
            service = max(end - start, 0) * PREFILL_COST
            request.num_charged_tokens = max(end, num_charged)
        if request.samples_after(num_tokens):
            service += DECODE_COST
        self._charges[request] = service, num_charged
        self._policy.charge(request, service + request.load_service)
        request.load_service = 0.0
        self.tokens[request] = num_tokens
        self.budget -= num_tokens

    def add_drafts(self, request: Request, token_ids: Sequence[int]) -> None:
        """Have a planned row verify drafts, which are paid for whether they are accepted or not."""
        self._policy.charge(request, PREFILL_COST * len(token_ids))
        self.drafts[request] = tuple(token_ids)
        self.budget -= len(token_ids)

    def refund(self, request: Request) -> None:
        """Take back the charge for tokens that the step will not compute after all."""
        if request in self.tokens:
            service, request.num_charged_tokens = self._charges.pop(request)
            self._policy.charge(request, -service)

    def remove(self, request: Request) -> None:
        """Take a request out of the step."""
        self.budget += self.tokens.pop(request, 0) + len(self.drafts.pop(request, ()))
