"""What takes time, off the engine loop: asks the fetcher, reads, packs, copies to slabs."""

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lora.batch import DeviceTables
from lora.disk_cache import DiskCache
from lora.errors import AdapterError, Failure
from lora.layout import Layout
from lora.manager import Loaded
from lora.weights import PackedAdapter, pack
from registry.ref import AdapterRef

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.2
_FETCHER_GONE = "the fetcher is not running"


class FetchClient:
    """Orders to the fetcher process, answers back, over its Unix socket; reconnects by itself.

    timeout_s: how long an order may go unanswered before it fails (and may be tried again).
    """

    def __init__(
        self, path: Path, on_answer: Callable[[Loaded], None], timeout_s: float = 60.0
    ) -> None:
        self.path = path
        self.on_answer = on_answer
        self.timeout_s = timeout_s
        self._orders: dict[str, tuple[AdapterRef, float]] = {}
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        threading.Thread(target=self._run, name="fetch-client", daemon=True).start()

    def fetch(self, ref: AdapterRef) -> None:
        with self._lock:
            self._orders[ref.object_key] = (ref, time.monotonic() + self.timeout_s)
            self._send(ref)

    def _send(self, ref: AdapterRef) -> None:
        """Unsent orders go out on the next connection."""
        order = {"digest": ref.digest, "object_key": ref.object_key, "size_bytes": ref.size_bytes}
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(json.dumps(order).encode() + b"\n")

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self.path))
                self._read_answers(connection)
            self._fail_overdue()
            time.sleep(_RECONNECT_S)

    def _read_answers(self, connection: socket.socket) -> None:
        connection.settimeout(1.0)
        with self._lock:
            self._connection = connection
            for ref, _ in self._orders.values():
                self._send(ref)
        pending = b""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    received = connection.recv(1 << 16)
                    if not received:
                        return
                    *lines, pending = (pending + received).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
                self._fail_overdue()
        finally:
            with self._lock:
                self._connection = None

    def _take(self, answer: dict[str, Any]) -> None:
        with self._lock:
            if self._orders.pop(answer["object_key"], None) is None:
                return
        failure = Failure(answer["kind"], answer["error"]) if answer["error"] else None
        self.on_answer(Loaded(answer["object_key"], "disk", failure=failure))

    def _fail_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            overdue = [key for key, (_, until) in self._orders.items() if until < now]
            for key in overdue:
                del self._orders[key]
        for key in overdue:
            self.on_answer(Loaded(key, "disk", failure=Failure("unavailable", _FETCHER_GONE)))


class ThreadLoader:
    """One thread that reads, packs and copies; orders wait in line (bounded by the manager's
    entries).

    arena: [num_slabs, slab_bytes] uint8 on the engine's device.
    """

    def __init__(
        self,
        disk: DiskCache,
        fetcher: Path,
        layout: Layout,
        dtype: torch.dtype,
        arena: torch.Tensor,
    ) -> None:
        self.disk = disk
        self.layout = layout
        self.dtype = dtype
        self.arena = arena
        self._done: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Callable[[], Loaded | None]] = queue.SimpleQueue()
        self._fetcher = FetchClient(fetcher, self._done.put)
        threading.Thread(target=self._run, name="adapter-loader", daemon=True).start()

    def fetch(self, ref: AdapterRef) -> None:
        # Not even a look at the disk, nor a send, on the engine's loop: both may block.
        self._work.put(lambda: self._fetch(ref))

    def drop(self, key: str) -> None:
        """A fetch that is under way goes on: what it brings stays on disk."""

    def load(self, ref: AdapterRef) -> None:
        self._work.put(lambda: self._load(ref))

    def place(self, ref: AdapterRef, packed: Any, slabs: list[int]) -> None:
        self._work.put(lambda: self._place(ref, packed, slabs))

    def poll(self) -> list[Loaded]:
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                done.append(self._done.get_nowait())
        return done

    def _run(self) -> None:
        while True:
            if (done := self._work.get()()) is not None:
                self._done.put(done)

    def _fetch(self, ref: AdapterRef) -> Loaded | None:
        """Done at once where it is on disk; else the fetcher's answer will say."""
        if self.disk.has(ref.digest):
            return Loaded(ref.object_key, "disk")
        self._fetcher.fetch(ref)
        return None

    def _load(self, ref: AdapterRef) -> Loaded:
        try:
            data = self.disk.open_verified(ref.digest)
            packed = pack(ref.digest, data, self.layout, self.dtype)
        except OSError as error:
            return Loaded(ref.object_key, "host", failure=Failure("lost", str(error)))
        except AdapterError as error:
            return Loaded(ref.object_key, "host", failure=error.failure)
        return Loaded(ref.object_key, "host", packed)

    def _place(self, ref: AdapterRef, packed: PackedAdapter, slabs: list[int]) -> Loaded:
        assert packed.digest == ref.digest
        self.arena[torch.tensor(slabs)] = packed.slabs.to(self.arena.device)
        if self.arena.is_cuda:
            torch.cuda.current_stream().synchronize()
        tables = DeviceTables.of(packed, self.layout, slabs, self.arena)
        return Loaded(ref.object_key, "device", tables)
