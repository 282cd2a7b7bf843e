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
from lora.device import Device
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
    arena: [num_slabs, slab_bytes] uint8.   device: that it is on; None where it is host memory.
    """

    def __init__(
        self,
        cache_dir: Path,
        fetcher: Path,
        form: PackedForm,
        arena: torch.Tensor,
        *,
        device: Device | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.cache_dir = cache_dir
        self.form = form
        self.arena = arena
        self._copies = None if device is None else _Copies(device)
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
        if self._copies is not None:
            return read_packed(path, digest, self.form, self._copies.device.pinned)
        return open_packed(path, digest, self.form)

    def _place(self, placing: _Placing) -> Loaded:
        started = time.monotonic()
        ref, packed, slabs = placing.ref, placing.packed, placing.slabs
        assert packed.digest == ref.digest, "another adapter's weights"
        assert packed.base_revision == self.form.base_revision, "for another base model"
        try:
            tables = self._fill(packed, slabs)
        except FileNotFoundError as error:
            return _failed(ref, "device", Failure("evicted", str(error)))
        except AdapterError as error:
            packed.path.unlink(missing_ok=True)
            return _failed(ref, "device", error.failure)
        except OSError as error:
            return _failed(ref, "device", Failure("unavailable", str(error)))
        seconds = time.monotonic() - started
        return Loaded(
            ref.object_key, "device", tables, seconds=seconds, size_bytes=packed.size_bytes
        )

    def _fill(self, packed: PackedAdapter, slabs: list[int]) -> DeviceTables:
        """The adapter in these slabs, all of it: steps may use it from now on."""
        layout, copies = self.form.layout, self._copies
        if copies is None:
            packed.copy_to(self.arena, slabs)
            return DeviceTables.of(packed, layout, slabs, self.arena)
        packed.copy_to(self.arena, slabs, copies.begin)
        tables = DeviceTables.of(packed, layout, slabs, self.arena, copies.begin_new)
        copies.finish()
        return tables


class _Copies:
    """From host memory to the device, on a stream of their own beside the steps."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._stream = device.stream()
        self._sources: list[torch.Tensor] = []

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.device.copy(self._stream, target, source)

    def begin_new(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of `source` in device memory of its own."""
        pinned = self.device.pinned(*source.shape, dtype=source.dtype).copy_(source)
        target = torch.empty_like(source, device=self.device.torch_device)
        self._sources.append(pinned)
        self.begin(target, pinned)
        return target

    def finish(self) -> None:
        """Wait for all of them."""
        self.device.synchronize(self.device.record(self._stream))
        self._sources.clear()


def _failed(ref: AdapterRef, stage: Literal["host", "device"], failure: Failure) -> Loaded:
    return Loaded(ref.object_key, stage, failure=failure)
