"""Forks the processes of a world from a process without event loop, threads and connections."""

import os
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import msgspec

from tests.crash.children import Life

_ORDER_BYTES = 4096


class Nursery:
    """Forks processes on order. It must be made before any event loop or thread.

    log: file of the children's output.
    """

    def __init__(self, log: Path) -> None:
        self._socket, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _serve(orders, log)
            os._exit(0)
        orders.close()

    def start(self, life: Life) -> int:
        """Start a process and return its id."""
        self._socket.send(msgspec.json.encode(asdict(life)))
        return int(self._socket.recv(_ORDER_BYTES))

    def close(self) -> None:
        """Kill all processes that it started and that still live."""
        self._socket.close()
        os.waitpid(self._pid, 0)


def _serve(orders: socket.socket, log: Path) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps children that end
    os.setpgid(0, 0)
    while order := orders.recv(_ORDER_BYTES):
        if (child := os.fork()) == 0:
            orders.close()
            _live(Life.decode(order), log)
        orders.send(str(child).encode())
    os.killpg(0, signal.SIGKILL)


def _live(life: Life, log: Path) -> None:
    """Run a process's life in this child. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    try:
        life.live()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
