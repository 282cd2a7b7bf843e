"""The gateway's end of the wire: requests as streams of outputs, and one engine's life as seen
there.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine.endpoint import Endpoint
from engine.errors import EngineAwayError, EngineDeadError, RequestRefused
from engine.leaving import LEAVING
from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    ExtendLease,
    Heartbeat,
    Hello,
    LeaseLow,
    PinAdapters,
    Prefetch,
    ProofResult,
    ProveAdapter,
    ReadJournal,
    RequestOutput,
    Residency,
    StepOutputs,
    TenantService,
    Welcome,
)
from engine.records import JournalRecords
from engine.tcp import check, guard
from engine.wire import Numbering, WireError
from registry.proof import Proof
from registry.ref import AdapterRef

logger = logging.getLogger(__name__)

SILENCE_S = 60.0
"""A living engine says something four times a second; one this quiet hangs."""
_JOURNAL_TIMEOUT_S = 10.0
_PROOF_TIMEOUT_S = 1800.0
"""A proof's requests have deadlines, its arithmetic a share of the engine's time."""
_RECONNECT_S = 0.05
_LATE_S = 10.0
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REFUSED_S = 5.0


class EngineClient:
    """Talks to the engine at one endpoint; reconnects for as long as it lives.

    A dead engine is noticed by its closed socket, in milliseconds: every request in flight ends
    with EngineDeadError, and `generate` raises it until the engine is back.

    on_end: called for every request that ended, because its end record can be settled now.
    on_lease_low: called when a request is about to use up its lease; see `extend_lease`.
    on_service: called with what this engine did for tenants, for the other engines.

    Raises TcpError for an address of tcp that cannot be spoken to safely.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_end: Callable[[], None] = lambda: None,
        on_lease_low: Callable[[LeaseLow], None] = lambda _: None,
        on_service: Callable[[TenantService], None] = lambda _: None,
        heartbeat_s: float = 1.0,
    ) -> None:
        check(endpoint)
        self.endpoint = endpoint
        self.heartbeat_s = heartbeat_s
        self.gateway_id = f"gw-{uuid.uuid4()}"
        self.welcome: Welcome | None = None
        self.stats: EngineStats | None = None
        self.residency: dict[str, Residency] = {}
        self.num_deaths = 0
        self._on_end = on_end
        self._on_lease_low = on_lease_low
        self._on_service = on_service
        self._streams: dict[str, asyncio.Queue[RequestOutput | None]] = {}
        self._journal_waiters: list[asyncio.Future[JournalRecords]] = []
        self._proof_waiters: dict[str, asyncio.Future[Proof]] = {}
        self._ready = asyncio.Event()
        self._connection: _Connection | None = None
        self._living: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._living = asyncio.create_task(self._live())

    async def close(self) -> None:
        if self._living:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)

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
        """Outputs of one request, the last with `is_last`; leaving early aborts it.

        Raises RequestRefused, EngineDeadError, and of those EngineAwayError as long as another
        engine may have the request.
        """
        if not self.is_ready:
            raise EngineAwayError("the engine is starting")
        # Bounded by the request's own tokens: an output carries at least one, or the logprob of one
        # of the prompt's, or is the last.
        stream: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._streams[request.request_id] = stream
        # The engine ends it at its deadline; one that does not is no better than a dead one.
        too_late_s = request.deadline_s + _LATE_S
        late = asyncio.get_running_loop().call_later(too_late_s, stream.put_nowait, None)
        finished = False
        try:
            await self._send(request)
            expected = 0
            while not finished:
                output = await stream.get()
                if output is None or output.seq != expected:
                    raise EngineDeadError("the engine died")
                expected += 1
                finished = output.is_last
                if output.finish_reason == "error" and output.stop_cause is None:
                    if output.error == LEAVING:
                        raise EngineAwayError("the engine leaves")
                    raise RequestRefused(output.error or "refused")
                yield output
        finally:
            late.cancel()
            self._streams.pop(request.request_id, None)
            if not finished:
                await self.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        await self._send(AbortRequests(request_ids=(request_id,)))

    async def extend_lease(self, request_id: str, token_lease: int) -> None:
        """Its hold covers `token_lease` completion tokens in all now."""
        await self._send(ExtendLease(request_id=request_id, token_lease=token_lease))

    async def prefetch(self, message: Prefetch) -> None:
        await self._send(message)

    async def pin(self, message: PinAdapters) -> None:
        await self._send(message)

    async def tell_service(self, message: TenantService) -> None:
        """What another engine did for tenants."""
        await self._send(message)

    async def prove(self, adapter: AdapterRef, object_path: Path) -> Proof:
        """What the engine finds out about an adapter. Raises EngineDeadError."""
        if not self.is_ready:
            raise EngineDeadError("the engine is starting")
        proof_id = uuid.uuid4().hex
        waiter: asyncio.Future[Proof] = asyncio.get_running_loop().create_future()
        self._proof_waiters[proof_id] = waiter
        message = ProveAdapter(proof_id=proof_id, adapter=adapter, object_path=str(object_path))
        try:
            await self._send(message)
            return await asyncio.wait_for(waiter, _PROOF_TIMEOUT_S)
        except TimeoutError:
            raise EngineDeadError("the engine does not answer") from None
        finally:
            del self._proof_waiters[proof_id]

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

    async def _live(self) -> None:
        """One connection after the other: a new one knows nothing of what the last one had sent.

        The context belongs to this task, which closes it however it ends: `close` may be cancelled
        while it waits.
        """
        with zmq.asyncio.Context() as context:
            while True:
                self._connection = _Connection(
                    context, self.endpoint, self.gateway_id, self.heartbeat_s
                )
                try:
                    await self._connection.run(self._take)
                finally:
                    self._lose_engine()
                    self._connection.close()
                await asyncio.sleep(_RECONNECT_S)

    async def _send(self, message: object) -> None:
        # An engine that is gone has no requests to abort.
        if self._connection and self.is_ready:
            await self._connection.send(message)

    def _lose_engine(self) -> None:
        """The engine is gone: nobody waits for it any longer."""
        if self._ready.is_set() and not (self.stats and self.stats.is_leaving):
            self.num_deaths += 1
        self._ready.clear()
        self.stats = None
        self.residency.clear()
        for stream in self._streams.values():
            stream.put_nowait(None)
        waiters, self._journal_waiters = self._journal_waiters, []
        futures: list[asyncio.Future[JournalRecords] | asyncio.Future[Proof]]
        futures = [*waiters, *self._proof_waiters.values()]
        for future in futures:
            if not future.done():
                future.set_exception(EngineDeadError("the engine died"))

    def _take(self, message: object) -> None:
        match message:
            case Welcome():
                self.welcome = message
                self._ready.set()
            case StepOutputs():
                for output in message.outputs:
                    if stream := self._streams.get(output.request_id):
                        stream.put_nowait(output)
                    if output.is_last:
                        self._on_end()
            case LeaseLow():
                self._on_lease_low(message)
            case JournalRecords():
                waiter = self._journal_waiters.pop(0)
                if not waiter.done():
                    waiter.set_result(message)
            case ProofResult():
                proving = self._proof_waiters.get(message.proof_id)
                if proving and not proving.done():
                    proving.set_result(message.proof)
            case Residency():
                self.residency[message.object_key] = message
            case TenantService():
                self._on_service(message)
            case EngineStats():
                self.stats = message


class _Connection:
    """One socket from Hello to its end, with a numbering of its own."""

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: Endpoint, gateway_id: str, heartbeat_s: float
    ) -> None:
        self._gateway_id = gateway_id
        self._heartbeat_s = heartbeat_s
        self._numbering = Numbering()
        self._last_heard_at = time.monotonic()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, gateway_id.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)  # ms, while no engine is there yet
        self._monitor = self._socket.get_monitor_socket(_GONE)
        if endpoint.is_remote:
            guard(self._socket, endpoint)
        self._endpoint = endpoint
        self._socket.connect(endpoint.address)

    async def run(self, take: Callable[[object], None]) -> None:
        """Until the engine hangs up, falls silent, or cannot be understood."""
        # Sent before anything else, it waits here for an engine that is still starting.
        await self.send(Hello(gateway_id=self._gateway_id))
        tasks = [
            asyncio.create_task(self._receive(take)),
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._hang_up()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def send(self, message: object) -> None:
        await self._socket.send(self._numbering.encode(message))

    async def _receive(self, take: Callable[[object], None]) -> None:
        with contextlib.suppress(WireError):
            while True:
                message = self._numbering.decode(await self._socket.recv())
                self._last_heard_at = time.monotonic()
                take(message)

    async def _hang_up(self) -> None:
        """Ends when the engine's end of the socket closes, which a killed process does at once."""
        event = await recv_monitor_message(self._monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            logger.error(
                "%s refuses this gateway's key: give all of them the same CHORALE_PEPPER",
                self._endpoint.address,
            )
            await asyncio.sleep(_REFUSED_S)

    async def _beat(self) -> None:
        """Heartbeats of our own; ends when the engine's have been missing for too long."""
        heard_once = False
        while not heard_once or time.monotonic() - self._last_heard_at < SILENCE_S:
            await asyncio.sleep(self._heartbeat_s)
            heard_once = heard_once or self._numbering.num_received > 0
            if heard_once:
                await self.send(Heartbeat())
