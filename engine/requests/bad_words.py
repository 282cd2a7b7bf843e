"""Words that an answer must not have, as sequences of tokens: vLLM's `bad_words`."""

from collections import defaultdict
from collections.abc import Sequence


class BadWords:
    """Finds the tokens that would complete a word. What the prompt says does not count.

    longest: how many tokens the longest word has.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.longest = max(map(len, words), default=0)
        self._by_last: dict[int | None, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            self._by_last[word[-2] if len(word) > 1 else None].append(word)

    def completing(self, said: Sequence[int]) -> list[int]:
        """The tokens that complete a word behind these."""
        longer = self._by_last.get(said[-1], ()) if said else ()
        found = [word for word in longer if tuple(said[1 - len(word) :]) == word[:-1]]
        return [word[-1] for word in (*found, *self._by_last.get(None, ()))]
