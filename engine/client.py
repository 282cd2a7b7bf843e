"""The gateway's end of the wire: requests as streams of outputs, and one engine's life as seen
there.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine.errors import EngineDeadError, RequestRefused
from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    Heartbeat,
    Hello,
    JournalRecords,
    Prefetch,
    ReadJournal,
    RequestOutput,
    Residency,
    StepOutputs,
    Welcome,
)
from engine.wire import MessageLost, Numbering

HEARTBEAT_S = 1.0
SILENCE_S = 60.0
"""A living engine says something four times a second; one this quiet hangs."""
_JOURNAL_TIMEOUT_S = 10.0


class EngineClient:
    """Talks to the engine behind one Unix socket; reconnects for as long as it lives.

    A dead engine is noticed by its closed socket, in milliseconds: every request in flight ends
    with EngineDeadError, and `generate` raises it until the engine is back.

    on_end: called for every request that ended, because its end record can be settled now.
    """

    def __init__(self, socket_path: Path, on_end: Callable[[], None] = lambda: None) -> None:
        self.socket_path = socket_path
        self.gateway_id = f"gw-{uuid.uuid4()}"
        self.welcome: Welcome | None = None
        self.stats: EngineStats | None = None
        self.residency: dict[str, Residency] = {}
        self.num_deaths = 0
        self._on_end = on_end
        self._streams: dict[str, asyncio.Queue[RequestOutput | None]] = {}
        self._journal_waiters: list[asyncio.Future[JournalRecords]] = []
        self._context = zmq.asyncio.Context()
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._connect()
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._heartbeat()),
            asyncio.create_task(self._watch()),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def wait_ready(self, timeout_s: float) -> Welcome:
        """Raises EngineDeadError when the engine is not there in time."""
        try:
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        except TimeoutError:
            raise EngineDeadError("the engine is not ready") from None
        assert self.welcome is not None
        return self.welcome

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, the last with `finish_reason`; leaving early aborts it.

        Raises RequestRefused, and EngineDeadError.
        """
        if not self.is_ready:
            raise EngineDeadError("the engine is starting")
        # Bounded by the request's own tokens: an output carries at least one, or is the last.
        stream: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._streams[request.request_id] = stream
        finished = False
        try:
            await self._send(request)
            expected = 0
            while not finished:
                output = await stream.get()
                if output is None or output.seq != expected:
                    finished = True
                    raise EngineDeadError("the engine died")
                expected += 1
                finished = output.finish_reason is not None
                if output.finish_reason == "error" and output.stop_cause is None:
                    raise RequestRefused(output.error or "refused")
                yield output
        finally:
            self._streams.pop(request.request_id, None)
            if not finished:
                await self.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        await self._send(AbortRequests(request_ids=(request_id,)))

    async def prefetch(self, message: Prefetch) -> None:
        await self._send(message)

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        """Acknowledge what is settled, get what follows. Raises EngineDeadError."""
        if not self.is_ready:
            raise EngineDeadError("the engine is starting")
        waiter: asyncio.Future[JournalRecords] = asyncio.get_running_loop().create_future()
        self._journal_waiters.append(waiter)
        await self._send(ReadJournal(engine_id=engine_id, settled_seq=settled_seq, limit=limit))
        try:
            answer = await asyncio.wait_for(waiter, _JOURNAL_TIMEOUT_S)
        except TimeoutError:
            raise EngineDeadError("the engine does not answer") from None
        if answer.engine_id != engine_id:
            raise EngineDeadError("another engine is in its place")
        return answer

    # ---- the connection ----

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.gateway_id.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        )
        self._numbering = Numbering()
        self._socket.connect(self._endpoint)

    @property
    def _endpoint(self) -> str:
        return f"ipc://{self.socket_path}"

    async def _send(self, message: object) -> None:
        # An engine that is gone has no requests to abort, and its successor gets a new numbering.
        if self._ready.is_set() or isinstance(message, Hello):
            await self._socket.send(self._numbering.encode(message))

    async def _watch(self) -> None:
        """Say Hello on every connection; end what was in flight when one closes."""
        while True:
            event: Any = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_CONNECTED:
                self._numbering = Numbering()
                await self._send(Hello(gateway_id=self.gateway_id))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._lose_engine()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with contextlib.suppress(zmq.ZMQError):
                await self._send(Heartbeat())

    async def _receive(self) -> None:
        while True:
            try:
                frame = await asyncio.wait_for(self._socket.recv(), SILENCE_S)
                self._take(self._numbering.decode(frame))
            except (TimeoutError, MessageLost, msgspec.MsgspecError):
                self._lose_engine()
                # A fresh connection is a fresh Hello: the engine ends what we had there.
                self._socket.disconnect(self._endpoint)
                self._socket.connect(self._endpoint)

    def _lose_engine(self) -> None:
        """The engine is gone: nobody waits for it any longer."""
        if self._ready.is_set():
            self.num_deaths += 1
        self._ready.clear()
        self.residency.clear()
        for stream in self._streams.values():
            stream.put_nowait(None)
        waiters, self._journal_waiters = self._journal_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(EngineDeadError("the engine died"))

    def _take(self, message: object) -> None:
        match message:
            case Welcome():
                self.welcome = message
                self._ready.set()
            case StepOutputs():
                for output in message.outputs:
                    if stream := self._streams.get(output.request_id):
                        stream.put_nowait(output)
                    if output.finish_reason is not None:
                        self._on_end()
            case JournalRecords():
                waiter = self._journal_waiters.pop(0)
                if not waiter.done():
                    waiter.set_result(message)
            case Residency():
                self.residency[message.digest] = message
            case EngineStats():
                self.stats = message
