"""The outputs of a request under way, between the engine's client and the answer they become."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from engine.wire.delivery import Take
from engine.wire.messages import RequestOutput


class OutputStream:
    """Runs a request in a task of its own, and hands each of its outputs on when it arrives.

    Outputs that arrive before anyone follows are kept. Their number is bounded by the request: each
    has a token at least, or a logprob of the prompt, or is the last.
    """

    def __init__(self, run: Callable[[Take], Coroutine[Any, Any, None]]) -> None:
        self._kept: list[RequestOutput] = []
        self._take: Take = self._kept.append
        self._task = asyncio.create_task(run(lambda output: self._take(output)))

    async def first(self) -> RequestOutput:
        """The first output, which is kept for who follows, once the answer has begun.

        Logprobs of the prompt come before; until a token does, the request may still be refused for
        being late, and then it is another model's turn.

        If the request fails before it, or the caller is cancelled, the request is over.
        """
        begun = asyncio.Event()

        def keep(output: RequestOutput) -> None:
            self._kept.append(output)
            if _begins(output):
                begun.set()

        self._take = keep
        self._task.add_done_callback(lambda _: begun.set())
        try:
            if not any(map(_begins, self._kept)):
                await begun.wait()
            if not any(map(_begins, self._kept)):
                await self.end()
            return self._kept[0]
        except BaseException:
            await self.aclose()
            raise

    def follow(self, take: Take) -> None:
        """Hand over what was kept, and from now on each output at once. Raises what `take` raises;
        raised later, it ends the request.
        """
        kept, self._kept = self._kept, []
        for output in kept:
            take(output)
        self._take = take

    async def end(self) -> None:
        """Wait for the end of the request. Raises its Fault, or what `take` raised."""
        await asyncio.shield(self._task)

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _begins(output: RequestOutput) -> bool:
    """Whether an answer has begun with it, or ended."""
    return bool(output.new_token_ids) or output.finish_reason is not None
