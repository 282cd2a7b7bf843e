"""How probable it is that an answer's next draft is the token that the model chooses."""

from bisect import bisect_right

from engine.drafts.ngrams import BY_MODEL

_LONGER = (2, 3, 6, 12)
_PRIORS = (0.2, 0.35, 0.5, 0.75, 0.85, 0.6)
"""First guesses for matches of one token, of at least 2, 3, 6 and 12, and for drafts of a model."""
_PRIOR_WEIGHT = 2.0
_KEPT = 0.9
"""Share of what was learned that stays when more is learned: the last ten drafts count most."""
_FORGOTTEN = 0.995
"""Share that stays with every step, so that drafts are tried again some time after they failed."""


class Acceptance:
    """Learned from one answer, by the length of the match that a draft was made from, and for a
    model's drafts.
    """

    def __init__(self) -> None:
        self._accepted = [0.0] * len(_PRIORS)
        self._judged = [0.0] * len(_PRIORS)

    def chance(self, match: int) -> float:
        """Probability that the next draft is accepted, if those before it were."""
        kind = _kind(match)
        accepted = self._accepted[kind] + _PRIOR_WEIGHT * _PRIORS[kind]
        return accepted / (self._judged[kind] + _PRIOR_WEIGHT)

    def note(self, match: int, num_drafts: int, num_accepted: int) -> None:
        """Note a verified draft. Of its tokens, those behind the first rejected one tell nothing.

        match: as in the draft.
        """
        kind = _kind(match)
        judged = num_accepted + (num_accepted < num_drafts)
        self._accepted[kind] = _KEPT**judged * self._accepted[kind] + num_accepted
        self._judged[kind] = _KEPT**judged * self._judged[kind] + judged

    def pass_time(self) -> None:
        """Forget a little, as a step has passed."""
        for kind in range(len(_PRIORS)):
            self._accepted[kind] *= _FORGOTTEN
            self._judged[kind] *= _FORGOTTEN


def _kind(match: int) -> int:
    return len(_PRIORS) - 1 if match == BY_MODEL else bisect_right(_LONGER, match)
