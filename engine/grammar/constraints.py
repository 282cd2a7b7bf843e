"""Compiles grammars off the engine's thread, and keeps them for later requests."""

import time
from collections import OrderedDict
from collections.abc import Collection

from engine.grammar.compilation import Compilation
from engine.grammar.constraint import Constraint
from engine.grammar.lanes import Lanes
from engine.grammar.limits import COMPILE_BUDGET_S
from engine.grammar.matcher import ConstraintFailed, Grammars

_MOST_BYTES = 256 << 20
_TENANT_SHARE = 0.25


class Constraints:
    """The grammars of all tenants. Each tenant has its own, so that none learns of another's.

    grammars: None where there is no grammar library; then requests with a grammar are refused.
    most_bytes: for compiled grammars, of which a tenant has a quarter at most. The oldest ones go
    first; answers that use one keep it to their end.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        eos_token_ids: Collection[int] = (),
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._grammars = grammars
        self._eos_token_ids = frozenset(eos_token_ids)
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], Compilation] = OrderedDict()
        self.lanes = Lanes()

    @property
    def is_available(self) -> bool:
        return self._grammars is not None

    def want(self, tenant_id: str, text: str) -> Compilation:
        """A tenant's grammar; a lane compiles it unless it is kept from an earlier request."""
        key = tenant_id, text
        compilation = self._kept.pop(key, None)
        if compilation is None or compilation.error:
            compilation = Compilation(tenant_id, text)
            wanted = compilation
            self.lanes.slow.submit(tenant_id, lambda: self._compile(wanted))
        self._kept[key] = compilation  # the newest
        self._make_room(tenant_id)
        return compilation

    def begin(self, compilation: Compilation) -> Constraint:
        """Begin an answer of a compiled grammar."""
        return Constraint(compilation, self.lanes, self._eos_token_ids)

    def _make_room(self, tenant_id: str) -> None:
        own = [key for key in self._kept if key[0] == tenant_id]
        self._forget(own, int(self._most_bytes * _TENANT_SHARE))
        self._forget(list(self._kept), self._most_bytes)

    def _forget(self, keys: list[tuple[str, str]], most_bytes: int) -> None:
        """Forget the oldest of these grammars until the others fit; the newest stays."""
        size_bytes = sum(self._kept[key].size_bytes for key in keys)
        for key in keys[:-1]:
            if size_bytes <= most_bytes:
                return
            size_bytes -= self._kept.pop(key).size_bytes

    def _compile(self, compilation: Compilation) -> None:
        """Compile on a lane; the first mask is made as well, as it may be the one that fails."""
        assert self._grammars is not None
        begun = time.thread_time()
        try:
            matcher = self._grammars.compile(compilation.text)
            matcher.fork().mask()
        except ConstraintFailed as failed:
            compilation.error = str(failed)
        seconds = time.thread_time() - begun
        if seconds > COMPILE_BUDGET_S:
            compilation.error = f"it took {seconds:.1f} s to compile"
        self.lanes.note_compile(
            compilation.tenant_id, seconds, failed=compilation.error is not None
        )
        if compilation.error is None:
            compilation.compile_s = seconds
            compilation.matcher = matcher
