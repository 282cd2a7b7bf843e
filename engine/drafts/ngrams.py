"""Drafts from text that was seen before: what followed the last time these tokens came."""

from collections.abc import Sequence
from dataclasses import dataclass, field

_LENGTHS = (3, 2, 1)
"""Tokens of the n-grams that are looked up, the most telling first."""
_MOST_CANDIDATES = 8
"""Places of a 3-gram that are compared; of a shorter one the last place is taken."""
LONGEST_MATCH = 32
_END = -1
"""Stands behind each text, so that no draft goes on into the next one."""

Ngram = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next.

    match: how many tokens before them are the same, up to 32; BY_MODEL if a model drafted them.
    """

    token_ids: tuple[int, ...]
    match: int


NO_DRAFT = Draft((), 0)
BY_MODEL = -1


@dataclass(slots=True)
class NgramIndex:
    """Texts, and where each n-gram was last seen in them, and before that: hash chains, as in LZ77.

    token_ids: the texts, one behind the other.   last: place of an n-gram's last token, by n-gram.
    previous: for each place, the one before it with the same 3-gram; -1 if there is none.
    """

    token_ids: list[int] = field(default_factory=list)
    last: dict[Ngram, int] = field(default_factory=dict)
    previous: list[int] = field(default_factory=list)

    def add_text(self, token_ids: Sequence[int]) -> None:
        """Add a complete text."""
        self.extend(token_ids)
        self.extend((_END,))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the last text.

        The n-grams that end at the text's end are added with the token behind them: a look-up for
        what follows the end must find those before.
        """
        known = self.token_ids
        for token_id in token_ids:
            self._note_ngrams()
            known.append(token_id)

    def continuation(self, most: int) -> Draft:
        """Tokens that may follow the last text, `most` at most: what followed its end before."""
        return self.find(self.token_ids[-LONGEST_MATCH:], most)

    def find(self, tail: Sequence[int], most: int) -> Draft:
        """Tokens that may follow a text, `most` at most.   tail: the text's last tokens."""
        for length in _LENGTHS:
            place = self.last.get(tuple(tail[-length:]))
            if place is not None and len(tail) >= length:
                return self._longest(place, tail, most)
        return NO_DRAFT

    def _note_ngrams(self) -> None:
        known, last = self.token_ids, self.last
        if not known:
            return
        place = len(known) - 1
        self.previous.append(last.get(tuple(known[-3:]), -1))
        for length in _LENGTHS:
            last[tuple(known[-length:])] = place

    def _longest(self, place: int, tail: Sequence[int], most: int) -> Draft:
        """The continuation of the longest match among the last places of an n-gram."""
        found, longest = place, self._match(place, tail)
        for _ in range(_MOST_CANDIDATES - 1):
            place = self.previous[place] if longest >= _LENGTHS[0] else -1
            if place < 0:
                break
            length = self._match(place, tail)
            if length > longest:
                found, longest = place, length
        return Draft(self._after(found, most), longest)

    def _match(self, place: int, tail: Sequence[int]) -> int:
        """How many tokens up to a place are the last ones of `tail`."""
        known, length = self.token_ids, 0
        most = min(len(tail), place + 1, LONGEST_MATCH)
        while length < most and known[place - length] == tail[-1 - length] != _END:
            length += 1
        return length

    def _after(self, place: int, most: int) -> tuple[int, ...]:
        """The tokens behind a place; a text that repeats itself up to its end goes on to do so."""
        known = self.token_ids
        period = len(known) - 1 - place
        token_ids = [known[place + 1 + i % period] for i in range(most)]
        return tuple(token_ids[: token_ids.index(_END)] if _END in token_ids else token_ids)
