"""Forks the processes of one world from one that has no loop, no threads and no connections."""

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
    """Make it before any loop or thread there is. log: where its children write."""

    def __init__(self, log: Path) -> None:
        self._socket, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _serve(orders, log)
            os._exit(0)
        orders.close()

    def start(self, life: Life) -> int:
        """Its process id."""
        self._socket.send(msgspec.json.encode(asdict(life)))
        return int(self._socket.recv(_ORDER_BYTES))

    def close(self) -> None:
        """All that it started and that still lives is killed."""
        self._socket.close()
        os.waitpid(self._pid, 0)


def _serve(orders: socket.socket, log: Path) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    os.setpgid(0, 0)
    while order := orders.recv(_ORDER_BYTES):
        if (child := os.fork()) == 0:
            orders.close()
            _live(Life.decode(order), log)
        orders.send(str(child).encode())
    os.killpg(0, signal.SIGKILL)


def _live(life: Life, log: Path) -> None:
    """Does not return."""
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
