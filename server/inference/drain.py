"""The shutdown of a gateway: it takes no new requests, and those under way end by themselves or are
aborted. An aborted request ends with its usage and its last event, as a cancelled one does.
"""

import asyncio
import contextlib

from server.inference import errors
from server.inference.bases import Bases

_ABORT_AT = 0.8
"""Share of the time after which requests are aborted; the rest is for their last events."""
_LOOK_S = 0.05


class Drain:
    """The shutdown of one gateway. timeout_s: from `begin` to the exit."""

    def __init__(self, bases: Bases, timeout_s: float) -> None:
        self._bases = bases
        self._timeout_s = timeout_s
        self._begun = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        """Refuse requests with a 503 from now on. A signal handler may call this."""
        self._begun.set()

    def check(self) -> None:
        """Raise Unavailable once the shutdown has begun."""
        if self.has_begun:
            raise errors.draining()

    async def wait_begun(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._begun.wait(), timeout_s)

    async def run(self) -> None:
        """Wait until the shutdown begins; then abort requests that do not end in time."""
        await self._begun.wait()
        await self._emptied(self._timeout_s * _ABORT_AT)
        await self._bases.abort_all()

    async def finish(self) -> None:
        """Abort the requests that run on without a client, once no client is connected any more."""
        self.begin()
        await self._bases.abort_all()
        await self._emptied(self._timeout_s * (1 - _ABORT_AT))

    async def _emptied(self, timeout_s: float) -> None:
        async def wait() -> None:
            while self._bases.num_running:
                await asyncio.sleep(_LOOK_S)

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wait(), timeout_s)
