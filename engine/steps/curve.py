"""How long a step takes, by its number of tokens.

    1 to 8 tokens     the weights are read once, and a token more costs next to nothing
    more              arithmetic decides, and each token costs the same

Where the first part ends depends on processor, model and rounding, so `engine.steps.measurement`
measures it.
"""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Seconds of steps.

    points: (tokens, seconds), at least two, rising in both.
    key_s: seconds that a further token in a row costs for each key that it attends to.
    """

    points: tuple[tuple[int, float], ...]
    key_s: float = 0.0

    def __str__(self) -> str:
        steps = ", ".join(f"{tokens}: {seconds * 1e3:.1f}" for tokens, seconds in self.points)
        return f"steps take (tokens: ms) {steps}, and {self.key_s * 1e9:.0f} ns more for each key"

    def seconds(self, num_tokens: int) -> float:
        """Seconds of a step of so many tokens, on straight lines through the measured steps."""
        at = bisect_left(self.points, (num_tokens, 0.0))
        at = min(max(at, 1), len(self.points) - 1)
        (tokens, begin), (more_tokens, end) = self.points[at - 1], self.points[at]
        slope = (end - begin) / (more_tokens - tokens)
        return begin + slope * (num_tokens - tokens)
