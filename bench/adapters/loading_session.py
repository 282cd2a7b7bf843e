"""A session on an engine that loads adapters meanwhile, stepped as `engine.process` steps it."""

import time
from collections.abc import Callable, Sequence

from bench.session import GATEWAY, Session
from engine.process import LOADING_POLL_MS
from engine.wire.messages import PinAdapters, Prefetch
from registry.ref import AdapterRef

_LONGEST_WAIT_S = 120.0


class LoadingSession(Session):
    """A step that has nothing to compute takes a moment, in which adapters are loaded."""

    def step(self) -> None:
        num_steps = self.core.num_steps
        super().step()
        self.core.take_residency()
        if self.core.num_steps == num_steps:
            time.sleep(LOADING_POLL_MS / 1000)

    def step_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + _LONGEST_WAIT_S
        while not condition():
            if time.monotonic() > until:
                raise SystemExit("the engine did not reach the expected state in time")
            self.step()

    def prefetch(self, adapter: AdapterRef) -> None:
        self.core.handle(GATEWAY, Prefetch(tenant_id="bench", adapter=adapter))

    def pin(self, adapters: Sequence[AdapterRef]) -> None:
        """Load `adapters` into the arena and keep them there."""
        self.core.handle(GATEWAY, PinAdapters(adapters=tuple(adapters)))
        is_ready = self.core.adapters.is_ready
        self.step_until(lambda: all(is_ready(ref.object_key) for ref in adapters))
