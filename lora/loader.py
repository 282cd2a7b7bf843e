"""What takes time, off the engine loop: orders from the fetcher, reads packed files, copies to
slabs.

The engine thread hands over by queues that never block, and shares no lock with anybody here.
"""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lora.batch import DeviceTables
from lora.disk_cache import packed_path
from lora.errors import AdapterError, Failure
from lora.fetch_client import FetchClient
from lora.host import PackedAdapter, open_packed, read_packed
from lora.loads import Loaded
from lora.packed import PackedForm
from registry.ref import AdapterRef


@dataclass(frozen=True, slots=True)
class _Placing:
    ref: AdapterRef
    packed: PackedAdapter
    slabs: list[int]


class ThreadLoader:
    """Loads for one engine; what is in line is bounded by what its manager starts.

    cache_dir: the fetcher's.   fetcher: its socket.   timeout_s: of one fetch.
    arena: [num_slabs, slab_bytes] uint8 on the engine's device.
    """

    def __init__(
        self,
        cache_dir: Path,
        fetcher: Path,
        form: PackedForm,
        arena: torch.Tensor,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self.cache_dir = cache_dir
        self.form = form
        self.arena = arena
        self._stream = torch.cuda.Stream(arena.device) if arena.is_cuda else None
        self._done: queue.SimpleQueue[Loaded | BaseException] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[AdapterRef | _Placing] = queue.SimpleQueue()
        self._client = FetchClient(fetcher, form, self._done.put, timeout_s)
        threading.Thread(target=self._run, name="adapter-loader", daemon=True).start()

    # ---- for the engine thread ----

    def fetch(self, ref: AdapterRef) -> None:
        self._client.fetch(ref)

    def drop(self, key: str) -> None:
        self._client.drop(key)

    def load(self, ref: AdapterRef) -> None:
        self._work.put(ref)

    def place(self, ref: AdapterRef, packed: PackedAdapter, slabs: list[int]) -> None:
        self._work.put(_Placing(ref, packed, slabs))

    def poll(self) -> list[Loaded]:
        """What has been done. Raises what ended a thread here: nothing would load any more."""
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
        placings: deque[_Placing] = deque()
        loads: deque[AdapterRef] = deque()
        try:
            while True:
                for work in self._take_work(wait=not placings and not loads):
                    if isinstance(work, _Placing):
                        placings.append(work)
                    else:
                        loads.append(work)
                # Placing first: the room it waits for is taken already.
                done = self._place(placings.popleft()) if placings else self._load(loads.popleft())
                self._done.put(done)
        except BaseException as error:
            self._done.put(error)
            raise

    def _take_work(self, wait: bool) -> Iterator[AdapterRef | _Placing]:
        """What has come by now; `wait`: one at least."""
        if wait:
            yield self._work.get()
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._work.get_nowait()

    def _load(self, ref: AdapterRef) -> Loaded:
        started = time.monotonic()
        path = packed_path(self.cache_dir, ref.digest, self.form.form_id)
        try:
            packed = self._read(path, ref.digest)
            with contextlib.suppress(FileNotFoundError):  # evicted since: it is read all the same
                os.utime(path)  # the fetcher evicts what is used less first
        except FileNotFoundError as error:
            return _failed(ref, "host", Failure("evicted", str(error)))
        except AdapterError as error:
            path.unlink(missing_ok=True)
            return _failed(ref, "host", error.failure)
        except (OSError, MemoryError, RuntimeError) as error:
            # RuntimeError is what torch raises when there is no memory.
            return _failed(ref, "host", Failure("unavailable", str(error)))
        seconds = time.monotonic() - started
        return Loaded(ref.object_key, "host", packed, seconds=seconds, size_bytes=packed.host_bytes)

    def _read(self, path: Path, digest: str) -> PackedAdapter:
        """Into host memory, where the arena is somewhere else."""
        if self.arena.is_cuda:
            return read_packed(path, digest, self.form, pin=True)
        return open_packed(path, digest, self.form)

    def _place(self, placing: _Placing) -> Loaded:
        started = time.monotonic()
        ref, packed, slabs = placing.ref, placing.packed, placing.slabs
        assert packed.digest == ref.digest, "another adapter's weights"
        assert packed.base_revision == self.form.base_revision, "for another base model"
        try:
            with torch.cuda.stream(self._stream):  # None, on a CPU: nothing changes
                packed.copy_to(self.arena, slabs)
                tables = DeviceTables.of(packed, self.form.layout, slabs, self.arena)
        except FileNotFoundError as error:
            return _failed(ref, "device", Failure("evicted", str(error)))
        except AdapterError as error:
            packed.path.unlink(missing_ok=True)
            return _failed(ref, "device", error.failure)
        except OSError as error:
            return _failed(ref, "device", Failure("unavailable", str(error)))
        if self._stream is not None:
            self._hand_over(self._stream, tables)
        seconds = time.monotonic() - started
        return Loaded(
            ref.object_key, "device", tables, seconds=seconds, size_bytes=packed.size_bytes
        )

    def _hand_over(self, stream: torch.cuda.Stream, tables: DeviceTables) -> None:
        """Wait for the copies; what they made is used on the default stream from now on."""
        stream.record_event().synchronize()
        steps = torch.cuda.default_stream(self.arena.device)
        for table in (tables.tile_table, tables.scales):
            table.record_stream(steps)


def _failed(ref: AdapterRef, stage: Literal["host", "device"], failure: Failure) -> Loaded:
    return Loaded(ref.object_key, stage, failure=failure)
