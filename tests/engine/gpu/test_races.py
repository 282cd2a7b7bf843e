"""Steps, page-ins and swaps on a device that does work late: events order all accesses to a slab,
and each race is detected when the guard against it is removed.

The load is that of tests.engine.churn, with real loader and fetcher, on the device's runner.
"""

import time
from collections import deque

import pytest
import torch

from lora import host_cache
from lora.arena import Arena
from lora.filling import SlabFiller, _Copies
from lora.packed import PackedForm
from lora.shard import WHOLE
from registry.storage.storage import LocalStorage
from tests.engine.churn import CONFIG, LAYOUT, Churn, build_core, make_weights
from tests.engine.gpu.backends import fake_backend
from tests.engine.gpu.fake_device import FakeDevice, Race
from tests.engine.test_churn import ALLOWED, UnfencedArena
from tests.lora.factories import FORM, FetcherProcess, make_object
from tests.soak import soak
from tests.tiny_models import packed_adapter

NUM_SLABS = 60  # so few that requests are often preempted

# A race in the loader's thread ends that thread; the engine's thread raises it again.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class SlowCopies(FakeDevice):
    """A device whose page-ins last for some steps, so that their requests may end before."""

    def synchronize(self, event):
        if event.stream is not self.compute:
            time.sleep(0.01)
        super().synchronize(event)


@pytest.fixture
def world(tmp_path):
    """A function that makes a `Churn`, a load of short-lived adapters, and its device."""
    started = []

    def make(seed=1, eagerness=0.3, device_type=FakeDevice, **options):
        objects = tmp_path / "objects"
        fetcher = FetcherProcess(tmp_path, objects.as_uri(), quota_bytes=100 * (80 << 10))
        started.append(fetcher)
        (tmp_path / "engine").mkdir()
        device = device_type(seed, eagerness)
        form = PackedForm(LAYOUT, "float32", "base-1")
        arena_bytes = NUM_SLABS * LAYOUT.slab_bytes
        backend = fake_backend(CONFIG, form, make_weights(), device, arena_bytes=arena_bytes)
        core = build_core(
            tmp_path / "engine", fetcher.cache, fetcher.path,
            backend=backend, num_slabs=NUM_SLABS, **options,
        )  # fmt: skip
        return Churn(core, LocalStorage(objects), tmp_path, seed), device

    yield make
    for fetcher in started:
        fetcher.kill()


@pytest.mark.parametrize(
    ("eagerness", "device_type", "num_host_slabs"),
    [
        (0.3, FakeDevice, 6),
        (0.1, SlowCopies, 6),
        *soak((0.0, FakeDevice, 40), (0.9, FakeDevice, 40)),
    ],
)
def test_nothing_meets_in_a_slab_without_an_event_between_and_no_memory_is_pinned_late(
    world, eagerness, device_type, num_host_slabs
):
    churn, device = world(
        seed=2, eagerness=eagerness, device_type=device_type, num_host_slabs=num_host_slabs
    )
    core, num_requests, num_pinned = churn.core, 0, device.num_pinned
    while not has_seen_all(core) or device.num_accesses <= 5_000:
        num_requests += 50
        assert num_requests < 3000, "the churn lacks evictions or preemptions"
        churn.run(num_requests, deadline_s=60)
    assert not churn.wrong
    assert set(churn.outcomes) <= ALLOWED
    assert device.num_pinned == num_pinned > 0


def has_seen_all(core):
    queues = core.scheduler.queues
    return core.adapters.machine.num_evictions > 20 and queues.num_preemptions and queues.num_swaps


# ---- races are detected when a guard is removed ----


def is_found_out(churn, *errors):
    """Run the load; return whether it shows a race, a wrong token or a failure.

    errors: other exceptions that count as detection, raised by corrupted state.
    """
    try:
        churn.run(3000, deadline_s=120)
    except (Race, *errors):
        return True
    return bool(churn.wrong) or not set(churn.outcomes) <= ALLOWED


class ForgetsTheStepToCome(Arena):
    """An arena that hands out slabs that swap copies of the next step still have to read."""

    def expect_step(self):
        pass


@pytest.mark.parametrize("arena", [UnfencedArena, ForgetsTheStepToCome])
def test_an_arena_without_one_of_its_fences_is_found_out(world, arena):
    churn, _ = world(arena=arena(NUM_SLABS), eagerness=0.05)
    assert is_found_out(churn)


def test_a_loader_that_reports_before_its_copies_are_done_is_found_out(world, monkeypatch):
    monkeypatch.setattr(_Copies, "finish", lambda self: None)
    churn, _ = world()
    assert is_found_out(churn, LookupError, RuntimeError)


def test_a_host_cache_that_drops_what_is_being_placed_is_found_out(world, monkeypatch):
    monkeypatch.setattr(host_cache, "_may_go", lambda entry, asker: True)
    churn, _ = world(device_type=SlowCopies, num_host_slabs=6)
    assert is_found_out(churn, AssertionError)


def test_host_slabs_that_another_adapter_is_given_under_a_copy_are_found_out(tmp_path, monkeypatch):
    filler, device, files = filler_of_one(tmp_path)
    place_one_after_the_other(filler, device, files)
    monkeypatch.setattr(_Copies, "finish", lambda self: None)
    with pytest.raises(Race, match="the host wrote"):
        place_one_after_the_other(filler, device, files)


def filler_of_one(folder):
    """A filler with host memory for one adapter, its device, and the files of two adapters."""
    device = FakeDevice(eagerness=0.0)
    packed = [packed_adapter(make_object(seed), FORM, folder, WHOLE) for seed in (1, 2)]
    slab_bytes, num_slabs = FORM.layout.slab_bytes, packed[0].num_slabs
    device.arena = torch.zeros(2 * num_slabs, slab_bytes, dtype=torch.uint8)
    filler = SlabFiller(FORM, device.arena, device, host_bytes=num_slabs * slab_bytes)
    return filler, device, [(p.path, p.digest) for p in packed]


def place_one_after_the_other(filler, device, files):
    for number, (path, digest) in enumerate(files):
        packed = filler.read(path, digest)
        first = number * packed.num_slabs
        filler.fill(packed, list(range(first, first + packed.num_slabs)))
        filler.release(packed)
    device.synchronize(device.record(filler._copies._stream))


def test_host_memory_that_is_filled_again_while_a_step_still_copies_it_is_found_out(world):
    churn, _ = world(eagerness=0.0)
    runner = churn.core.runner
    runner._slots = deque([runner._slots[0]] * 2)
    assert is_found_out(churn)


def test_tokens_that_are_read_before_their_event_are_found_out(world):
    churn, device = world(eagerness=0.0)
    synchronize = device.synchronize

    def impatient(event):
        if event.stream is not device.compute:
            synchronize(event)

    device.synchronize = impatient
    assert is_found_out(churn, AssertionError, LookupError, RuntimeError)


def test_ints_of_a_graph_that_are_overwritten_while_it_is_replayed_are_found_out(world):
    """The ints of steps with prefills are copied on another stream, unordered with the steps."""
    churn, device = world(eagerness=0.3)
    runner, other, shapes = churn.core.runner, device.stream(), []
    copy, build, find = device.copy, runner.builder.build, runner.graphs.find

    def note(*given):
        plan = build(*given)
        shapes.append(plan.shape)
        return plan

    def hasty(stream, target, source):
        is_mixed = bool(shapes) and shapes[-1].num_prefill_items > 0
        are_ints = target.data_ptr() == runner._there.ints.data_ptr()
        copy(other if is_mixed and are_ints else stream, target, source)

    runner.builder.build, device.copy = note, hasty
    assert is_found_out(churn, AssertionError, IndexError, LookupError, RuntimeError)
    mixed = [shape for shape in shapes if shape.num_prefill_items]
    assert mixed
    assert all(find(shape) for shape in mixed)
