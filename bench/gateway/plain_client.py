"""The engine's client alone, for callers without a ledger."""

import asyncio
import contextlib
import uuid
from pathlib import Path

from bench.gateway.asked import add_request
from engine.client import EngineClient
from engine.delivery import Take
from engine.endpoint import Endpoint
from engine.errors import EngineDeadError

_READY_S = 60.0
_DRAIN_S = 0.25
_RECORDS = 1024


class PlainClient:
    """Sends requests; reads the engine's journal, which would fill up otherwise, and drops it."""

    def __init__(self, socket_path: Path) -> None:
        self._client = EngineClient(Endpoint.of_socket(socket_path))
        self._is_closed = False

    async def start(self) -> None:
        await self._client.start()
        welcome = await self._client.wait_ready(_READY_S)
        self._draining = asyncio.create_task(self._drain(welcome.engine_id))

    async def close(self) -> None:
        # The task is not cancelled: Python 3.11's wait_for ignores a cancellation that comes at the
        # moment of its answer.
        self._is_closed = True
        await self._draining
        await self._client.close()

    async def generate(self, prompt_tokens: int, max_tokens: int, take: Take) -> None:
        request = add_request(uuid.uuid4().hex, prompt_tokens, max_tokens)
        await self._client.generate(request, take)

    async def _drain(self, engine_id: str) -> None:
        settled_seq = 0
        while not self._is_closed:
            with contextlib.suppress(EngineDeadError):
                found = await self._client.read_journal(engine_id, settled_seq, _RECORDS)
                settled_seq = max([settled_seq, *(record.seq for record in found.records)])
            await asyncio.sleep(_DRAIN_S)
