"""A model of budgets in plain sums, with which the gateway's SQL is compared."""

from dataclasses import dataclass, field

from server.billing.months import month_of

SLACK_MS = 60_000
LEASE_TOKENS = 256


@dataclass
class Held:
    prompt: int
    lease: int
    answers: int


@dataclass
class BudgetModel:
    """Budgets of one tenant. limits: by kind.   charges: (month, amount) of usage, by request."""

    prompt_price: int
    token_price: int
    limits: dict[str, int] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    charges: dict[str, tuple[str, int]] = field(default_factory=dict)
    paid: int = 0

    def cost(self, prompt: int, tokens: int) -> int:
        return prompt * self.prompt_price + tokens * self.token_price

    def spent(self, month: str) -> int:
        return sum(amount for of, amount in self.charges.values() if of == month)

    def remaining(self, kind: str, now_ms: int) -> int:
        held = sum(self.cost(hold.prompt, hold.lease) for hold in self.held.values())
        if kind == "prepaid":
            used = sum(amount for _, amount in self.charges.values())
            return self.paid - used - held - self.limits[kind]
        months = {month_of(now_ms + shift) for shift in (-SLACK_MS, 0, SLACK_MS)}
        return self.limits[kind] - max(self.spent(month) for month in months) - held

    def cover(self, prompt: int, wanted: int, answers: int, now_ms: int) -> int | None:
        """Lease in completion tokens; None if the prompt and a token per answer cannot be paid."""
        remaining = min(self.remaining(kind, now_ms) for kind in self.limits)
        if self.cost(prompt, answers) > remaining:
            return None
        return self._lease(remaining - self.cost(prompt, 0), wanted, answers)

    def extend(self, hold: Held, wanted: int, now_ms: int) -> int:
        remaining = min(self.remaining(kind, now_ms) for kind in self.limits)
        return hold.lease + self._lease(remaining, wanted - hold.lease, hold.answers)

    def _lease(self, remaining: int, wanted: int, answers: int) -> int:
        payable = remaining // (answers * self.token_price)
        each = min(wanted // answers, LEASE_TOKENS, payable, max(16, payable // 8))
        return max(each, 0) * answers

    def is_held(self, prompt: int, answers: int, now_ms: int) -> bool:
        """Whether what is needed is there but for the holds of other requests."""
        held = sum(self.cost(hold.prompt, hold.lease) for hold in self.held.values())
        remaining = min(self.remaining(kind, now_ms) for kind in self.limits)
        return self.cost(prompt, answers) <= remaining + held
