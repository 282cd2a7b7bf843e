"""The fetcher: brings objects from the store to packed files on disk, in a process without torch.

    python -m lora.fetch --socket PATH --storage URL --cache DIR --quota-bytes N --max-fetches N
                         [--reserve-bytes N]

The fetcher listens on a Unix socket for engines. Each line is one JSON object:

    engine   {"op": "hello", "form": PackedForm}                                        first
             {"op": "fetch", "order", "object_key", "digest", "size_bytes", "timeout_s"}
             {"op": "drop", "order"}
    fetcher  {"order", and the fields of a lora.loads.Fetched}

Every fetch is answered once, dropped or not, with its order's number. The process runs at the
lowest priority: boto3 and packing in the engine's own process would triple the decode step's p99.
"""

import argparse
import contextlib
import json
import logging
import os
import re
import socket
import struct
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lora import log_lines
from lora.beat import Beat
from lora.disk_cache import CacheInUse, DiskCache, packed_path
from lora.download import Downloader
from lora.errors import DROPPED, AdapterError, Failure
from lora.loads import Fetched
from lora.packed import PackedForm, PackedHeader, slabs_bytes
from lora.packing import pack
from registry.extras import ExtraMissing
from registry.storage.free_space import FULL, FreeSpace
from registry.storage.url import open_storage

logger = logging.getLogger(__name__)

_NICE = 19
_MAX_ORDERS = 1024
"""Orders that one engine may have, under way and in line."""
_MAX_LINE_BYTES = 64 << 10
_SEND_TIMEOUT_S = 10
_READ_TIMEOUT_S = 10.0
"""How long the store may say nothing before the read is tried again."""
_SILENCE_S = 30.0
"""Silence after which the fetcher counts as hung, longer than others': its priority is lowest."""
_OPENING_S = 300.0
_ACCEPT_S = 1.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass
class Order:
    """An order to bring one object to disk. until: its deadline by the monotonic clock."""

    number: int
    object_key: str
    digest: str
    size_bytes: int
    until: float
    is_dropped: threading.Event = field(default_factory=threading.Event)
    future: Future[None] | None = None

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Order":
        """Read an order from an engine's line. Raises KeyError, TypeError, ValueError."""
        digest, size_bytes = line["digest"], int(line["size_bytes"])
        if not _DIGEST.fullmatch(digest) or size_bytes <= 0:
            raise ValueError(f"not a digest and a size in bytes: {digest}, {size_bytes}")
        until = time.monotonic() + float(line["timeout_s"])
        return cls(int(line["order"]), str(line["object_key"]), digest, size_bytes, until)


class Fetcher:
    """Brings packed objects to disk, `max_fetches` of all engines at once; the others queue."""

    def __init__(self, downloader: Downloader, cache: DiskCache, max_fetches: int) -> None:
        self.downloader = downloader
        self.cache = cache
        self.pool = ThreadPoolExecutor(max_fetches, thread_name_prefix="fetch")

    def fetch(self, order: Order, form: PackedForm) -> Fetched:
        """Bring an object to disk; a failure is part of the result."""
        started, key = time.monotonic(), order.object_key
        path = packed_path(self.cache.root, order.digest, form.form_id)
        try:
            with contextlib.suppress(FileNotFoundError):  # it may be evicted after the touch
                if self.cache.touch(path):
                    host_bytes = slabs_bytes(path) // form.layout.num_shards
                    return Fetched(key, was_there=True, host_bytes=host_bytes)
            try:
                header = self._store(order, form, path)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self.cache.evict_half()
                header = self._store(order, form, path)
            return Fetched(
                key,
                seconds=time.monotonic() - started,
                size_bytes=order.size_bytes,
                host_bytes=header.slabs_bytes // form.layout.num_shards,
            )
        except AdapterError as error:
            return Fetched(key, error.failure)
        except OSError as error:
            reason = "the disk is full" if error.errno in FULL else str(error)
            return Fetched(key, Failure("unavailable", reason))

    def _store(self, order: Order, form: PackedForm, path: Path) -> PackedHeader:
        """Download, check and pack one object. Raises AdapterError, OSError."""
        with self.cache.reserve() as room:
            source = room.allocate(order.size_bytes)
            self.downloader.download(
                order.object_key,
                order.digest,
                order.size_bytes,
                source,
                timeout_s=order.until - time.monotonic(),
                is_dropped=order.is_dropped.is_set,
            )
            header = pack(source, order.digest, form, room.allocate)
            room.keep(path)
        return header


class Connection:
    """Orders of one engine. An engine that hangs up sends its orders again when it reconnects."""

    def __init__(self, fetcher: Fetcher, engine: socket.socket) -> None:
        self.fetcher = fetcher
        self._socket = engine
        self._orders: dict[int, Order] = {}
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Serve the engine until it hangs up or sends an invalid line."""
        timeout = struct.pack("@ll", _SEND_TIMEOUT_S, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        with self._socket, self._socket.makefile("rb") as lines:
            try:
                self._read(lines)
            except (OSError, KeyError, TypeError, ValueError) as error:
                logger.warning("a connection of an engine ends: %r", error)
            finally:
                for order in list(self._orders.values()):
                    self._drop(order)

    def _read(self, lines: BinaryIO) -> None:
        form: PackedForm | None = None
        while raw := lines.readline(_MAX_LINE_BYTES):
            line = json.loads(raw)
            if line["op"] == "hello":
                form = PackedForm.from_json(line["form"])
            elif line["op"] == "fetch" and form is not None:
                self._start(Order.of(line), form)
            elif line["op"] == "drop":
                # The order is unknown if it was answered a moment ago.
                if order := self._orders.get(line["order"]):
                    self._drop(order)
            else:
                raise ValueError(f"{line['op']!r} was not expected")

    def _start(self, order: Order, form: PackedForm) -> None:
        if order.number in self._orders:
            raise ValueError(f"the order {order.number} is being fetched already")
        if len(self._orders) >= _MAX_ORDERS:
            self._fail(order, Failure("unavailable", "too many fetches are waiting"))
            return
        self._orders[order.number] = order
        order.future = self.fetcher.pool.submit(self._fetch, order, form)

    def _drop(self, order: Order) -> None:
        order.is_dropped.set()
        if order.future and order.future.cancel():  # the order was still queued
            self._fail(order, DROPPED)

    def _fetch(self, order: Order, form: PackedForm) -> None:
        try:
            fetched = self.fetcher.fetch(order, form)
        except Exception as error:
            # A bug that one object triggers ends its own order, not the other fetches.
            logger.exception("%s", order.object_key)
            self._fail(order, Failure("unavailable", f"the fetcher failed: {error!r}"))
        else:
            self._answer(order, fetched)

    def _fail(self, order: Order, failure: Failure) -> None:
        self._answer(order, Fetched(order.object_key, failure))

    def _answer(self, order: Order, fetched: Fetched) -> None:
        self._orders.pop(order.number, None)
        used_bytes = self.fetcher.cache.used_bytes
        answer = asdict(fetched) | {"order": order.number, "used_bytes": used_bytes}
        try:
            with self._sending:
                self._socket.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            # The engine hung up or does not read; no line can follow one that may be half sent.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


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
    parser.add_argument("--max-fetches", type=int, required=True)
    parser.add_argument("--reserve-bytes", type=int)
    args = parser.parse_args()
    beat = Beat.inherited(_SILENCE_S)
    log_lines.begin("fetcher", level=logging.WARNING)
    try:
        # One attempt, since the downloader resumes a broken read by itself.
        storage = open_storage(args.storage, attempts=1, read_timeout_s=_READ_TIMEOUT_S)
    except ExtraMissing as error:
        logger.error("%s", error)
        sys.exit(os.EX_CONFIG)  # starting again would end the same way
    os.nice(_NICE)  # after the import of boto3, which would take half a minute on a busy machine
    try:
        with beat.busy("opening the disk cache", _OPENING_S):
            cache = DiskCache(args.cache, args.quota_bytes, FreeSpace(args.reserve_bytes))
            fetcher = Fetcher(Downloader(storage, args.max_fetches), cache, args.max_fetches)
    except CacheInUse as error:
        logger.error("%s", error)
        sys.exit(1)
    server = listen(args.socket)
    server.settimeout(_ACCEPT_S)
    while True:
        beat.beat()
        with contextlib.suppress(TimeoutError):
            engine, _ = server.accept()
            # A new engine may connect while the old one's socket lingers, so both are served.
            threading.Thread(target=Connection(fetcher, engine).serve, daemon=True).start()


if __name__ == "__main__":
    main()
