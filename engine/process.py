"""The engine's process: one loop between a socket and the core, which also tracks the gateways.

ZMQ's own threads move the bytes, so the loop only takes messages that have already arrived.
"""

import contextlib
import fcntl
import logging
import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Protocol

import zmq

from engine.core import Busy, FromGateway, ToGateway
from engine.journal_files import JournalGone
from engine.leaving import LEAVING, Leaving, forget_settled, refusal
from engine.messages import (
    SILENCE_S,
    AddRequest,
    EngineStats,
    Hello,
    ProveAdapter,
    Residency,
    TenantService,
    Welcome,
)
from engine.tcp import TcpListener
from engine.wire import (
    UNEXPECTED_NUMBER,
    NotSendable,
    Numbering,
    WireError,
    decode,
    encode,
)
from lora.beat import Beat

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 20
LOADING_POLL_MS = 1
RESTING_POLL_MS = 250
"""How long an engine that has nothing to compute sleeps on its socket. A message wakes it, but a
finished load or a signal does not, so it sleeps less while it has requests, which may wait for a
load, and most when it rests.
"""
STATS_INTERVAL_S = 0.25
RESTING_STATS_INTERVAL_S = 1.0
_REST_AFTER_S = 10.0
"""How long an engine computes nothing and moves no adapter before it rests. Gateways average the
figures of this time one by one.
"""
INTEGRITY_INTERVAL_S = 5.0
_MESSAGES_PER_STEP = 256
_SEND_QUEUE = 100_000
_LEAVE_TIMEOUT_S = 150.0
_FIRST_GATEWAY_S = 60.0
_CLOSING_S = 60.0
_NUM_RELAYS = 2
"""Gateways that get the service totals each time: two, as one may be cut off from an engine."""


class EngineInUse(Exception):
    """Another engine runs on this data directory."""


def lock_directory(directory: Path) -> IO[str]:
    """Lock a data directory, which whoever starts engines made, while the returned file is open.

    Raises EngineInUse, JournalGone.
    """
    if not directory.is_dir():
        raise JournalGone(directory / "journal")
    file = (directory / "engine.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise EngineInUse(f"another engine holds {file.name}") from None
    return file


def engine_identity(directory: Path) -> tuple[str, int]:
    """Return (engine_id, epoch): the id lasts as long as the journal, the epoch counts starts.

    The journal's folder is made before the first identity. Raises JournalGone.
    """
    path, journal = directory / "identity", directory / "journal"
    if path.exists() and not journal.is_dir():
        raise JournalGone(journal)
    journal.mkdir(exist_ok=True)
    engine_id, epoch = path.read_text().split() if path.exists() else (f"eng-{uuid.uuid4()}", 0)
    line = f"{engine_id} {int(epoch) + 1:010d}\n"
    if path.exists():
        # Written in place: an engine must start on a full disk, too, without room for another file.
        with path.open("r+") as file:
            file.write(line)
    else:
        temporary = path.with_suffix(".part")
        temporary.write_text(line)
        temporary.rename(path)
    forget_settled(directory)
    return engine_id, int(epoch) + 1


class Core(Protocol):
    """Interface of what a process serves: an engine, or the journal of a retired one."""

    @property
    def num_steps(self) -> int:
        """Number of steps that computed something."""
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def is_settled(self) -> bool:
        """Whether the core has finished, and all of its journal is settled."""
        ...

    def step(self, busy: Busy) -> Sequence[tuple[str, ToGateway]]:
        """Run one step, if there is any, and announce with `busy` whatever may take long."""
        ...

    def handle(self, gateway_id: str, message: FromGateway) -> Sequence[tuple[str, ToGateway]]: ...

    def abort_gateway(self, gateway_id: str) -> None: ...

    def check_integrity(self) -> None: ...

    def finish(self) -> None:
        """Finish, as no request follows; it is called again until the open requests have ended."""
        ...

    def close(self) -> None: ...

    def take_residency(self) -> list[Residency]: ...

    def all_residency(self) -> list[Residency]: ...

    def take_stats(self) -> EngineStats: ...

    def take_service(self, epoch: int) -> list[TenantService]: ...


@dataclass(slots=True)
class _Gateway:
    last_heard_at: float
    numbering: Numbering = field(default_factory=Numbering)


class EngineProcess:
    """Serves any number of gateways on one Unix socket.

    tcp: address to listen on instead, for gateways on other machines.
    gateway_timeout_s: silence after which a gateway's requests are ended; without any gateway for
    that long the process exits (the first one has a minute).
    leaving: how the engine leaves when it is asked to stop.
    beat: tells the supervisor that this loop is alive.
    """

    def __init__(
        self,
        core: Core,
        welcome: Welcome,
        socket_path: Path,
        *,
        tcp: TcpListener | None = None,
        gateway_timeout_s: float = 10.0,
        leaving: Leaving | None = None,
        beat: Beat | None = None,
    ) -> None:
        self.core = core
        self.welcome = welcome
        self.gateway_timeout_s = gateway_timeout_s
        self._gateways: dict[str, _Gateway] = {}
        self._alone_since = time.monotonic() + _FIRST_GATEWAY_S - gateway_timeout_s
        self._stats_due = self._integrity_due = self._rests_at = 0.0
        self._leaving = leaving or Leaving(_LEAVE_TIMEOUT_S)
        self._beat = beat or Beat()
        socket_path.unlink(missing_ok=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._authenticator = None
        if tcp is None:
            self._socket.bind(f"ipc://{socket_path}")
            os.chmod(socket_path, 0o600)
        else:
            self._authenticator = tcp.bind(self._socket)

    def run(self) -> None:
        """Serve until every gateway is gone, or the engine has left; then close the sockets."""
        signal.signal(signal.SIGTERM, lambda *_: self.leave())
        try:
            self._serve()
            with self._beat.busy("closing the journal", _CLOSING_S):
                self.core.close()
        finally:
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        has_computed = has_work = False
        while not self._has_left() and not self._is_deserted():
            self._beat.beat()
            had_work, has_work = has_work, self.core.has_work
            self._receive(0 if has_computed else self._poll_ms(has_work))
            # Gateways spoke during a long step; nobody is silent before that has been received.
            self._drop_silent()
            num_steps = self.core.num_steps
            for gateway_id, message in self.core.step(self._busy):
                self._send(gateway_id, message)
            has_computed = self.core.num_steps > num_steps
            self._tell_everybody(is_busy=has_computed or self.core.has_work)
            if had_work and not has_work:
                self._check_integrity()
        reason = "asked to stop" if self._leaving.has_begun else "no gateway any more"
        logger.info("%s: exiting", reason)

    @contextmanager
    def _busy(self, what: str, limit_s: float) -> Iterator[None]:
        """Announce long work to the supervisor, and to gateways if they would not wait for it."""
        if limit_s > SILENCE_S:
            self._announce(replace(self._stats(), silence_s=limit_s))
        with self._beat.busy(what, limit_s):
            yield

    def leave(self) -> None:
        """Begin to leave, and announce it with the next figures."""
        self._leaving.begin()
        self._stats_due = 0.0

    def _has_left(self) -> bool:
        if self._leaving.refuses:
            self.core.finish()
        return self._leaving.is_over(
            has_gateways=bool(self._gateways), is_settled=self.core.is_settled
        )

    def _check_integrity(self) -> None:
        """Check the core when no request waits for a step; seldom, as one may arrive meanwhile."""
        if (now := time.monotonic()) >= self._integrity_due:
            self._integrity_due = now + INTEGRITY_INTERVAL_S
            self.core.check_integrity()

    def _poll_ms(self, has_work: bool) -> int:
        """How long to wait for a message when no step computes."""
        if has_work:
            return LOADING_POLL_MS
        return RESTING_POLL_MS if time.monotonic() >= self._rests_at else IDLE_POLL_MS

    # ---- in ----

    def _receive(self, timeout_ms: int) -> None:
        if not self._socket.poll(timeout_ms):
            return
        for _ in range(_MESSAGES_PER_STEP):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(identity.decode(errors="replace"), b"".join(frames))

    def _take(self, gateway_id: str, frame: bytes) -> None:
        try:
            number, message = decode(frame)
            if isinstance(message, Hello):
                self._greet(gateway_id)
            if (gateway := self._gateways.get(gateway_id)) is None:
                raise WireError("it has not said Hello to this engine")
            gateway.numbering.accept(number)
        except WireError as error:
            logger.warning("gateway %s: %s", gateway_id, error)
            self._forget(gateway_id)
            self._disown(gateway_id)
            return
        gateway.last_heard_at = time.monotonic()
        if not isinstance(message, FromGateway):
            return  # Hello and Heartbeat
        if self._leaving.refuses and isinstance(message, AddRequest | ProveAdapter):
            # A proof is not answered: nothing was found out about its adapter.
            if isinstance(message, AddRequest):
                self._send(gateway_id, refusal(message, LEAVING))
            return
        for receiver, answer in self.core.handle(gateway_id, message):
            self._send(receiver, answer)

    def _greet(self, gateway_id: str) -> None:
        """Welcome a gateway's new connection, and end its requests of an older one."""
        self._forget(gateway_id)
        self._gateways[gateway_id] = _Gateway(time.monotonic())
        self._send(gateway_id, self.welcome)
        self._send(gateway_id, self._stats())
        for residency in self.core.all_residency():
            self._send(gateway_id, residency)

    def _disown(self, gateway_id: str) -> None:
        """Make a gateway begin anew with Hello, by a message number that is never due."""
        with contextlib.suppress(zmq.ZMQError):
            stranger = encode(UNEXPECTED_NUMBER, self.welcome)
            self._socket.send_multipart([gateway_id.encode(), stranger], zmq.NOBLOCK)

    # ---- out ----

    def _send(self, gateway_id: str, message: object) -> None:
        gateway = self._gateways.get(gateway_id)
        if gateway is None:
            return
        try:
            frame = gateway.numbering.encode(message)
            self._socket.send_multipart([gateway_id.encode(), frame], zmq.NOBLOCK)
        except (zmq.ZMQError, NotSendable) as error:
            # It is gone, or so far behind that its queue is full, or this message cannot be sent.
            logger.warning("gateway %s cannot be reached: %s", gateway_id, error)
            self._forget(gateway_id)

    def _tell_everybody(self, *, is_busy: bool) -> None:
        """Send residency at once, and figures and service totals four times a second, or once
        while the engine rests.
        """
        moves = self.core.take_residency()
        for move in moves:
            if move.tier == "failed":
                logger.warning("adapter %s: %s", move.object_key, move.error)
        news: list[object] = list(moves)
        now = time.monotonic()
        if moves or is_busy:
            self._rests_at = now + _REST_AFTER_S
            self._stats_due = min(self._stats_due, now + STATS_INTERVAL_S)
        if now >= self._stats_due:
            rests = now >= self._rests_at
            self._stats_due = now + (RESTING_STATS_INTERVAL_S if rests else STATS_INTERVAL_S)
            news.append(self._stats())
            self._tell_service()
        self._send_all(news)

    def _announce(self, message: object) -> None:
        """Send a message in the middle of a step, whose requests no gateway may lose meanwhile: one
        that cannot be reached is forgotten when something is sent to it after the step.
        """
        for gateway_id, gateway in self._gateways.items():
            frame = gateway.numbering.encode(message)
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([gateway_id.encode(), frame], zmq.NOBLOCK)

    def _send_all(self, news: Sequence[object]) -> None:
        for gateway_id in list(self._gateways):
            for message in news:
                self._send(gateway_id, message)

    def _tell_service(self) -> None:
        """Send service totals to `_NUM_RELAYS` gateways, which forward them to the other engines.

        The gateways take turns. If all of them forwarded the totals, each engine would receive the
        same totals from every gateway.
        """
        if not self._gateways:
            return
        service = self.core.take_service(self.welcome.epoch)
        relays = list(islice(self._gateways, _NUM_RELAYS))
        for gateway_id in relays:
            # The gateway becomes the last in line before the send, which may forget it.
            self._gateways[gateway_id] = self._gateways.pop(gateway_id)
            for message in service:
                self._send(gateway_id, message)

    def _stats(self) -> EngineStats:
        return replace(self.core.take_stats(), is_leaving=self._leaving.has_begun)

    # ---- gateways ----

    def _forget(self, gateway_id: str) -> None:
        if self._gateways.pop(gateway_id, None):
            self.core.abort_gateway(gateway_id)
            self._alone_since = time.monotonic()

    def _drop_silent(self) -> None:
        limit = time.monotonic() - self.gateway_timeout_s
        for gateway_id, gateway in list(self._gateways.items()):
            if gateway.last_heard_at < limit:
                logger.warning("gateway %s is silent: its requests are ended", gateway_id)
                self._forget(gateway_id)

    def _is_deserted(self) -> bool:
        if self._gateways:
            return False
        return time.monotonic() - self._alone_since > self.gateway_timeout_s
