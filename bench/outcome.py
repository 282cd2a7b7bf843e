"""The outcome of one request, in one form for all systems."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a request; times are in seconds from the start of the run.

    chunk_s: when each piece of the answer that carries tokens came.
    error: a code; None if the request went well.
    """

    index: int
    model: str
    num_prompt_tokens: int
    due_s: float
    sent_s: float
    end_s: float
    chunk_s: tuple[float, ...]
    token_ids: tuple[int, ...]
    error: str | None = None

    @property
    def lag_s(self) -> float:
        """How late the generator sent the request."""
        return self.sent_s - self.due_s

    # Times count from when the request was due: a late generator must not look like a fast server.
    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Time from the first token to the last, divided by the number of further tokens."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(len(self.token_ids) - 1, 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between successive chunks."""
        return [b - a for a, b in pairwise(self.chunk_s)]


def gaps_between(outcomes: Iterable[Outcome], start_s: float, end_s: float) -> list[float]:
    """Return gaps between tokens of one answer that end within (start_s, end_s]."""
    return [
        gap
        for outcome in outcomes
        for gap, after in zip(outcome.gaps_s, outcome.chunk_s[1:], strict=True)
        if start_s < after <= end_s
    ]
