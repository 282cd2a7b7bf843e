"""A ZMQ socket in an event loop, which reads all frames that have arrived in one wake.

zmq.asyncio makes a future and asks the socket for its state several times for each frame.
"""

import asyncio

import zmq

_FULL_S = 0.01


class EndOfFrames(Exception):
    """The peer is gone, and all frames that it sent have been read."""


class ReadySocket:
    """Reads and writes `socket`, one reader and one writer at a time. It belongs to this loop."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._changed = asyncio.Event()
        self._is_at_end = False
        self._loop = asyncio.get_running_loop()
        # Readable when the socket's state has changed, until its state is asked for.
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._changed.set)

    async def read(self) -> bytes:
        """The next frame. Returns at once, without a turn for other tasks, if one is there.

        Raises EndOfFrames when all frames have been read after `end`.
        """
        while True:
            self._changed.clear()
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                if self._is_at_end:
                    raise EndOfFrames from None
                await self._changed.wait()

    def end(self) -> None:
        """Note that the peer is gone: `read` returns what has arrived, and then raises."""
        self._is_at_end = True
        self._changed.set()

    async def write(self, frame: bytes) -> None:
        """Queue a frame for the peer; wait while the queue is full."""
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
                break
            except zmq.Again:
                await asyncio.sleep(_FULL_S)
        # Sending asked for the state, so the reader will not hear of a frame that came before.
        self._changed.set()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)
