"""An engine in this process that takes requests and is stepped as `engine.process` steps it."""

import itertools
import time
from collections.abc import Callable, Sequence

from bench.adapters.step_log import StepLog
from engine.core import EngineCore
from engine.messages import (
    AbortRequests,
    AddRequest,
    PinAdapters,
    Prefetch,
    RequestOutput,
    SamplingParams,
    StepOutputs,
)
from engine.process import LOADING_POLL_MS
from registry.ref import AdapterRef

_GATEWAY = "bench"
_FOREVER_S = 1e9
_LONGEST_WAIT_S = 120.0


class EngineLoop:
    """Drives one engine. log: records its steps.

    The run is over as soon as a request ends other than by its length or an abort.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.adapters = core.adapters
        self.log = StepLog.of(core)
        self._numbers = itertools.count()

    def send(
        self,
        adapter: AdapterRef,
        prompt_token_ids: tuple[int, ...],
        max_tokens: int,
        tenant_id: str = "bench",
    ) -> str:
        """Sends a greedy request and returns its id."""
        request_id = str(next(self._numbers))
        message = AddRequest(
            request_id=request_id,
            tenant_id=tenant_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            token_lease=max_tokens,
            deadline_s=_FOREVER_S,
            first_token_timeout_s=_FOREVER_S,
            adapter=adapter,
        )
        _outputs(self.core.handle(_GATEWAY, message))
        return request_id

    def prefetch(self, adapter: AdapterRef) -> None:
        self.core.handle(_GATEWAY, Prefetch(tenant_id="bench", adapter=adapter))

    def pin(self, adapters: tuple[AdapterRef, ...]) -> None:
        """Loads `adapters` into the arena and keeps them there."""
        self.core.handle(_GATEWAY, PinAdapters(adapters=adapters))
        self.step_until(lambda: all(self.adapters.is_ready(ref.object_key) for ref in adapters))

    def abort(self, request_ids: list[str]) -> None:
        self.core.handle(_GATEWAY, AbortRequests(request_ids=tuple(request_ids)))

    def step(self) -> list[RequestOutput]:
        """Runs one step, and sleeps for a moment if it had nothing to compute."""
        num_steps = self.core.num_steps
        messages = self.core.step()
        self.core.take_residency()
        if self.core.num_steps == num_steps:
            time.sleep(LOADING_POLL_MS / 1000)
        return _outputs(messages)

    def step_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + _LONGEST_WAIT_S
        while not condition():
            if time.monotonic() > until:
                raise SystemExit("the engine did not reach the expected state in time")
            self.step()


def _outputs(messages: Sequence[tuple[str, object]]) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _, message in messages:
        if isinstance(message, StepOutputs):
            outputs += message.outputs
    for output in outputs:
        if output.is_last and output.finish_reason not in ("length", "abort"):
            raise SystemExit(f"a request failed: {output.stop_cause} {output.error}")
    return outputs
