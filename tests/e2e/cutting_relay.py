"""A relay before a gateway that cuts connections in the middle of a part of an upload."""

import contextlib
import re
import socket
import socketserver
import threading
from collections import deque
from collections.abc import Iterator

_PART = re.compile(rb"PUT \S+/adapter_model\.safetensors HTTP.*?content-range: bytes (\d+)", re.S)


class CuttingRelay:
    """Passes connections on to a port of this machine.

    cuts: whether each of the next parts is cut; those after them are not.
    starts: the first byte of each part that came, cut ones included.
    """

    def __init__(self, port: int) -> None:
        self.cuts: deque[bool] = deque()
        self.starts: list[int] = []
        self._port = port

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Run until the end of the block. Yields the relay's URL."""
        relay = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    relay._pass_on(self.request)

        with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads, server.block_on_close = True, False
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_address[1]}"
            server.shutdown()

    def _pass_on(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as gateway:
            threading.Thread(target=_copy, args=(gateway, client), daemon=True).start()
            while data := client.recv(1 << 16):
                if part := _PART.search(data.replace(b"Content-Range", b"content-range")):
                    self.starts.append(int(part[1]))
                    if self.cuts and self.cuts.popleft():
                        gateway.sendall(data[:-1])
                        break
                gateway.sendall(data)
            for end in (client, gateway):
                end.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
