"""How many tokens a tenant's requests generate if they do not say how many they want."""

import math
from collections import OrderedDict
from dataclasses import dataclass

FIRST_GUESS = 256
"""Tokens expected of a tenant of which nothing is known yet."""
_MAX_TENANTS = 10_000
_MEAN_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4
_DEVIATIONS = 2
"""Gains and form of TCP's estimate of round trips (RFC 6298), which has the same problem."""


@dataclass(slots=True)
class _Estimate:
    mean: float
    deviation: float


class LearnedTokens:
    """A moving mean plus two mean deviations, per tenant; the least recently used are forgotten.

    The estimate decides how many tokens are reserved, never how many are generated: an answer that
    is longer than its estimate puts its limit into debt.
    """

    def __init__(self, max_tenants: int = _MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._estimates: OrderedDict[str, _Estimate] = OrderedDict()

    def expect(self, tenant_id: str) -> int:
        """Completion tokens expected of one answer, at least 1."""
        estimate = self._estimates.get(tenant_id)
        if estimate is None:
            return FIRST_GUESS
        self._estimates.move_to_end(tenant_id)
        return max(1, math.ceil(estimate.mean + _DEVIATIONS * estimate.deviation))

    def learn(self, tenant_id: str, completion_tokens: int) -> None:
        """Take in one more answer that ended by itself."""
        estimate = self._estimates.get(tenant_id)
        if estimate is None:
            first = _Estimate(completion_tokens, completion_tokens / 2)
            self._estimates[tenant_id] = first
            if len(self._estimates) > self._max_tenants:
                self._estimates.popitem(last=False)
            return
        self._estimates.move_to_end(tenant_id)
        error = completion_tokens - estimate.mean
        estimate.deviation += _DEVIATION_GAIN * (abs(error) - estimate.deviation)
        estimate.mean += _MEAN_GAIN * error
