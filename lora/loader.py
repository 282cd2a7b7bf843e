"""Slow work off the engine loop: fetch orders, reads of packed files, copies to slabs.

The engine thread passes work through queues that never block, and shares no lock with the threads
here.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from lora.batch import DeviceTables
from lora.device import Device
from lora.disk_cache import packed_path
from lora.entry import Packed
from lora.errors import AdapterError, Failure
from lora.fetch_client import FetchClient
from lora.filling import SlabFiller
from lora.host import PackedAdapter
from lora.loads import Loaded, Placed, Read
from lora.packed import PackedForm
from lora.shard import Shard
from registry.ref import AdapterRef


class OtherRanks(Protocol):
    """The ranks that share the model with this one; an adapter is placed when all have their shard.

    size: number of ranks, including this one. An exception from either method ends the engine,
    since a rank is gone or does not answer.
    """

    size: int

    def begin_placing(self, digest: str, slabs: list[int]) -> int:
        """Make them read their shards into their slabs of these ids; returns a placement number."""
        ...

    def end_placing(self, number: int) -> Failure | None:
        """Wait for all of them; returns the failure of the first that failed, or None."""
        ...


@dataclass(frozen=True, slots=True)
class _Placing:
    ref: AdapterRef
    packed: PackedAdapter
    slabs: list[int]


class ThreadLoader:
    """Loads adapters for one engine. The queues are unbounded; the manager limits what it starts.

    cache_dir: the fetcher's folder.   fetcher: its socket.   timeout_s: time limit of one fetch.
    max_fetches: fetches under way.
    arena: [num_slabs, slab_bytes] uint8.   device: the arena's device; None if it is host memory.
    host_cache_bytes: host memory for loaded adapters, pinned at the start if there is a device.
    others: the ranks that share the model with this one, which is the first; None for one rank.
    """

    def __init__(
        self,
        cache_dir: Path,
        fetcher: Path,
        form: PackedForm,
        arena: torch.Tensor,
        *,
        device: Device | None = None,
        host_cache_bytes: int = 0,
        others: OtherRanks | None = None,
        timeout_s: float = 60.0,
        max_fetches: int = 8,
    ) -> None:
        self.cache_dir = cache_dir
        self.form = form
        self._others = others
        shard = Shard(0, others.size if others else 1)
        self._filler = SlabFiller(form, arena, device, shard, host_cache_bytes)
        self._done: queue.SimpleQueue[Loaded[DeviceTables] | BaseException] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[AdapterRef | _Placing] = queue.SimpleQueue()
        self._client = FetchClient(fetcher, form, self._done.put, timeout_s, max_fetches)
        threading.Thread(target=self._run, name="adapter-loader", daemon=True).start()

    # ---- for the engine thread ----

    def fetch(self, ref: AdapterRef) -> None:
        self._client.fetch(ref)

    def drop(self, key: str) -> None:
        self._client.drop(key)

    def load(self, ref: AdapterRef) -> None:
        self._work.put(ref)

    def place(self, ref: AdapterRef, packed: Packed, slabs: list[int]) -> None:
        assert isinstance(packed, PackedAdapter), "another loader read it"
        self._work.put(_Placing(ref, packed, slabs))

    def release(self, packed: Packed) -> None:
        assert isinstance(packed, PackedAdapter), "another loader read it"
        self._filler.release(packed)

    def poll(self) -> list[Loaded[DeviceTables]]:
        """Reports since the last call. Raises the exception that ended a thread of the loader."""
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._done.get_nowait()
                if isinstance(item, BaseException):
                    raise item
                done.append(item)
        return done

    # ---- adapter-loader ----

    def _run(self) -> None:
        waiting: list[AdapterRef | _Placing] = []
        try:
            while True:
                waiting += self._take_work(wait=not waiting)
                # Placings go first, since their slabs are allocated already.
                waiting.sort(key=lambda work: not isinstance(work, _Placing))
                work = waiting.pop(0)
                done = self._place(work) if isinstance(work, _Placing) else self._load(work)
                self._done.put(done)
        except BaseException as error:
            self._done.put(error)
            raise

    def _take_work(self, wait: bool) -> Iterator[AdapterRef | _Placing]:
        """Take all queued work. wait: blocks until there is some."""
        if wait:
            yield self._work.get()
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._work.get_nowait()

    def _load(self, ref: AdapterRef) -> Read:
        started = time.monotonic()
        path = packed_path(self.cache_dir, ref.digest, self.form.form_id)
        try:
            packed = self._filler.read(path, ref.digest)
            with contextlib.suppress(FileNotFoundError):  # evicted during the read: no harm
                os.utime(path)  # the fetcher evicts the least recently used file first
        except (AdapterError, OSError, MemoryError, RuntimeError) as error:
            # torch raises RuntimeError when memory runs out.
            return Read(ref.object_key, _failure(error, path))
        seconds = time.monotonic() - started
        return Read(ref.object_key, packed, seconds, packed.host_bytes)

    def _place(self, placing: _Placing) -> Placed[DeviceTables]:
        started = time.monotonic()
        ref, packed, slabs = placing.ref, placing.packed, placing.slabs
        assert packed.digest == ref.digest, "another adapter's weights"
        assert packed.header.base_revision == self.form.base_revision, "for another base model"
        try:
            tables = self._fill(packed, slabs)
        except (AdapterError, OSError) as error:
            return Placed(ref.object_key, _failure(error, packed.path))
        seconds = time.monotonic() - started
        return Placed(ref.object_key, tables, seconds, packed.size_bytes)

    def _fill(self, packed: PackedAdapter, slabs: list[int]) -> DeviceTables:
        """Fill the slabs of every rank, each with its shard. Raises like SlabFiller.fill."""
        if self._others is None:
            return self._filler.fill(packed, slabs)
        number = self._others.begin_placing(packed.digest, slabs)
        try:
            tables = self._filler.fill(packed, slabs)
        finally:
            failure = self._others.end_placing(number)
        if failure is not None:
            raise AdapterError(failure.kind, failure.error)
        return replace(tables, number=number)


def _failure(error: Exception, path: Path) -> Failure:
    """Why a packed file could not be used. A damaged file is removed."""
    if not isinstance(error, AdapterError):
        is_gone = isinstance(error, FileNotFoundError)
        return Failure("evicted" if is_gone else "unavailable", str(error))
    if error.failure.kind == "lost":
        path.unlink(missing_ok=True)
    return error.failure
