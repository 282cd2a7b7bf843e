"""The next tokens that one answer may have: a lane finds them, and the engine polls."""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.grammar.compilation import SLOW_S, Compilation
from engine.grammar.lane import Lane
from engine.grammar.lanes import Lanes
from engine.grammar.matcher import ConstraintFailed, Mask, Matcher

MASK_BUDGET_S = 0.25
"""Processor time for an answer's next mask; an answer that needs more fails."""
_MOST_FORCED = 64
"""How many tokens are forced in a row before a step computes them."""


@dataclass(frozen=True, slots=True)
class Next:
    """Tokens that may come next.

    forced: tokens without an alternative.
    mask: of the token that follows them; all zeros if they end the answer.
    """

    forced: tuple[int, ...]
    mask: Mask

    @property
    def first_mask(self) -> Mask:
        """The mask of the very next token."""
        return also(np.zeros_like(self.mask), self.forced[:1]) if self.forced else self.mask


class _Ahead:
    """Masks behind drafts, once they are known."""

    def __init__(self) -> None:
        self.masks: Sequence[Mask] = ()
        self.is_known = threading.Event()


class Constraint:
    """The next tokens of one answer.   eos_token_ids: tokens after which nothing follows."""

    def __init__(
        self, compilation: Compilation, lanes: Lanes, eos_token_ids: Collection[int]
    ) -> None:
        assert compilation.matcher is not None, "not compiled yet"
        self._compilation = compilation
        self._matcher: Matcher = compilation.matcher.fork()
        self._lanes = lanes
        self._eos_token_ids = eos_token_ids
        self._is_known = threading.Event()
        self._next: Next | None = None
        self._ahead = _Ahead()
        # A job for the masks behind drafts may still run when the next one begins on another lane.
        self._in_use = threading.Lock()
        self.error: str | None = None
        self._submit(())

    def must_wait(self, num_pending_tokens: int) -> bool:
        """Whether a slow grammar has still to say what may follow, for which no step waits."""
        is_known = self._is_known.is_set() and not num_pending_tokens
        return self._compilation.is_slow and not is_known

    @property
    def has_forced(self) -> bool:
        """Whether tokens are known that have no alternative."""
        found = self._next if self._is_known.is_set() else None
        return self.error is None and found is not None and bool(found.forced)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that the masks allowed; what comes next is found on a lane."""
        if self._next is not None and self._next.forced:
            first, *forced = self._next.forced
            assert tuple(token_ids) == (first,), "it had no alternative"
            self._next = Next(tuple(forced), self._next.mask)
        else:
            self._submit(tuple(token_ids))

    def _submit(self, token_ids: Sequence[int]) -> None:
        self._is_known.clear()
        self._next = None
        self._lane.submit(self._compilation.tenant_id, lambda: self._look(token_ids))

    @property
    def _lane(self) -> Lane:
        return self._lanes.slow if self._compilation.is_slow else self._lanes.fast

    @property
    def can_look_ahead(self) -> bool:
        """Whether masks behind drafts are found in time: those of a slow grammar are not."""
        return self.error is None and not self._compilation.is_slow

    def look_ahead(self, draft_token_ids: Sequence[int]) -> None:
        """Have the masks behind these tokens found as well, as far as the grammar allows them."""
        ahead, drafts = _Ahead(), tuple(draft_token_ids)
        self._ahead = ahead
        self._lane.submit(self._compilation.tenant_id, lambda: self._look_behind(drafts, ahead))

    def wait_ahead(self, until: float) -> Sequence[Mask]:
        """Wait for the masks behind drafts until a time of time.monotonic(); none if it is over."""
        patience_s = max(0.0, until - time.monotonic())
        return self._ahead.masks if self._ahead.is_known.wait(patience_s) else ()

    def wait(self, until: float) -> Next | None:
        """Wait for what may come next until a time of time.monotonic(); None if it is not known.

        The result is None as well after an `error`, which the answer cannot recover from.
        """
        patience_s = 0.0 if self._compilation.is_slow else until - time.monotonic()
        return self._next if self._is_known.wait(max(0.0, patience_s)) else None

    def take_forced(self, most: int) -> tuple[int, ...]:
        """Take so many forced tokens, which become part of the answer; others and the mask stay."""
        assert self._next is not None
        forced = self._next.forced
        self._next = Next(forced[most:], self._next.mask)
        return forced[:most]

    # ---- on a lane ----

    def _look(self, token_ids: Sequence[int]) -> None:
        begun = time.thread_time()
        try:
            with self._in_use:
                if token_ids:
                    self._matcher.consume(token_ids)
                self._next = self._find_next()
        except ConstraintFailed as failed:
            self.error = str(failed)
        seconds = time.thread_time() - begun
        if seconds > MASK_BUDGET_S:
            self.error = f"a mask took {seconds * 1000:.0f} ms"
        self._compilation.note(seconds)
        self._lanes.note_mask(self._compilation.tenant_id, seconds)
        self._is_known.set()

    def _look_behind(self, draft_token_ids: Sequence[int], ahead: "_Ahead") -> None:
        begun = time.thread_time()
        with self._in_use:
            ahead.masks = tuple(self._masks_behind(draft_token_ids, begun))
        self._lanes.note_mask(self._compilation.tenant_id, time.thread_time() - begun)
        ahead.is_known.set()

    def _masks_behind(self, draft_token_ids: Sequence[int], begun: float) -> Iterator[Mask]:
        """Yield masks until a token is not allowed, or it has taken too long."""
        found = self._next
        if found is None or found.forced:
            return
        matcher, mask = self._matcher.fork(), found.mask
        for token_id in draft_token_ids:
            if not allows(mask, token_id) or time.thread_time() - begun > SLOW_S:
                return
            try:
                matcher.consume([token_id])
                mask = matcher.mask()
            except ConstraintFailed:
                return  # the answer fails if it comes this far
            yield mask

    def _find_next(self) -> Next:
        forced: list[int] = []
        while True:
            mask = self._matcher.mask()
            token_id = _only_token(mask)
            if token_id is None or len(forced) == _MOST_FORCED:
                return Next(tuple(forced), mask)
            forced.append(token_id)
            if token_id in self._eos_token_ids:
                return Next(tuple(forced), np.zeros_like(mask))
            self._matcher.consume([token_id])


def allows(mask: Mask, token_id: int) -> bool:
    """Whether a mask has this token."""
    return token_id < 8 * len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _only_token(mask: Mask) -> int | None:
    """The token of a mask that has a single one."""
    words = mask.view(np.uint64)
    places = words.nonzero()[0]
    if len(places) != 1:
        return None
    word = int(words[places[0]])
    return None if word & (word - 1) else int(places[0]) * 64 + word.bit_length() - 1


def also(mask: Mask, token_ids: Collection[int]) -> Mask:
    """The mask with these tokens, as far as it has places for them."""
    mask = mask.copy()
    for token_id in token_ids:
        if token_id < 8 * len(mask):
            mask[token_id >> 3] |= 1 << (token_id & 7)
    return mask


def without(mask: Mask, token_ids: Collection[int]) -> Mask:
    """The mask without these tokens, or the whole one if nothing else is left."""
    if not token_ids:
        return mask
    kept = mask.copy()
    for token_id in token_ids:
        if token_id < 8 * len(kept):
            kept[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
    return kept if kept.any() else mask
