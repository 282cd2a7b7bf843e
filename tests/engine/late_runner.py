"""A wrapper that makes a plain runner compute one step late, as a device does."""

from collections import deque
from dataclasses import replace

from engine.requests.request import PENDING_TOKEN


class LateRunner:
    """Computes a step only when it is collected, one step after the scheduler, as a GPU does."""

    lag = 1

    def __init__(self, adapters):
        self.adapters = adapters
        self.runner = None
        self._launched = deque()
        self._choices = {}
        self._tables = {}
        self._chosen = {}

    def tables(self, key):
        """An adapter's tables as of the launch of the step; fences keep the adapter in place."""
        return self._tables[key]

    def launch(self, batch):
        tables = {key: self.adapters.tables(key) for key in batch.adapters}
        self._launched.append((batch, tables))

    def choose(self, masks):
        self._choices[self._launched[-1][0].step] = masks

    @property
    def meter(self):
        return self.runner.meter

    def collect(self):
        batch, self._tables = self._launched.popleft()
        rows = tuple(self._with_known_tokens(row) for row in batch.rows)
        self.runner.launch(replace(batch, rows=rows))
        if batch.is_constrained:
            self.runner.choose(self._choices.pop(batch.step))
        tokens = self.runner.collect()
        for row, token in zip(rows, tokens.token_ids, strict=True):
            self._chosen[row.request_id, row.index] = token
        return tokens

    def _with_known_tokens(self, row):
        chosen = self._chosen.get((row.request_id, row.index))
        known = {
            name: tuple(chosen if token == PENDING_TOKEN else token for token in getattr(row, name))
            for name in ("token_ids", "output_token_ids")
        }
        return row._replace(**known)
