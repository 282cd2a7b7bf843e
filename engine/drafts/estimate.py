"""How long a step will take with drafts, by the curve that was measured and by steps that ran."""

from engine.steps.curve import StepCurve

_NEWEST = 0.1
"""Weight of the last step; those before count less and less."""
_MOST_CHANGE = 2.0
"""A step counts as so many times what was expected at most: the processor was somebody else's."""
_FORGOTTEN = 0.01
"""Share that is forgotten in a step without drafts, so that they are tried again in time."""
_LEAST_PRICE, _HIGHEST_PRICE = 0.5, 4.0


class StepEstimate:
    """Learns what the curve leaves out.

    A curve is measured once, at the starts of sequences and on a machine that may have been idle.
    offset_s: what a step without drafts takes more, as its rows attend to many keys.
    price: how many times more than by the curve drafts cost. They make a step that is bound by
    bytes one that is bound by arithmetic, which is what a neighbour on the same core slows down.
    pause_s: what a step takes more that is planned and launched while no other one runs.
    """

    def __init__(self, curve: StepCurve) -> None:
        self.curve = curve
        self.offset_s = 0.0
        self.price = 1.0
        self.pause_s = 0.0

    def seconds(self, num_tokens: int, num_drafts: int = 0) -> float:
        """Time of a step.   num_tokens: without the drafts."""
        base_s = self.curve.seconds(num_tokens)
        more_s = self.curve.seconds(num_tokens + num_drafts) - base_s
        return base_s + self.offset_s + self.price * more_s

    def note(self, num_tokens: int, num_drafts: int, seconds: float) -> None:
        """Note a step that ran, whose rows all decoded.   num_tokens: without the drafts."""
        if seconds <= 0.0:
            return  # shorter than a tick of the clock
        seconds = min(seconds, _MOST_CHANGE * self.seconds(num_tokens, num_drafts))
        base_s = self.curve.seconds(num_tokens)
        if not num_drafts:
            offset_s = max(0.0, seconds - base_s)  # less would make small steps take no time
            self.offset_s += _NEWEST * (offset_s - self.offset_s)
            self.price += _FORGOTTEN * (1.0 - self.price)
            self.pause_s -= _FORGOTTEN * self.pause_s
            return
        more_s = self.curve.seconds(num_tokens + num_drafts) - base_s
        if more_s > 0.0:
            price = (seconds - base_s - self.offset_s) / more_s
            price = min(max(price, _LEAST_PRICE), _HIGHEST_PRICE)
            self.price += _NEWEST * (price - self.price)

    def note_after_pause(self, num_tokens: int, num_drafts: int, seconds: float) -> None:
        """Note a step before which the device waited for the host, since the step before ended."""
        expected_s = self.seconds(num_tokens, num_drafts)
        pause_s = min(max(seconds - expected_s, 0.0), _MOST_CHANGE * expected_s)
        self.pause_s += _NEWEST * (pause_s - self.pause_s)
