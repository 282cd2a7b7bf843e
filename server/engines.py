"""The engines behind this gateway: today one, and callers do not know."""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from engine.client import EngineClient
from engine.endpoint import Endpoint
from engine.errors import EngineDeadError
from engine.messages import (
    AddRequest,
    EngineStats,
    JournalRecords,
    LeaseLow,
    PinAdapters,
    Prefetch,
    RequestOutput,
    Residency,
    Welcome,
)
from registry.proof import Proof
from registry.ref import AdapterRef

logger = logging.getLogger(__name__)

_MAX_DEATHS = 2
_REMEMBERED_FINGERPRINTS = 10_000


class Quarantined(Exception):
    """A request just like this was in flight at two engine deaths: it is not tried a third time."""


class Engines:
    """Speaks to the engine on `socket_path`.

    on_end: called for every request that ended.   on_lease_low: for one that needs more tokens.
    """

    def __init__(
        self,
        socket_path: Path,
        on_end: Callable[[], None],
        on_lease_low: Callable[[LeaseLow], None],
    ) -> None:
        self._client = EngineClient(Endpoint.of_socket(socket_path), on_end, on_lease_low)
        self._deaths: OrderedDict[str, int] = OrderedDict()

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()

    @property
    def stats(self) -> EngineStats | None:
        """The engine's latest figures."""
        return self._client.stats

    @property
    def num_deaths(self) -> int:
        return self._client.num_deaths

    @property
    def welcome(self) -> Welcome | None:
        """What the engine serves; None until it has been there once."""
        return self._client.welcome

    @property
    def is_ready(self) -> bool:
        return self._client.is_ready

    def engine_ids(self) -> list[str]:
        return [self.welcome.engine_id] if self.welcome else []

    def residency(self, object_key: str) -> Residency | None:
        return self._client.residency.get(object_key)

    def all_residency(self) -> list[Residency]:
        """Every adapter that the engine has spoken of since it started."""
        return list(self._client.residency.values())

    async def abort(self, request_id: str) -> None:
        await self._client.abort(request_id)

    async def extend_lease(self, request_id: str, token_lease: int) -> None:
        await self._client.extend_lease(request_id, token_lease)

    async def prefetch(self, tenant_id: str, adapter: AdapterRef) -> None:
        await self._client.prefetch(Prefetch(tenant_id=tenant_id, adapter=adapter))

    async def pin(self, adapters: Sequence[AdapterRef]) -> None:
        """Keep exactly these in the arena, as far as the engine's limit goes."""
        await self._client.pin(PinAdapters(adapters=tuple(adapters)))

    async def prove(self, adapter: AdapterRef, object_path: Path) -> Proof:
        """What an engine's canary finds out about an adapter. Raises EngineDeadError.

        object_path: its canonical object, in a file on the engine's machine.
        """
        return await self._client.prove(adapter, object_path)

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        """Raises EngineDeadError, also when another engine has taken that one's place."""
        return await self._client.read_journal(engine_id, settled_seq, limit)

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Raises EngineDeadError, RequestRefused, Quarantined."""
        mark = fingerprint(request)
        if self._deaths.get(mark, 0) >= _MAX_DEATHS:
            raise Quarantined
        was_ready = self.is_ready
        try:
            async with aclosing(self._client.generate(request)) as stream:
                async for output in stream:
                    yield output
        except EngineDeadError:
            # An engine that was not there to begin with did not die of this request.
            if was_ready:
                self._remember_death(mark)
            raise

    def _remember_death(self, fingerprint: str) -> None:
        deaths = self._deaths.pop(fingerprint, 0) + 1
        self._deaths[fingerprint] = deaths
        if deaths >= _MAX_DEATHS:
            logger.error("request fingerprint %s is quarantined", fingerprint)
        if len(self._deaths) > _REMEMBERED_FINGERPRINTS:
            self._deaths.popitem(last=False)


def fingerprint(request: AddRequest) -> str:
    """The same for requests that make the engine do the same."""
    digest = request.adapter.digest if request.adapter else None
    shape = (request.tenant_id, digest, request.prompt_token_ids, request.sampling_params)
    return hashlib.blake2b(repr(shape).encode(), digest_size=16).hexdigest()
