"""The fetcher: object store to disk cache, a process of its own at low priority, without torch.

    python -m lora.fetch --socket PATH --storage URL --cache DIR --quota-bytes N

It listens on a Unix socket; the engine sends one JSON line an object, `{"object_key", "digest",
"size_bytes"}`, and gets one back, `{"object_key", "error", "kind"}`. Fetches run on a few
threads; boto3 in the engine's own process would triple the decode step's p99.
"""

import argparse
import contextlib
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lora.disk_cache import DiskCache
from lora.errors import AdapterError
from registry.errors import ObjectNotFound, StorageError
from registry.storage import Storage
from registry.storage_url import open_storage

_NICE = 19
_THREADS = 4


class Fetcher:
    """Answers the orders of engines, each as soon as it is done."""

    def __init__(self, storage: Storage, cache: DiskCache) -> None:
        self.storage = storage
        self.cache = cache
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch")
        self._sending = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        """Until the engine hangs up."""
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                self._pool.submit(self._answer, connection, json.loads(line))

    def _answer(self, connection: socket.socket, order: dict[str, Any]) -> None:
        answer = {"object_key": order["object_key"], **self.fetch(order)}
        # An engine that hung up asks again when it is back.
        with self._sending, contextlib.suppress(OSError):
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def fetch(self, order: dict[str, Any]) -> dict[str, Any]:
        """Bring one object to disk; what went wrong is in the answer."""
        digest = order["digest"]
        try:
            if not self.cache.has(digest):
                chunks = self.storage.read(order["object_key"])
                self.cache.store(digest, chunks, order["size_bytes"])
        except AdapterError as error:
            return {"error": error.failure.error, "kind": error.failure.kind}
        except ObjectNotFound as error:
            return {"error": str(error), "kind": "missing"}
        except (StorageError, OSError) as error:
            return {"error": str(error), "kind": "unavailable"}
        return {"error": None, "kind": None}


def listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(1)
    return server


def main() -> None:
    parser = argparse.ArgumentParser(prog="lora.fetch")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--quota-bytes", type=int, required=True)
    args = parser.parse_args()
    os.nice(_NICE)
    fetcher = Fetcher(open_storage(args.storage), DiskCache(args.cache, args.quota_bytes))
    server = listen(args.socket)
    while True:
        connection, _ = server.accept()
        # A new engine may connect while the old one's socket lingers: serve both.
        threading.Thread(target=fetcher.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
