"""Channels for plain values between two processes, over a pipe of their own."""

import marshal
from multiprocessing.connection import Connection, Pipe
from typing import Any

_MOST_BYTES = 128 << 20
"""Most bytes of a value. A step of 2,048 tokens over long contexts has some 500,000."""


class ChannelClosed(Exception):
    """The other end is gone, or did not answer in time."""


class Channel:
    """One end of a channel: one thread may send while another one receives.

    Values are numbers, strings, None, and tuples and lists of these. They arrive in order, and
    whole. Nothing else can be in what is received, unlike with pickle.
    """

    def __init__(self, end: "Connection[bytes, bytes]") -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple["Channel", "Connection[bytes, bytes]"]:
        """Make a channel: this end, and the other one, to hand to a child process."""
        here, there = Pipe()
        return cls(here), there

    def send(self, value: Any) -> None:
        """Send a value. Raises ChannelClosed.

        The call waits while the pipe is full, without a limit of its own: the watchdog of the
        supervisor ends an engine whose step does not end.
        """
        data = marshal.dumps(value)
        assert len(data) <= _MOST_BYTES, f"a value of {len(data)} bytes"
        try:
            self._end.send_bytes(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Receive the next value. timeout_s: longest wait for it; None waits without a limit.

        Raises ChannelClosed, also if the value does not come in time.
        """
        try:
            if timeout_s is not None and not self._end.poll(timeout_s):
                raise ChannelClosed("timed out")
            return marshal.loads(self._end.recv_bytes(_MOST_BYTES))
        except (EOFError, OSError) as error:
            raise ChannelClosed(str(error) or "the other process has ended") from error
