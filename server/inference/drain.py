"""The end of a gateway: no new requests, and those under way come to an end of their own, or to
one that is ordered: with their usage and the last event, as a cancelled one's.
"""

import asyncio
import contextlib

from server.inference.load_shedding import LoadShedder
from server.pool.engines import Engines
from server.pool.running import Running

_ABORT_AT = 0.8
"""Of the time there is; the rest is for their last events."""
_LOOK_S = 0.05


class Drain:
    """timeout_s: from `begin` to the exit."""

    def __init__(
        self, load: LoadShedder, running: Running, engines: Engines, timeout_s: float
    ) -> None:
        self._load = load
        self._running = running
        self._engines = engines
        self._timeout_s = timeout_s
        self._begun = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        return self._load.is_draining

    def begin(self) -> None:
        """From now on requests are refused with a 503. A signal handler may call it."""
        self._load.is_draining = True
        self._begun.set()

    async def run(self) -> None:
        """Wait for the end to begin; then order the requests to end that are not over in time."""
        await self._begun.wait()
        await self._emptied(self._timeout_s * _ABORT_AT)
        for request_id in self._running:
            await self._engines.abort(request_id)

    async def finish(self) -> None:
        """Once nobody is connected any more: what runs on without a client ends too."""
        self.begin()
        for request_id in self._running:
            await self._engines.abort(request_id)
        await self._emptied(self._timeout_s * (1 - _ABORT_AT))

    async def _emptied(self, timeout_s: float) -> None:
        async def wait() -> None:
            while len(self._running):
                await asyncio.sleep(_LOOK_S)

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wait(), timeout_s)
