"""The prompt prefixes that each engine has cached, estimated from the requests it got lately."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.wire.messages import AddRequest

CHUNK_TOKENS = 64
"""Tokens in a chunk, the unit of comparison: no request is routed for a shorter prefix."""
MAX_CHUNKS = 50_000
"""Chunks remembered for all engines together, the latest ones: 10 MB."""


class PrefixTable:
    """Guesses which prefixes engines have cached; a wrong guess only costs a prefill."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._engines: OrderedDict[bytes, set[str]] = OrderedDict()

    def cached_tokens(self, marks: Sequence[bytes]) -> dict[str, int]:
        """Length in tokens of the prompt prefix that each engine has cached, without those of 0.

        marks: as `marks_of` returns them.
        """
        found: dict[str, int] = {}
        having: set[str] | None = None
        for number, mark in enumerate(marks, start=1):
            at = self._engines.get(mark, set())
            having = set(at) if having is None else having & at
            if not having:
                break
            found |= dict.fromkeys(having, number * CHUNK_TOKENS)
        return found

    def note(self, engine: str, marks: Sequence[bytes]) -> None:
        """Note that the engine is about to compute these chunks."""
        for mark in marks:
            self._engines.setdefault(mark, set()).add(engine)
            self._engines.move_to_end(mark)
        while len(self._engines) > self._max_chunks:
            self._engines.popitem(last=False)

    def forget_engine(self, engine: str) -> None:
        """Forget an engine that was stopped, or was restarted with an empty cache."""
        for having in self._engines.values():
            having.discard(engine)


def marks_of(request: AddRequest) -> list[bytes]:
    """A hash for each whole chunk of the prompt: of all tokens up to the chunk's end, and of the
    adapter and the tenant, on which KV depends as well.
    """
    digest = request.adapter.digest if request.adapter else ""
    hasher = hashlib.blake2b(f"{digest}\n{request.cache_salt}\n".encode(), digest_size=16)
    tokens = array("q", request.prompt_token_ids)
    marks = []
    for end in range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS):
        hasher.update(tokens[end - CHUNK_TOKENS : end].tobytes())
        marks.append(hasher.digest())
    return marks
