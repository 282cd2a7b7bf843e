"""The gateways of an engine: who has said Hello on its socket, and the messages to and from them.

ZMQ's own threads move the bytes, so nothing here waits but for the first message of `receive`.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import zmq

from engine.config import EngineConfig
from engine.wire.encoding import (
    UNEXPECTED_NUMBER,
    NotSendable,
    Numbering,
    WireError,
    decode,
    encode,
)
from engine.wire.messages import Heartbeat, Hello
from engine.wire.tcp import ADDRESS_FILE, listen

logger = logging.getLogger(__name__)

_MOST_RECEIVED = 256
_SEND_QUEUE = 100_000
_FIRST_GATEWAY_S = 60.0
_NUM_RELAYS = 2
"""Gateways that forward a message: two, as one may be cut off from an engine."""


@dataclass(slots=True)
class _Gateway:
    last_heard_at: float
    numbering: Numbering = field(default_factory=Numbering)


class Gateways:
    """Any number of gateways on one socket, by the identity of their sockets.

    on_lost: called with each gateway that is forgotten, since nobody reads its requests' outputs.
    """

    def __init__(self, config: EngineConfig, on_lost: Callable[[str], None]) -> None:
        self._timeout_s = config.gateway_timeout_s
        self._on_lost = on_lost
        self._known: dict[str, _Gateway] = {}
        self._alone_since = time.monotonic() + _FIRST_GATEWAY_S - self._timeout_s
        folder = Path(config.data_dir)
        socket_path = folder / "engine.sock"
        socket_path.unlink(missing_ok=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._authenticator = None
        if config.listen:
            self._authenticator = listen(
                self._socket,
                config.listen,
                config.server_key,
                config.client_key,
                folder / ADDRESS_FILE,
            )
        else:
            self._socket.bind(f"ipc://{socket_path}")
            os.chmod(socket_path, 0o600)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def are_gone(self) -> bool:
        """Whether there has been no gateway for `timeout_s`; the first one has a minute."""
        return not self._known and time.monotonic() - self._alone_since > self._timeout_s

    def receive(self, timeout_ms: int) -> Iterator[tuple[str, object]]:
        """Yield (gateway, message) for messages that have arrived, or wait for the first one.

        A gateway that says Hello is new: its requests of an older connection have been ended. One
        whose messages are lost or cannot be read must begin anew.
        """
        if not self._socket.poll(timeout_ms):
            return
        for _ in range(_MOST_RECEIVED):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            gateway_id = identity.decode(errors="replace")
            try:
                message = self._accept(gateway_id, b"".join(frames))
            except WireError as error:
                logger.warning("gateway %s: %s", gateway_id, error)
                self._forget(gateway_id)
                with suppress(zmq.ZMQError):  # an unexpected number makes it say Hello again
                    self._put(gateway_id, encode(UNEXPECTED_NUMBER, Heartbeat()))
            else:
                yield gateway_id, message

    def _accept(self, gateway_id: str, frame: bytes) -> object:
        """The message of a gateway's next frame. Raises WireError."""
        number, message = decode(frame)
        if isinstance(message, Hello):
            self._forget(gateway_id)
            self._known[gateway_id] = _Gateway(time.monotonic())
        if (gateway := self._known.get(gateway_id)) is None:
            raise WireError("it has not said Hello to this engine")
        gateway.numbering.accept(number)
        gateway.last_heard_at = time.monotonic()
        return message

    def send(self, gateway_id: str, message: object) -> None:
        """Send a message, or forget the gateway if it cannot be sent."""
        if (gateway := self._known.get(gateway_id)) is None:
            return
        try:
            self._put(gateway_id, gateway.numbering.encode(message))
        except (zmq.ZMQError, NotSendable) as error:
            # It is gone, or so far behind that its queue is full, or this message cannot be sent.
            logger.warning("gateway %s cannot be reached: %s", gateway_id, error)
            self._forget(gateway_id)

    def send_all(self, messages: Sequence[object]) -> None:
        for gateway_id in list(self._known):
            for message in messages:
                self.send(gateway_id, message)

    def announce(self, message: object) -> None:
        """Send a message in the middle of a step, whose requests no gateway may lose meanwhile: one
        that cannot be reached is forgotten when something is sent to it after the step.
        """
        for gateway_id, gateway in self._known.items():
            with suppress(zmq.ZMQError):
                self._put(gateway_id, gateway.numbering.encode(message))

    def next_relays(self) -> list[str]:
        """The gateways whose turn it is to forward a message to the other engines."""
        relays = list(islice(self._known, _NUM_RELAYS))
        for gateway_id in relays:
            self._known[gateway_id] = self._known.pop(gateway_id)
        return relays

    def forget_silent(self) -> None:
        limit = time.monotonic() - self._timeout_s
        for gateway_id, gateway in list(self._known.items()):
            if gateway.last_heard_at < limit:
                logger.warning("gateway %s is silent: its requests are ended", gateway_id)
                self._forget(gateway_id)

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _put(self, gateway_id: str, frame: bytes) -> None:
        self._socket.send_multipart([gateway_id.encode(), frame], zmq.NOBLOCK)

    def _forget(self, gateway_id: str) -> None:
        if self._known.pop(gateway_id, None):
            self._on_lost(gateway_id)
            self._alone_since = time.monotonic()
