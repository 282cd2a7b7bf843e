"""A device that does work late, in any order that its streams and events allow, and reports two
unordered accesses to one slab.

Order means happens-before, tracked by vector clocks of the host and of every stream. Work inherits
the clocks of the host and of its stream when it is submitted; the host merges an event's clock
when it waits for the event. Work reports the slabs that it touches while it runs, when its clock
is already fixed.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lora.device import Memory

TOTAL_BYTES = 1 << 30

Clock = dict[int, int]


class Race(AssertionError):
    """Two unordered accesses to a slab or to pinned memory, at least one of them a write."""


@dataclass(eq=False)
class FakeStream:
    number: int
    clock: Clock = field(default_factory=dict)
    queue: deque = field(default_factory=deque)


@dataclass(eq=False)
class FakeEvent:
    stream: FakeStream
    clock: Clock
    is_done: bool = False


@dataclass(eq=False)
class _Work:
    run: Callable[[], None]
    clock: Clock


@dataclass(frozen=True)
class _Access:
    """An access by the `number`-th work of a stream. what: its name in messages."""

    stream: int
    number: int
    what: str

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.number


class FakeDevice:
    """A simulated lora.device.Device that finds races.

    arena: [slabs, slab_bytes] uint8; copies to and from it are accesses to its slabs.
    eagerness: probability that some work is done while no one waits for it.
    free_bytes: the result of `measure`, less pool_bytes if its work captured graphs.
    pool_bytes: of the tensors of all graphs.   graph_bytes: kept by the driver for each graph.
    """

    torch_device = torch.device("cpu")

    def __init__(self, seed: int = 0, eagerness: float = 0.3) -> None:
        self.arena = torch.empty(0, 1, dtype=torch.uint8)
        self.eagerness = eagerness
        self.free_bytes = TOTAL_BYTES
        self.pool_bytes = self.graph_bytes = 0
        self.num_captured = 0
        self.num_accesses = 0
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._host: Clock = {}
        self._streams: list[FakeStream] = []
        self._writes: dict[int, _Access] = {}
        self._reads: dict[int, list[_Access]] = {}
        self._running: tuple[FakeStream, Clock] | None = None
        self._late: list[Callable[[], None]] = []
        # By address; kept alive, so that no other tensor gets the same address.
        self._pinned: dict[int, torch.Tensor] = {}
        self.compute = self.stream()

    # ---- lora.device.Device ----

    def stream(self) -> FakeStream:
        with self._lock:
            self._streams.append(FakeStream(len(self._streams)))
            return self._streams[-1]

    def submit(self, stream: FakeStream, work: Callable[[], None]) -> None:
        with self._lock:
            _merge(stream.clock, self._host)
            stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            stream.queue.append(_Work(work, dict(stream.clock)))
            self._wander()

    def copy(self, stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> None:
        is_pinned = source.untyped_storage().data_ptr() in self._pinned
        before = source.clone() if is_pinned else source

        def work() -> None:
            if not torch.equal(before.view(torch.uint8), source.view(torch.uint8)):
                raise Race("the host wrote what a copy was still to read")
            self.touch(self._slabs_of(source), is_write=False, what="copy")
            self.touch(self._slabs_of(target), is_write=True, what="copy")
            target.copy_(source)

        self.submit(stream, work)

    def record(self, stream: FakeStream) -> FakeEvent:
        with self._lock:
            event = FakeEvent(stream, dict(stream.clock))
            stream.queue.append(event)
        return event

    def synchronize(self, event: FakeEvent) -> None:
        with self._lock:
            while not event.is_done:
                self._run_one(event.stream)
            _merge(self._host, event.clock)

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work now, or only when it is joined; chosen at random."""
        if self._random.random() < 0.5:
            work()
            return lambda: None
        self._late.append(work)

        def join() -> None:
            self._late.remove(work)
            work()

        return join

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.submit(self.compute, work)
        self.synchronize(self.record(self.compute))
        self.num_captured += 1
        return work

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype)
        self._pinned[memory.data_ptr()] = memory
        return memory

    @property
    def num_pinned(self) -> int:
        """How often host memory was pinned."""
        return len(self._pinned)

    def measure(self, work: Callable[[], None]) -> Memory:
        before = self.num_captured
        work()
        pool_bytes = self.pool_bytes if self.num_captured > before else 0
        return Memory(self.free_bytes - pool_bytes, TOTAL_BYTES)

    def driver_bytes(self) -> int:
        return self.num_captured * self.graph_bytes

    # ---- accesses ----

    def touch(self, slabs: set[int], is_write: bool, what: str) -> None:
        """Record that the work that runs now reads or writes these slabs. Raises Race."""
        assert self._running is not None, "only submitted work may touch slabs"
        stream, clock = self._running
        access = _Access(stream.number, clock[stream.number], what)
        for slab in slabs:
            self.num_accesses += 1
            before = [self._writes[slab]] if slab in self._writes else []
            before += self._reads.get(slab, []) if is_write else []
            for other in before:
                if not other.is_before(clock):
                    raise Race(f"slab {slab}: {access} and {other} are not ordered")
            if is_write:
                self._writes[slab], self._reads[slab] = access, []
            else:
                self._reads.setdefault(slab, []).append(access)

    def forget(self) -> None:
        """Forget all accesses until now, for example those of a warm-up."""
        self._writes.clear()
        self._reads.clear()

    # ---- execution ----

    def _wander(self) -> None:
        """Run a random number of work items from the fronts of the streams' queues."""
        while self._random.random() < self.eagerness:
            streams = [stream for stream in self._streams if stream.queue]
            if not streams or self._running is not None:
                return
            self._run_one(self._random.choice(streams))

    def _run_one(self, stream: FakeStream) -> None:
        work = stream.queue.popleft()
        if isinstance(work, FakeEvent):
            work.is_done = True
            return
        self._running = stream, work.clock
        try:
            with torch.inference_mode():
                work.run()
            assert not self._late, "work begun beside was not joined"
        finally:
            self._running = None

    def _slabs_of(self, tensor: torch.Tensor) -> set[int]:
        size = self.arena.shape[1]
        start = tensor.data_ptr() - self.arena.data_ptr()
        if not 0 <= start < self.arena.nbytes:
            return set()
        return set(range(start // size, -(-(start + tensor.nbytes) // size)))


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
