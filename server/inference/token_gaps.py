"""The times between an answer's tokens, as its client sees them."""

from collections import deque
from statistics import median

from engine.messages import RequestOutput

_MAX_GAPS = 512


class TokenGaps:
    """The gaps between outputs of one request, each within one answer: the latest `_MAX_GAPS`."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_MAX_GAPS)
        self._last_at: dict[int, float] = {}

    def note(self, output: RequestOutput, now: float) -> None:
        if not output.new_token_ids:
            return
        if (last_at := self._last_at.get(output.index)) is not None:
            self._gaps_s.append(now - last_at)
        self._last_at[output.index] = now

    @property
    def p50_s(self) -> float | None:
        """The median; None if no answer has had a second output."""
        return median(self._gaps_s) if self._gaps_s else None
