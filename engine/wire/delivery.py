"""The outputs of one request on their way from the engine to whoever takes them."""

import asyncio
import time
from collections.abc import Callable

from engine.errors import (
    EngineAwayError,
    EngineDeadError,
    EngineProves,
    FirstTokenLate,
    RequestRefused,
)
from engine.wire.messages import LEAVING, PROVING, RequestOutput

Take = Callable[[RequestOutput], None]
"""Takes one output of a request, at once: it is called by the task that receives them all."""


class Delivery:
    """Hands each output to `take` when it arrives.

    ended: done with the last output. Fails with RequestRefused, with EngineDeadError, which is an
    EngineAwayError if the engine never had the request, or with what `take` raised.
    has_last: whether the engine has ended the request.   sent_at: by time.monotonic().
    """

    def __init__(self, take: Take) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_last = False
        self.sent_at = time.monotonic()
        self._take = take
        self._has_begun = False
        self._num_taken = 0

    def hand(self, output: RequestOutput) -> None:
        if self.ended.done():
            return
        if output.seq != self._num_taken:
            self.fail(EngineDeadError("the engine died"))
            return
        self._num_taken += 1
        self._has_begun = self._has_begun or not output.is_of_prompt
        self.has_last = output.is_last
        if output.finish_reason == "error" and output.stop_cause is None:
            away = {
                LEAVING: EngineAwayError("the engine leaves"),
                PROVING: EngineProves("the engine proves an adapter"),
            }
            reason = output.error or "refused"
            self.fail(away.get(reason) or RequestRefused(reason))
            return
        try:
            self._take(output)
        except Exception as error:  # it ends this request, and not the others of the step
            self.fail(error)
            return
        if output.is_last:
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def fail_unless_begun(self) -> None:
        """Fail the request if it has no token yet, as the time for the first one is over."""
        if not self._has_begun:
            self.fail(FirstTokenLate("no token came in time"))
