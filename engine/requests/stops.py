"""Matches stop strings on the bytes of tokens: which tokens may leave, and where the text ends.

Tokens leave in the order they came, so that their logprobs can wait in a queue of their own.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence


class StopMatcher:
    """Holds back every token that may still turn out to be part of a stop string.

    words: bytes of tokens that the caller's vocabulary has otherwise.   is_text: whether a stop
    string is part of the text that it ends.
    """

    def __init__(
        self,
        stops: Sequence[bytes],
        words: Mapping[int, bytes] | None = None,
        is_text: bool = False,
    ) -> None:
        # In order, so that those with a given beginning are next to each other.
        self._stops = sorted(stops)
        self._backwards = sorted(stop[::-1] for stop in stops)
        self._is_text = is_text
        self._words = words or {}
        self._held: list[tuple[int, int]] = []  # (token id, its number of bytes)
        self._text = b""  # the bytes of the held tokens

    def push(self, token_id: int, token: bytes) -> tuple[list[int], int | None]:
        """Take one more token.

        Returns the tokens that are certain now, and, once a stop string is complete, how many
        trailing bytes of all text so far belong to it (unless it is text) or follow it (every held
        token is then released).
        """
        if not self._stops:
            return [token_id], None
        token = self.word(token_id, token)
        self._held.append((token_id, len(token)))
        self._text += token
        found = [(at + len(stop), at) for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if found:
            # The stop string that is complete first in the text counts, however tokens divide it.
            end, start = min(found)
            surplus = len(self._text) - (end if self._is_text else start)
            return self.flush(), surplus
        return self._release(len(self._text) - self._possible_start()), None

    def word(self, token_id: int, known: bytes) -> bytes:
        """The bytes of a token, which the caller's vocabulary knows as `known`."""
        return self._words.get(token_id, known)

    def copy(self) -> "StopMatcher":
        """A matcher that holds the same tokens back."""
        copied = StopMatcher(self._stops, self._words, self._is_text)
        copied._held, copied._text = list(self._held), self._text
        return copied

    def may_end(self, text: bytes) -> bool:
        """Whether a stop string may be complete within this text, whatever stands before it."""
        return any(stop in text for stop in self._stops) or any(
            _has_beginning(self._backwards, text[:end][::-1]) for end in range(1, len(text) + 1)
        )

    def flush(self) -> list[int]:
        """Release every held token, because the request has ended."""
        tokens = [token_id for token_id, _ in self._held]
        self._held, self._text = [], b""
        return tokens

    def _possible_start(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        starts = range(len(self._text))
        found = (at for at in starts if _has_beginning(self._stops, self._text[at:]))
        return len(self._text) - next(found, len(self._text))

    def _release(self, num_bytes: int) -> list[int]:
        """Release the held tokens that end within the first `num_bytes` of the held text."""
        released, end = [], 0
        while self._held and end + self._held[0][1] <= num_bytes:
            token_id, size = self._held.pop(0)
            released.append(token_id)
            end += size
        self._text = self._text[end:]
        return released


def _has_beginning(texts: Sequence[bytes], beginning: bytes) -> bool:
    """Whether a text begins so.   texts: in order; the search is as long as their number's log."""
    place = bisect_left(texts, beginning)
    return place < len(texts) and texts[place].startswith(beginning)
