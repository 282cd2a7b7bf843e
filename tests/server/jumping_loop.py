"""An event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """A selector that adds the time for which it should wait to a clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing is left that could end the wait"
            self.now_s += timeout
        return events


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_jumping(make: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `make` makes of the loop's clock. It must not use threads."""
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        return runner.run(make(runner.get_loop().time))
