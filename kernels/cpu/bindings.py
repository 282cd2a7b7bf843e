"""The library of C kernels, with the signatures of its functions."""

import ctypes

from kernels.cpu.compiler import build_library
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
    "silu_mul": (_P, _P, _I, _I, ctypes.c_int),
    "gelu_mul": (_P, _P, _I, _I, ctypes.c_int),
    "rope_store": (_P, _P, _P, _P, _F, _P, _P, _P, _P, _I, ctypes.c_int),
    "attend": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _I, _I, ctypes.c_int),
    "add_lora": (_P, ctypes.c_int),
}


def load_library() -> ctypes.CDLL:
    """Load the C kernels, built first if they have to be. Raises Unavailable."""
    try:
        library = ctypes.CDLL(str(build_library()))
    except OSError as error:
        raise Unavailable(f"the C kernels do not load: {error}") from error
    for name, arguments in _SIGNATURES.items():
        if hasattr(library, name):  # some functions exist on some processors only
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
    if hasattr(library, "int8_columns"):
        library.int8_columns.restype = _I
    return library
