"""A drafter for tests, which knows what answers will say."""

import random

from engine.drafts.ngrams import NO_DRAFT, Draft


class ReplayDrafter:
    """Drafts what an answer is known to become, with wrong tokens at random places.

    answers: token ids by `key` of a request; other requests have no drafts.
    """

    def __init__(self, answers, key, seed=0):
        self.answers, self.key = answers, key
        self.chance = random.Random(seed)

    def drafts(self, requests, most):
        return {request: self._draft(request, most) for request in requests}

    def _draft(self, request, most):
        known = self.answers.get(self.key(request))
        if known is None:
            return NO_DRAFT
        start = len(request.output_token_ids)
        assert list(known[:start]) == request.output_token_ids, "another answer than it gets alone"
        drafts = known[start : start + self.chance.randint(0, most)]
        is_wrong = [self.chance.random() < 0.2 for _ in drafts]
        drafts = [t + 1 - 2 * (t > 1) if w else t for t, w in zip(drafts, is_wrong, strict=True)]
        return Draft(tuple(drafts), 32)

    def end(self, request):
        pass
