"""How functions are compiled: when their module is imported, and kept by numba for the next start.

Cold 6 s, from numba's cache 0.4 s.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import FunctionCache

INLINED = {"forceinline": True, "boundscheck": False, "error_model": "numpy"}
"""For `njit`, of what compiled functions call."""

_FOLDER = Path(__file__).parent
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(_FOLDER.glob("*.py")))
).hexdigest()


class _Cache(FunctionCache):
    """Numba's knows a function by its own file; what it calls may have changed in another one."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _SOURCES)


def compiled(*arguments: types.Type) -> Callable[[Callable[..., None]], Any]:
    """Compile a function for arguments of these types, without the GIL.

    Every such function is one thread's share of a job: of `count` parts it does those from `thread`
    on, `threads` apart. These three are its first arguments, int64, and not among the types.
    """
    signature = types.void(*(types.int64,) * 3, *arguments)

    def compile_for(function: Callable[..., None]) -> Any:
        dispatcher = njit(nogil=True, boundscheck=False, error_model="numpy")(function)
        # Where no folder can be written, every start compiles.
        with contextlib.suppress(RuntimeError):
            dispatcher._cache = _Cache(function)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return compile_for
