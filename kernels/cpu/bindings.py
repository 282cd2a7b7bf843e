"""The library of C kernels, with the signatures of its functions."""

import ctypes
from pathlib import Path
from typing import Any

from kernels.cpu.addresses import taking_tensors
from kernels.cpu.compiler import find_library
from kernels.cpu.errors import Unavailable

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "gemm": (_P, _P, _P, _P, _I, _I, _I, ctypes.c_int),
    "pack_panels": (_P, _P, _I, _I),
    "take_rows": (_P, _P, _P, _I, _I),
    "gemm_int8": (_P, _P, _P, _P, _P, _I, _I, ctypes.c_int),
    "pack_int8": (_P, _P, _P, _I, _I, _I),
    "gemm_int4": (_P, _P, _P, _P, _P, _P, _I, ctypes.c_int),
    "pack_int4": (_P, _P, _I, _I),
    "rms_norm": (_P, _P, _P, _P, _F, _I, _I, ctypes.c_int),
    "gated": (_P, _P, _I, _I, ctypes.c_int, ctypes.c_int),
    "rope_store": (_P, _P, _P, _P, _F, _P, _P, _P, _P, _I, ctypes.c_int),
    "attend": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _I, _I, ctypes.c_int),
    "add_lora": (_P, ctypes.c_int),
}


class Library:
    """The functions of a built library, which take tensors for pointers. Raises OSError.

    path: where it is.   int8_columns: outputs per panel of weights of 4 and 8 bits.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.path = path
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            setattr(self, name, taking_tensors(function))
        library.int8_columns.restype = _I
        self.int8_columns = library.int8_columns()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def load_library() -> Library:
    """Load the C kernels, compiled first if they have to be. Raises Unavailable."""
    try:
        return Library(find_library())
    except OSError as error:
        raise Unavailable(f"the C kernels do not load: {error}") from error
