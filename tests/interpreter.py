"""Triton's interpreter, sped up for dry runs and tests: it patches the language once per launch."""

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
    """
    # Triton reads the variable where a kernel is defined; some are defined in Triton itself.
    os.environ["TRITON_INTERPRET"] = "1"
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

    interpreter.InterpretedFunction.__call__ = call
