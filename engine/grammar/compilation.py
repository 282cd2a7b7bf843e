"""A grammar on its way to a matcher, and what its masks have cost so far."""

from engine.grammar.matcher import Matcher

_BASE_BYTES = 64 << 10
_BYTES_PER_CHARACTER = 4
_BYTES_PER_S = 256 << 20
_MOST_COMPILED_BYTES = 8 << 20
_MOST_GROWN_BYTES = 16 << 20
"""An estimate of a compiled grammar's memory, since llguidance does not tell: 30 to 220 MB for each
second of compilation, of which the worst grammars take 5 MB, and up to 250 MB for each second of
masks that are new to it, until they meet its limits. See bench/LOG.md.
"""
_NEW_S = 30e-6
"""A mask that takes longer is one that the grammar had not seen before."""
SLOW_S = 2e-3
"""A grammar whose masks take longer is slow: no step waits for its masks."""
_FORGETS = 0.9


class Compilation:
    """A tenant's grammar: until it is compiled, requests that want it wait outside of the batch.

    matcher: at the start of an answer, once it is compiled.   error: why it cannot be served.
    compile_s: processor time of the compilation.
    """

    def __init__(self, tenant_id: str, text: str) -> None:
        self.tenant_id = tenant_id
        self.text = text
        self.matcher: Matcher | None = None
        self.error: str | None = None
        self.compile_s = 0.0
        self._recent_s = 0.0
        self._new_s = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether one of its last masks took long."""
        return self._recent_s > SLOW_S

    @property
    def size_bytes(self) -> int:
        compiled = min(_MOST_COMPILED_BYTES, int(self.compile_s * _BYTES_PER_S))
        grown = min(_MOST_GROWN_BYTES, int(self._new_s * _BYTES_PER_S))
        return _BASE_BYTES + _BYTES_PER_CHARACTER * len(self.text) + compiled + grown

    def note(self, seconds: float) -> None:
        """Note the processor time of an answer's next mask."""
        self._recent_s = max(seconds, _FORGETS * self._recent_s)
        self._new_s += seconds if seconds > _NEW_S else 0.0
