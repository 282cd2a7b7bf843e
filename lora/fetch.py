"""The fetcher: object store to packed files on disk, a process of its own, without torch.

    python -m lora.fetch --socket PATH --storage URL --cache DIR --quota-bytes N --max-fetches N

It listens on a Unix socket for engines. One JSON object a line:

    engine   {"op": "hello", "form": PackedForm}                                        first
             {"op": "fetch", "order", "object_key", "digest", "size_bytes", "timeout_s"}
             {"op": "drop", "order"}
    fetcher  {"order", "object_key", "kind", "error", "was_there", "seconds", "size_bytes",
              "used_bytes", "slabs_bytes"}

Every fetch is answered once, dropped ones too, with its order's number. kind and error are a
Failure, or null; used_bytes is of the disk cache, slabs_bytes of the packed file. It runs at the
lowest priority: boto3 and packing in the engine's own process would triple the decode step's p99.
"""

import argparse
import contextlib
import errno
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from lora.disk_cache import CacheInUse, DiskCache, packed_path
from lora.download import Downloader
from lora.errors import AdapterError, Failure
from lora.fetch_lines import AnswerLine, EngineLine, FetchLine
from lora.packed import PackedForm, PackedHeader, slabs_bytes
from lora.packing import pack
from registry.storage_url import open_storage

logger = logging.getLogger(__name__)

_NICE = 19
_MAX_ORDERS = 1024
"""Of one engine, under way and in line."""
_MAX_LINE_BYTES = 64 << 10
_SEND_TIMEOUT_S = 10
_READ_TIMEOUT_S = 10.0
"""How long the store may say nothing before the read is tried again."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DROPPED = Failure("dropped", "nobody waits for it any more")


@dataclass
class Order:
    """One object to be brought to disk. until: when it is too late, by the monotonic clock."""

    number: int
    object_key: str
    digest: str
    size_bytes: int
    until: float
    is_dropped: threading.Event = field(default_factory=threading.Event)
    future: Future[None] | None = None

    @classmethod
    def of(cls, line: FetchLine) -> "Order":
        """Raises KeyError, TypeError, ValueError."""
        digest, size_bytes = line["digest"], int(line["size_bytes"])
        if not _DIGEST.fullmatch(digest) or size_bytes <= 0:
            raise ValueError(f"no digest and size: {digest}, {size_bytes}")
        until = time.monotonic() + float(line["timeout_s"])
        return cls(int(line["order"]), str(line["object_key"]), digest, size_bytes, until)


@dataclass(frozen=True)
class FetchResult:
    """size_bytes: that were downloaded.   seconds: of the download and the packing.
    slabs_bytes: of the packed file's slabs.
    """

    failure: Failure | None = None
    was_there: bool = False
    seconds: float = 0.0
    size_bytes: int = 0
    slabs_bytes: int = 0


class Fetcher:
    """Brings objects to disk, packed; `max_fetches` of all engines at once, the others in line."""

    def __init__(self, downloader: Downloader, cache: DiskCache, max_fetches: int) -> None:
        self.downloader = downloader
        self.cache = cache
        self.pool = ThreadPoolExecutor(max_fetches, thread_name_prefix="fetch")

    def fetch(self, order: Order, form: PackedForm) -> FetchResult:
        """What went wrong is in the answer."""
        started = time.monotonic()
        path = packed_path(self.cache.root, order.digest, form.form_id)
        try:
            with contextlib.suppress(FileNotFoundError):  # it may have been evicted since
                if self.cache.touch(path):
                    return FetchResult(was_there=True, slabs_bytes=slabs_bytes(path))
            try:
                header = self._store(order, form, path)
            except OSError as error:
                if error.errno not in _DISK_FULL:
                    raise
                self.cache.evict_half()
                header = self._store(order, form, path)
            seconds = time.monotonic() - started
            return FetchResult(None, False, seconds, order.size_bytes, header.slabs_bytes)
        except AdapterError as error:
            return FetchResult(error.failure, seconds=time.monotonic() - started)
        except OSError as error:
            reason = "the disk is full" if error.errno in _DISK_FULL else str(error)
            return FetchResult(Failure("unavailable", reason), seconds=time.monotonic() - started)

    def _store(self, order: Order, form: PackedForm, path: Path) -> PackedHeader:
        """Download, check and pack one object. Raises AdapterError, OSError."""
        with self.cache.reserve(order.size_bytes) as room:
            source = room.allocate(order.size_bytes)
            self.downloader.download(
                order.object_key,
                order.digest,
                order.size_bytes,
                source,
                timeout_s=order.until - time.monotonic(),
                is_dropped=order.is_dropped.is_set,
            )
            with room.write() as (draft, file):
                header = pack(source, order.digest, form, file)
            room.keep(draft, path)
        return header


class Connection:
    """One engine's orders. An engine that hangs up asks again when it is back."""

    def __init__(self, fetcher: Fetcher, engine: socket.socket) -> None:
        self.fetcher = fetcher
        self._socket = engine
        self._orders: dict[int, Order] = {}
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Until the engine hangs up, or says what cannot be understood."""
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
            line: EngineLine = json.loads(raw)
            if line["op"] == "hello":
                form = PackedForm.from_json(line["form"])
            elif line["op"] == "fetch" and form is not None:
                self._start(Order.of(line), form)
            elif line["op"] == "drop":
                # It may have been answered a moment ago.
                if order := self._orders.get(line["order"]):
                    self._drop(order)
            else:
                raise ValueError(f"{line['op']!r} was not expected")

    def _start(self, order: Order, form: PackedForm) -> None:
        if order.number in self._orders:
            raise ValueError(f"the order {order.number} is being fetched already")
        if len(self._orders) >= _MAX_ORDERS:
            self._answer(order, FetchResult(Failure("unavailable", "too many fetches are waiting")))
            return
        self._orders[order.number] = order
        order.future = self.fetcher.pool.submit(self._fetch, order, form)

    def _drop(self, order: Order) -> None:
        order.is_dropped.set()
        if order.future and order.future.cancel():  # it was still in line
            self._answer(order, FetchResult(_DROPPED))

    def _fetch(self, order: Order, form: PackedForm) -> None:
        try:
            fetched = self.fetcher.fetch(order, form)
        except Exception as error:
            # A bug that one object brings out ends its order, not the fetches of everybody else.
            logger.exception("%s", order.object_key)
            fetched = FetchResult(Failure("unavailable", f"the fetcher failed: {error!r}"))
        self._answer(order, fetched)

    def _answer(self, order: Order, fetched: FetchResult) -> None:
        self._orders.pop(order.number, None)
        failure = fetched.failure
        answer: AnswerLine = {
            "order": order.number,
            "object_key": order.object_key,
            "kind": failure.kind if failure else None,
            "error": failure.error if failure else None,
            "was_there": fetched.was_there,
            "seconds": fetched.seconds,
            "size_bytes": fetched.size_bytes,
            "used_bytes": self.fetcher.cache.used_bytes,
            "slabs_bytes": fetched.slabs_bytes,
        }
        try:
            with self._sending:
                self._socket.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            # It hung up, or does not read: half a line may be sent, so nothing can follow.
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
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="fetcher: %(message)s")
    # One attempt: the downloader tries again, from where it broke.
    storage = open_storage(args.storage, attempts=1, read_timeout_s=_READ_TIMEOUT_S)
    os.nice(_NICE)  # not before: a busy machine would take half a minute to import boto3
    try:
        cache = DiskCache(args.cache, args.quota_bytes)
        fetcher = Fetcher(Downloader(storage, args.max_fetches), cache, args.max_fetches)
    except CacheInUse as error:
        sys.exit(f"fetcher: {error}")
    server = listen(args.socket)
    while True:
        engine, _ = server.accept()
        # A new engine may connect while the old one's socket lingers: serve both.
        threading.Thread(target=Connection(fetcher, engine).serve, daemon=True).start()


if __name__ == "__main__":
    main()
