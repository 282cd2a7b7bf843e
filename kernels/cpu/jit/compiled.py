"""Compilation of functions when their module is imported; numba caches them for the next start.

All of them take 6 s to compile, and 0.4 s from numba's cache.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import FunctionCache

INLINED = {"forceinline": True, "boundscheck": False, "error_model": "numpy"}
"""Options of `njit` for the functions that compiled functions call."""

_FOLDER = Path(__file__).parent
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(_FOLDER.glob("*.py")))
).hexdigest()


class _Cache(FunctionCache):
    """A cache that depends on all files here; numba's own depends on a function's own file only."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _SOURCES)


def compiled(*arguments: types.Type) -> Callable[[Callable[..., None]], Any]:
    """Compile a function for arguments of these types, without the GIL.

    Every such function does one thread's share of a job: of `count` parts those from `thread` on,
    `threads` apart. `thread`, `threads` and `count` are its first arguments, int64, and are not
    among `arguments`.
    """
    signature = types.void(*(types.int64,) * 3, *arguments)

    def compile_for(function: Callable[..., None]) -> Any:
        dispatcher = njit(nogil=True, boundscheck=False, error_model="numpy")(function)
        # If no cache folder can be written, every start compiles.
        with contextlib.suppress(RuntimeError):
            dispatcher._cache = _Cache(function)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return compile_for
