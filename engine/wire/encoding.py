"""Messages as bytes on a ZMQ socket: the only place that encodes them. No pickle.

Frame: uint8 version, uint64 number, uint8 kind, msgpack body. Numbers count up from 0 in each
direction of a connection; a gap means that a message was lost, and the receiver treats the peer as
failed.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.wire import messages
from engine.wire.records import JournalRecords
from registry.whole_files import write_whole

UNEXPECTED_NUMBER = (1 << 64) - 1
"""A message number that is never expected: a peer that receives it starts its connection anew."""

WIRE_VERSION = 1
"""Version of all messages; a change that a peer of the version before would misread adds one."""
_HEADER = struct.Struct("<BQB")


MESSAGES: tuple[type, ...] = (
    messages.Hello,
    messages.Welcome,
    messages.AddRequest,
    messages.ExtendLease,
    messages.AbortRequests,
    messages.Prefetch,
    messages.PinAdapters,
    messages.ReadJournal,
    messages.Heartbeat,
    messages.StepOutputs,
    messages.LeaseLow,
    messages.Residency,
    JournalRecords,
    messages.EngineStats,
    messages.ProveAdapter,
    messages.ProofResult,
    messages.TenantService,
    messages.ForgetDrafts,
)
_KINDS = {message_type: kind for kind, message_type in enumerate(MESSAGES)}
_DECODERS = tuple(msgspec.msgpack.Decoder[object](each) for each in MESSAGES)


def _plain(value: object) -> object:
    """The plain number that a number of numpy or torch stands for."""
    if (item := getattr(value, "item", None)) is None:
        raise TypeError(f"a {type(value).__name__} cannot be sent")
    return item()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


class NotSendable(Exception):
    """A message has a field that the wire has no form for, which is a fault of its sender."""


class WireError(Exception):
    """A message of the peer is lost or unreadable, so that its connection ends."""


class OtherWireVersion(WireError):
    """The peer's messages have another version."""

    def __init__(self, found: int) -> None:
        super().__init__(
            f"its messages have version {found}, and this build reads version {WIRE_VERSION}: run "
            "gateways and engines of one release"
        )


def encode(number: int, message: object) -> bytes:
    """Encode a message; all numbers in it become plain ones. Raises NotSendable."""
    try:
        body = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise NotSendable(f"{type(message).__name__}: {error}") from error
    return _HEADER.pack(WIRE_VERSION, number, _KINDS[type(message)]) + body


def decode(frame: bytes) -> tuple[int, object]:
    """Decode a frame into (number, message). Raises WireError."""
    if frame and frame[0] != WIRE_VERSION:
        raise OtherWireVersion(frame[0])
    try:
        _, number, kind = _HEADER.unpack_from(frame)
        message = _DECODERS[kind].decode(memoryview(frame)[_HEADER.size :])
    except (struct.error, IndexError, msgspec.MsgspecError) as error:
        raise WireError(str(error)) from None
    return number, message


class Numbering:
    """Numbers of the messages of one connection, in both directions."""

    def __init__(self) -> None:
        self.num_received = 0
        self._num_sent = 0

    def encode(self, message: object) -> bytes:
        frame = encode(self._num_sent, message)
        self._num_sent += 1
        return frame

    def decode(self, frame: bytes) -> object:
        """Decode the next message. Raises WireError."""
        number, message = decode(frame)
        self.accept(number)
        return message

    def accept(self, number: int) -> None:
        """Note that a message with this number has come. Raises WireError."""
        if number != self.num_received:
            raise WireError(f"message {number} came where {self.num_received} was due")
        self.num_received += 1


def write_vocabulary(path: Path, vocabulary: Sequence[bytes]) -> None:
    """Write the table token id -> bytes that the gateway hands to the engine at its start."""
    write_whole(path, _ENCODER.encode(list(vocabulary)))


def read_vocabulary(path: Path) -> list[bytes]:
    return msgspec.msgpack.decode(path.read_bytes(), type=list[bytes])
