"""Triton's interpreter for dry runs and tests: faster, and with products that do not depend on
where their rows lie.
"""

import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


def use() -> None:
    """Have kernels that are defined from now on interpreted.

    When one kernel calls another, the language stays as the launch patched it. Triton itself would
    look through all of its modules again at each call: tests.gpu --dry took 69 s with that, 45 s
    without.

    A product is summed in float64 and rounded once. The kernels of OpenBLAS for some processors
    give a row other bits in another place of a matrix, as no tensor core does.
    """
    # Triton reads the variable where a kernel is defined; some are defined in Triton itself.
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    @functools.cache
    def languages(function: Callable[..., Any]) -> tuple[ModuleType, ...]:
        seen = function.__globals__.values()
        return tuple(x for x in seen if inspect.ismodule(x) and x in (tl, tl.core))

    def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(kernel.fn)):
            interpreter._patch_lang(kernel.fn)
        try:
            return kernel.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    product_of_any = interpreter.InterpreterBuilder.create_dot

    def product(builder: Any, a: Any, b: Any, added: Any, *precision: Any) -> Any:
        if a.data.dtype != np.float32 or b.data.dtype != np.float32:
            return product_of_any(builder, a, b, added, *precision)
        with np.errstate(all="ignore"):  # NaN and infinity are numbers here, as on a GPU
            found = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            found = found.astype(added.data.dtype) + added.data
        return interpreter.TensorHandle(found, added.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = product
    interpreter.InterpretedFunction.__call__ = call
