"""Channels for rows of 64-bit numbers between two processes, over a pipe of their own."""

from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe

MAX_NUMBERS = 1 << 24
"""Most numbers in a row: 128 MB. A step of 2,048 tokens over long contexts has some 100,000."""


class ChannelClosed(Exception):
    """The other end is gone, or did not answer in time."""


class IntChannel:
    """One end of a channel: one thread may send while another one receives.

    Rows arrive whole and in order.
    """

    def __init__(self, end: "Connection[bytes, bytes]") -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple["IntChannel", "Connection[bytes, bytes]"]:
        """Make a channel: this end, and the other one, to hand to a child process."""
        here, there = Pipe()
        return cls(here), there

    def send(self, numbers: Sequence[int]) -> None:
        """Send a row. Raises ChannelClosed."""
        assert len(numbers) <= MAX_NUMBERS, f"a row of {len(numbers)} numbers"
        try:
            self._end.send_bytes(array("q", numbers))
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> "array[int]":
        """Receive the next row. timeout_s: longest wait for it; None waits without a limit.

        Raises ChannelClosed, also if the row does not come in time.
        """
        try:
            if timeout_s is not None and not self._end.poll(timeout_s):
                raise ChannelClosed("timed out")
            return array("q", self._end.recv_bytes(8 * MAX_NUMBERS))
        except (EOFError, OSError) as error:
            raise ChannelClosed(str(error) or "the other process has ended") from error
