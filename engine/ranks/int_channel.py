"""Channels for rows of 64-bit numbers between two processes, over a socket of their own."""

import socket
import struct
from array import array
from collections.abc import Sequence

MAX_NUMBERS = 1 << 24
"""Most numbers in a row: 128 MB. A step of 2,048 tokens over long contexts has some 100,000."""

_LENGTH_BYTES = 8
_SEND_TIMEOUT_S = 60.0
"""Longest wait until the other process takes a row."""


class ChannelClosed(Exception):
    """The other end is gone, or did not keep a time limit."""


class IntChannel:
    """One end of a channel: one thread may send while another one receives.

    Rows arrive whole and in order. Time limits are options of the socket, one for each direction;
    the socket's own timeout would hold for both.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(None)
        self._limit(socket.SO_SNDTIMEO, _SEND_TIMEOUT_S)

    @classmethod
    def pair(cls) -> tuple["IntChannel", socket.socket]:
        """Make a channel: this end, and the socket of the other end, to hand to a child process."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(here), there

    def send(self, numbers: Sequence[int]) -> None:
        """Send a row. Raises ChannelClosed."""
        assert len(numbers) <= MAX_NUMBERS, f"a row of {len(numbers)} numbers"
        data = array("q", numbers).tobytes()
        try:
            self._connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        except OSError as error:
            raise _closed(error) from error

    def receive(self, timeout_s: float | None = None) -> "array[int]":
        """Receive the next row. timeout_s: longest wait for it; None waits without a limit.

        Raises ChannelClosed, also if the row does not come in time.
        """
        self._limit(socket.SO_RCVTIMEO, timeout_s or 0.0)
        size = int.from_bytes(self._read(_LENGTH_BYTES), "little")
        if size > MAX_NUMBERS * 8:
            raise ChannelClosed(f"a row of {size} bytes")
        numbers = array("q")
        numbers.frombytes(self._read(size))
        return numbers

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            try:
                count = self._connection.recv_into(view[filled:])
            except OSError as error:
                raise _closed(error) from error
            if not count:
                raise ChannelClosed("the other process has ended")
            filled += count
        return data

    def _limit(self, option: int, seconds: float) -> None:
        """Set the time limit of one direction; 0 is none.   option: of the socket."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        try:
            self._connection.setsockopt(socket.SOL_SOCKET, option, limit)
        except OSError as error:
            raise _closed(error) from error


def _closed(error: OSError) -> ChannelClosed:
    return ChannelClosed("timed out" if isinstance(error, BlockingIOError) else str(error))
