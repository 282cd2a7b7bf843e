"""The fetcher: brings objects from the store to packed files on disk, in a process without torch.

    python -m lora.fetch --socket PATH --storage URL --cache DIR --quota-bytes N --max-fetches N
                         [--reserve-bytes N]

The fetcher listens on a Unix socket for engines. A connection is one fetch, for which each side
sends one line, a JSON object:

    engine   {"form": a PackedForm as JSON, "object_key", "digest", "size_bytes", "until"}
    fetcher  the fields of a lora.loads.Fetched

An engine that hangs up before the answer drops its fetch. The process runs at the lowest priority:
boto3 and packing in the engine's own process would triple the decode step's p99.
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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from lora import log_lines
from lora.beat import Beat
from lora.disk_cache import CacheInUse, DiskCache, packed_path
from lora.download import Downloader
from lora.errors import AdapterError, Failure
from lora.loads import Fetched
from lora.packed import PackedForm, PackedHeader, slabs_bytes
from lora.packing import pack
from registry.extras import ExtraMissing
from registry.storage.free_space import FULL, FreeSpace
from registry.storage.url import open_storage

logger = logging.getLogger(__name__)

_NICE = 19
_MAX_LINE_BYTES = 64 << 10
_LINE_TIMEOUT_S = 10
_READ_TIMEOUT_S = 10.0
"""How long the store may say nothing before the read is tried again."""
_SILENCE_S = 30.0
"""Silence after which the fetcher counts as hung, longer than others': its priority is lowest."""
_OPENING_S = 300.0
_ACCEPT_S = 1.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Order:
    """An order to bring one object to disk.

    until: its deadline by the machine's monotonic clock.   is_dropped: whether nobody waits for it
    any more.
    """

    form: PackedForm
    object_key: str
    digest: str
    size_bytes: int
    until: float
    is_dropped: Callable[[], bool]

    @classmethod
    def of(cls, line: bytes, is_dropped: Callable[[], bool]) -> "Order":
        """Read an order from an engine's line. Raises KeyError, TypeError, ValueError."""
        fields = json.loads(line)
        form, digest = _form(fields["form"]), fields["digest"]
        size_bytes, until = int(fields["size_bytes"]), float(fields["until"])
        if not _DIGEST.fullmatch(digest) or size_bytes <= 0:
            raise ValueError(f"not a digest and a size in bytes: {digest}, {size_bytes}")
        return cls(form, str(fields["object_key"]), digest, size_bytes, until, is_dropped)


@lru_cache
def _form(text: str) -> PackedForm:
    return PackedForm.from_json(json.loads(text))


class Fetcher:
    """Brings packed objects to disk; any thread may call it."""

    def __init__(self, downloader: Downloader, cache: DiskCache) -> None:
        self.downloader = downloader
        self.cache = cache

    def serve(self, engine: socket.socket) -> None:
        """Carry out the order that an engine sends on a new connection, and answer it."""
        timeout = struct.pack("@ll", _LINE_TIMEOUT_S, 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            engine.setsockopt(socket.SOL_SOCKET, option, timeout)
        with engine, engine.makefile("rb") as lines:
            try:
                line = lines.readline(_MAX_LINE_BYTES)
                if _has_hung_up(engine):
                    return
                order = Order.of(line, partial(_has_hung_up, engine))
            except (OSError, KeyError, TypeError, ValueError) as error:
                logger.warning("a connection of an engine ends: %r", error)
                return
            fetched = replace(self.fetch(order), used_bytes=self.cache.used_bytes)
            with contextlib.suppress(OSError):  # the engine has hung up, or does not read
                engine.sendall(json.dumps(asdict(fetched)).encode() + b"\n")

    def fetch(self, order: Order) -> Fetched:
        """Bring an object to disk; a failure is part of the result."""
        started, key, num_shards = time.monotonic(), order.object_key, order.form.layout.num_shards
        path = packed_path(self.cache.root, order.digest, order.form.form_id)
        try:
            with contextlib.suppress(FileNotFoundError):  # it may be evicted after the touch
                if self.cache.touch(path):
                    host_bytes = slabs_bytes(path) // num_shards
                    return Fetched(key, was_there=True, host_bytes=host_bytes)
            try:
                header = self._store(order, path)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self.cache.evict_half()
                header = self._store(order, path)
            return Fetched(
                key,
                seconds=time.monotonic() - started,
                size_bytes=order.size_bytes,
                host_bytes=header.slabs_bytes // num_shards,
            )
        except AdapterError as error:
            return Fetched(key, error.failure)
        except OSError as error:
            reason = "the disk is full" if error.errno in FULL else str(error)
            return Fetched(key, Failure("unavailable", reason))
        except Exception as error:
            # A bug that one object triggers fails its own fetch; the pool would drop the error.
            logger.exception("%s", key)
            return Fetched(key, Failure("unavailable", f"the fetcher failed: {error!r}"))

    def _store(self, order: Order, path: Path) -> PackedHeader:
        """Download, check and pack one object. Raises AdapterError, OSError."""
        with self.cache.drafts() as drafts:
            allocate = partial(self.cache.allocate, drafts)
            source = allocate(order.size_bytes)
            self.downloader.download(
                order.object_key,
                order.digest,
                order.size_bytes,
                source,
                timeout_s=order.until - time.monotonic(),
                is_dropped=order.is_dropped,
            )
            header = pack(source, order.digest, order.form, allocate)
            self.cache.keep(drafts[-1], path)
        return header


def _has_hung_up(engine: socket.socket) -> bool:
    """Whether an engine has closed its connection, on which it sends nothing but its order."""
    try:
        return not engine.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()
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
            fetcher = Fetcher(Downloader(storage, args.max_fetches), cache)
    except CacheInUse as error:
        logger.error("%s", error)
        sys.exit(1)
    server = listen(args.socket)
    server.settimeout(_ACCEPT_S)
    pool = ThreadPoolExecutor(args.max_fetches, thread_name_prefix="fetch")  # others wait in line
    while True:
        beat.beat()
        with contextlib.suppress(TimeoutError):
            engine, _ = server.accept()
            pool.submit(fetcher.serve, engine)


if __name__ == "__main__":
    main()
