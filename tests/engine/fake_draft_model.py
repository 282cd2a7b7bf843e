"""A draft model for tests, which knows what FakeRunner chooses without an adapter."""

from engine.drafts.model import ModelDrafter
from engine.drafts.pools import DraftPools
from engine.drafts.speculation import Speculation
from engine.drafts.text import TextDrafter
from engine.steps.curve import StepCurve
from tests.engine.fakes import FLAT, fake_token

CHEAP = StepCurve(((1, 0.01), (2, 0.01)))
_MARK = "draft"


class FakeDraftModel:
    """Says the token that follows what it finds in its KV.

    slabs: memory of the FakeRunner too, in which it writes its own mark in place of an adapter's
    digest.
    sizes: tokens of each step.
    """

    def __init__(self, block_size=48, curve=CHEAP, window=None):
        self.slabs, self.block_size, self.curve, self.window = {}, block_size, curve, window
        self.sizes = []
        self.seen = set()

    def next_tokens(self, rows):
        self.sizes.append(sum(len(row.token_ids) for row in rows))
        for row in rows:
            self.seen.add(row.request_id)
            for position, token in enumerate(row.token_ids, row.start):
                slab, offset = self._place(row, position)
                self.slabs.setdefault(slab, {})[offset] = (token, _MARK)
        return [fake_token(self._history(row), None, 0) for row in rows if row.sampling]

    def _history(self, row):
        tokens = []
        for position in range(max(0, row.end - (self.window or row.end)), row.end):
            slab, offset = self._place(row, position)
            token, mark = self.slabs[slab][offset]
            assert mark == _MARK, "somebody else wrote into the draft model's KV"
            tokens.append(token)
        return tokens

    def _place(self, row, position):
        return row.block_ids[position // self.block_size], position % self.block_size


def speculating(model, curve=FLAT, drafter=None, idle_share=0.0):
    """Drafts of a model where `drafter` has none, as make_scheduler takes them."""

    def speculate(arena, max_model_len):
        drafts = ModelDrafter(model, arena, max_model_len, idle_share)
        return Speculation(curve, drafter or TextDrafter(DraftPools(0)), model=drafts)

    return speculate
