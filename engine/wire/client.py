"""The gateway's side of the wire: the outputs of requests, and the state of one engine."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from engine.errors import EngineAwayError, EngineDeadError, EngineDied
from engine.wire.delivery import Delivery, Take
from engine.wire.encoding import Numbering, OtherWireVersion, WireError
from engine.wire.endpoint import Endpoint
from engine.wire.messages import (
    SILENCE_S,
    AbortRequests,
    AddRequest,
    EngineStats,
    Heartbeat,
    Hello,
    LeaseLow,
    ProofResult,
    ProveAdapter,
    ReadJournal,
    RequestOutput,
    Residency,
    StepOutputs,
    TenantService,
    Welcome,
)
from engine.wire.ready_socket import EndOfFrames, ReadySocket
from engine.wire.records import JournalRecords
from engine.wire.silence import Silence
from engine.wire.tcp import check, guard
from registry.ref import AdapterRef
from registry.uploads.proof import Proof

logger = logging.getLogger(__name__)

_JOURNAL_TIMEOUT_S = 10.0
_PROOF_TIMEOUT_S = 1800.0
"""Longest wait for a proof: its requests have deadlines, and its arithmetic a share of the time, or
a thread of its own on a GPU.
"""
_RECONNECT_S = 0.05
_MOST_UNHEARD_BEATS = 2
"""How many heartbeats after its latest message a dead engine may still have read what was sent to
it: it sends figures as often as that, except during a step.
"""
_LATE_S = 10.0
_FIRST_TOKEN_LATE_S = 5.0
"""Time that an engine has beyond the limit for a first token to end the request by itself."""
_MOST_MISSED_BEATS = 2
"""Most heartbeats of silence that count between two looks, which are further apart only if this
process stood still itself.
"""
_SLICE = 64
"""Outputs that are handed over in one turn of the event loop: 1 to 2 ms of work."""
_BURST = 8
"""Messages that are taken in one turn of the event loop, if so many have arrived."""
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REFUSED_S = 5.0


class EngineClient:
    """Talks to the engine at one endpoint, and reconnects until it is closed.

    A dead engine is noticed by its closed socket, in milliseconds, and one that hangs by its
    silence: every request in flight ends with EngineDeadError, and `generate` raises it until the
    engine is back.

    on_end: called when the journal may have records to settle: for a new connection, for every
    request that ended, and with figures that say so, as another gateway's requests end as well.
    on_lease_low: called when a request is about to use up its lease; see ExtendLease.
    on_service: called with the service that this engine gave to tenants, for the other engines.

    Raises TcpError for a TCP address to which no safe connection is possible.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_end: Callable[[], None] = lambda: None,
        on_lease_low: Callable[[LeaseLow], None] = lambda _: None,
        on_service: Callable[[TenantService], None] = lambda _: None,
        heartbeat_s: float = 1.0,
    ) -> None:
        if endpoint.is_remote:
            check(endpoint.address, endpoint.server_key, endpoint.client_key)
        self.endpoint = endpoint
        self.heartbeat_s = heartbeat_s
        self.gateway_id = f"gw-{uuid.uuid4()}"
        self.welcome: Welcome | None = None
        self.stats: EngineStats | None = None
        self.residency: dict[str, Residency] = {}
        self.num_deaths = 0
        self._heard_at = 0.0
        self._on_end = on_end
        self._on_lease_low = on_lease_low
        self._on_service = on_service
        self._deliveries: dict[str, Delivery] = {}
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self.is_ready = False
        self._connection: _Connection | None = None
        self._living: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._living = asyncio.create_task(self._live())

    async def close(self) -> None:
        if self._living:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)

    async def generate(self, request: AddRequest, take: Take) -> None:
        """Have a request answered: `take` gets each output when it arrives. Cancelling this aborts.

        Raises RequestRefused, what `take` raises, or EngineDeadError; the latter is an
        EngineAwayError as long as the request may be sent to another engine, EngineDied if the
        engine may have died of it, and FirstTokenLate if that is all that is known.
        """
        if not self.is_ready:
            raise EngineAwayError("the engine is starting")
        delivery = self._deliveries[request.request_id] = Delivery(take)
        loop = asyncio.get_running_loop()
        # The engine ends a request at its deadline; an engine that does not is treated as dead.
        died = EngineDeadError("the engine died")
        late = loop.call_later(request.deadline_s + _LATE_S, delivery.fail, died)
        first_late = loop.call_later(
            request.first_token_timeout_s + _FIRST_TOKEN_LATE_S, delivery.fail_unless_begun
        )
        try:
            await self.tell(request)
            await delivery.ended
        finally:
            late.cancel()
            first_late.cancel()
            del self._deliveries[request.request_id]
            if not delivery.has_last:
                await self.tell(AbortRequests(request_ids=(request.request_id,)))

    async def tell(self, message: object) -> None:
        """Send the engine a message, unless it is gone: then it has no requests to abort either."""
        if self._connection and self.is_ready:
            await self._connection.send(message)

    async def prove(self, adapter: AdapterRef, object_path: Path, *, alone: bool) -> Proof:
        """Have the engine prove an adapter; see ProveAdapter. Raises EngineDeadError, and
        EngineAwayError if it never had the adapter.
        """
        message = ProveAdapter(
            proof_id=uuid.uuid4().hex, adapter=adapter, object_path=str(object_path), alone=alone
        )
        proof: Proof = await self._ask(message, message.proof_id, _PROOF_TIMEOUT_S)
        return proof

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        """Acknowledge settled records, and read the next ones. Raises EngineDeadError."""
        message = ReadJournal(
            read_id=uuid.uuid4().hex, engine_id=engine_id, settled_seq=settled_seq, limit=limit
        )
        found: JournalRecords = await self._ask(message, message.read_id, _JOURNAL_TIMEOUT_S)
        if found.engine_id != engine_id:
            raise EngineDeadError("another engine is in its place")
        return found

    async def _ask(self, message: object, ask_id: str, timeout_s: float) -> Any:
        """Send a message, and wait for the answer with its id. Raises EngineDeadError."""
        if not self.is_ready:
            raise EngineAwayError("the engine is starting")
        waiter = self._answers[ask_id] = asyncio.get_running_loop().create_future()
        try:
            await self.tell(message)
            return await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            raise EngineDeadError("the engine does not answer") from None
        finally:
            del self._answers[ask_id]

    # ---- the connection ----

    async def _live(self) -> None:
        """Run one connection after the other; a new one carries over nothing of the last one.

        The ZMQ context belongs to this task, which closes it however the task ends, since `close`
        may be cancelled while it waits.
        """
        with zmq.Context() as context:
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

    def _lose_engine(self) -> None:
        """Note that the engine is gone, and end everything that waits for it."""
        is_death = self.is_ready and not (self.stats and self.stats.is_leaving)
        self.num_deaths += is_death
        start = f"{self.welcome.engine_id} {self.welcome.epoch}" if self.welcome else ""
        read_until = self._heard_at + _MOST_UNHEARD_BEATS * self.heartbeat_s
        self.is_ready = False
        self.stats = None
        self.residency.clear()
        for delivery in self._deliveries.values():
            had_it = is_death and delivery.sent_at <= read_until
            delivery.fail(EngineDied(start) if had_it else EngineDeadError("the engine died"))
        for waiter in self._answers.values():
            if not waiter.done():
                waiter.set_exception(EngineDeadError("the engine died"))

    async def _take(self, message: object) -> None:
        self._heard_at = time.monotonic()
        match message:
            case StepOutputs():
                await self._deliver(message.outputs)
            case Welcome():
                self.welcome = message
                self.is_ready = True
                self._on_end()
            case LeaseLow():
                self._on_lease_low(message)
            case JournalRecords():
                self._answer(message.read_id, message)
            case ProofResult():
                self._answer(message.proof_id, message.proof)
            case Residency():
                self.residency[message.object_key] = message
            case TenantService():
                self._on_service(message)
            case EngineStats():
                self.stats = message
                if message.unsettled_records:
                    self._on_end()

    def _answer(self, ask_id: str, answer: object) -> None:
        if (waiter := self._answers.get(ask_id)) and not waiter.done():
            waiter.set_result(answer)

    async def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand a step's outputs over; between slices of them, other tasks have their turn."""
        for number, output in enumerate(outputs, start=1):
            if delivery := self._deliveries.get(output.request_id):
                delivery.hand(output)
            if output.is_last:
                self._on_end()
            if not number % _SLICE:
                await asyncio.sleep(0)


class _Connection:
    """One socket to the engine, from Hello until it is closed. Its messages are numbered from 0."""

    def __init__(
        self, context: "zmq.Context[Any]", endpoint: Endpoint, gateway_id: str, heartbeat_s: float
    ) -> None:
        self._gateway_id = gateway_id
        self._heartbeat_s = heartbeat_s
        self._numbering = Numbering()
        self._silence = Silence(SILENCE_S, _MOST_MISSED_BEATS * heartbeat_s)
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, gateway_id.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)  # ms, while no engine listens yet
        # It tells when the engine's end is gone, or refuses this gateway's key.
        self._monitor = ReadySocket(socket.get_monitor_socket(_GONE))
        if endpoint.is_remote:
            guard(socket, endpoint)
        self._endpoint = endpoint
        self._socket = ReadySocket(socket)
        self._sending = asyncio.Lock()
        socket.connect(endpoint.address)

    async def run(self, take: Callable[[object], Awaitable[None]]) -> None:
        """Run until the engine hangs up, stops sending, or sends a frame that cannot be decoded.

        What had arrived before the engine hung up is taken first: answers in it may be whole.
        """
        # Hello is sent before anything else; the socket keeps it for an engine that still starts.
        await self.send(Hello(gateway_id=self._gateway_id))
        receiving = asyncio.create_task(self._receive(take))
        beating = asyncio.create_task(self._beat())
        hanging_up = asyncio.create_task(self._hang_up())
        tasks = [receiving, beating, hanging_up]
        try:
            await asyncio.wait([receiving, beating], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._monitor.close()
        self._socket.close()

    async def send(self, message: object) -> None:
        async with self._sending:  # messages leave in the order of their numbers
            await self._socket.write(self._numbering.encode(message))

    async def _receive(self, take: Callable[[object], Awaitable[None]]) -> None:
        try:
            while True:
                message = self._numbering.decode(await self._socket.read())
                self._silence.end()
                if isinstance(message, EngineStats):
                    self._silence.limit_s = message.silence_s
                await take(message)
                if not self._numbering.num_received % _BURST:
                    await asyncio.sleep(0)
        except OtherWireVersion as error:
            logger.error("the engine at %s: %s", self._endpoint.address, error)
            await asyncio.sleep(_REFUSED_S)
        except (WireError, EndOfFrames):
            pass

    async def _hang_up(self) -> None:
        """End the reading when the engine's end closes; a killed process closes it at once."""
        event = parse_monitor_message([await self._monitor.read() for _ in range(2)])
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            logger.error(
                "%s refuses this gateway's key: give all gateways the same CHORALE_PEPPER",
                self._endpoint.address,
            )
            await asyncio.sleep(_REFUSED_S)
        self._socket.end()

    async def _beat(self) -> None:
        """Send heartbeats; return when the engine has been silent for too long."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            is_silent = self._silence.is_too_long()
            if self._numbering.num_received == 0:
                continue  # the engine may still be starting
            if is_silent:
                logger.error(
                    "%s has been silent for %.0f s, as if it hung",
                    self._endpoint.address,
                    self._silence.seconds,
                )
                return
            await self.send(Heartbeat())
