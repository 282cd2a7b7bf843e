"""Time to bring one adapter into the arena from each tier, beside only moving the same bytes.

The bounds are the server and packing for S3, sha256 for the disk (the page cache is warm), memcpy
for the host. A CPU engine reads an adapter straight from its file into the arena; placing an
adapter from host memory, as engines with a device do, is measured all the same.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from bench.adapters.objects import RandomObjects
from bench.adapters.s3_server import STORAGE_URL, slow_s3
from bench.adapters.tiers import TARGETS, Tiers, fetching, slabs_of
from bench.in_process import BASE_REVISION, DTYPE_NAME, EngineFactory, EngineMeasurement
from bench.measurement import Figures
from bench.report import ratio, rounded
from lora.batch import DeviceTables
from lora.disk_cache import packed_path
from lora.host import read_packed
from lora.loader import ThreadLoader
from lora.loads import Loaded, Read
from lora.packed import PackedForm
from registry.ref import AdapterRef

_LOOK_S = 1e-4
_LONGEST_S = 60.0
_READ_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class ColdStart(EngineMeasurement):
    """The time to bring one adapter into the arena, from each tier.

    repeats: measurements of each tier, after one that does not count; the median is reported.
    """

    stack: str = "smollm2-135m"
    rank: int = 16
    targets: str = "all"
    repeats: int = 15

    def run(self, factory: EngineFactory) -> Figures:
        targets = TARGETS[self.targets]
        objects = RandomObjects(factory.layout.shape, self.rank, targets)
        form = PackedForm(factory.layout, DTYPE_NAME, BASE_REVISION)
        with (
            slow_s3(delay_s=0.0) as s3,
            fetching(
                factory.folder,
                STORAGE_URL,
                quota_bytes=64 * objects.size_bytes,
                environment=s3.environment,
            ) as tiers,
        ):
            (ref,) = objects.put(s3, 1)
            way = _Way(tiers, form, ref, slabs_of(form.layout, self.rank, targets))
            ours = [way.seconds() for _ in range(self.repeats + 1)][1:]
            fetch_s, disk_s, host_s = (median(stage) for stage in zip(*ours, strict=True))
            source, target = way.arena.clone(), way.arena
            get_s = self._median_s(lambda: s3.get(ref.object_key))
            read_s = self._median_s(lambda: _read(way.path))
            copy_s = self._median_s(lambda: target.copy_(source))
        return {
            "object_bytes": ref.size_bytes,
            "packed_bytes": target.nbytes,
            "from_s3": _beside(fetch_s + disk_s, get_s + read_s),
            "from_disk": _beside(disk_s, read_s),
            "from_host": _beside(host_s, copy_s),
        }

    def _median_s(self, move: Callable[[], object]) -> float:
        seconds = []
        for _ in range(self.repeats + 1):
            start = time.perf_counter()
            move()
            seconds.append(time.perf_counter() - start)
        return median(seconds[1:])


class _Way:
    """The engine's loader, driven stage by stage without an engine.

    arena: memory of `num_slabs` slabs, exactly as many as the adapter takes.
    """

    def __init__(self, tiers: Tiers, form: PackedForm, ref: AdapterRef, num_slabs: int) -> None:
        self.ref = ref
        self._form = form
        self.path = packed_path(tiers.cache, ref.digest, form.form_id)
        self.arena = torch.zeros(num_slabs, form.layout.slab_bytes, dtype=torch.uint8)
        self._loader = ThreadLoader(tiers.cache, tiers.socket, form, self.arena)

    def seconds(self) -> tuple[float, float, float]:
        """Return the seconds of fetching the adapter, loading it from its file, and placing it from
        host memory. Each is taken from the call until an engine would see the result.
        """
        self.path.unlink(missing_ok=True)
        start = time.perf_counter()
        self._loader.fetch(self.ref)
        self._wait()
        fetched = time.perf_counter()
        self._loader.load(self.ref)
        loaded = self._wait()
        assert isinstance(loaded, Read)
        packed = loaded.outcome
        slabs = list(range(packed.num_slabs))
        self._loader.place(self.ref, packed, slabs)
        self._wait()
        placed = time.perf_counter()
        in_memory = read_packed(self.path, self.ref.digest, self._form)
        read = time.perf_counter()
        self._loader.place(self.ref, in_memory, slabs)
        self._wait()
        return fetched - start, placed - fetched, time.perf_counter() - read

    def _wait(self) -> Loaded[DeviceTables]:
        until = time.monotonic() + _LONGEST_S
        while time.monotonic() < until:
            for done in self._loader.poll():
                if done.failure is not None:
                    raise SystemExit(f"the adapter could not be loaded: {done.failure.error}")
                return done
            time.sleep(_LOOK_S)
        raise SystemExit("the adapter was not loaded in time")


def _read(path: Path) -> None:
    part = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(part):
            pass


def _beside(seconds: float, plain_s: float) -> dict[str, float]:
    """Return the figures of one way beside those of a plain copy.

    plain_s: seconds to move the same bytes by the same path, with no check and no conversion.
    """
    return {
        "ms": rounded(seconds * 1000),
        "plain_ms": rounded(plain_s * 1000),
        "share_of_bandwidth": ratio(plain_s, seconds),
    }
