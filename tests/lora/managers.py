"""A manager on an arena of a few slabs, and helpers that tests drive it with."""

from lora.arena import Arena
from lora.entry import Waiter
from lora.manager import AdapterManager
from lora.residency import ResidencyConfig
from tests.engine.fakes import FakeClock, FakeLoader


def make_manager(num_slabs=8, at_once=True, **options):
    loader = FakeLoader(at_once=at_once)
    config = ResidencyConfig(**options)
    manager = AdapterManager(Arena(num_slabs), loader, config, clock=FakeClock())
    return manager, loader


def make_waiter(request_id="r", tenant_id="t", arrival=0, priority=0):
    return Waiter(request_id, tenant_id, arrival, priority)


def bring_in(manager, ref):
    """Bring an adapter into the arena for a request, which leaves at once."""
    manager.join(ref, make_waiter("passing"))
    for _ in range(5):
        manager.wait(ref.object_key)
        manager.poll()
        if manager.slabs_needed(ref.object_key):
            assert manager.arena.make_room(manager.slabs_needed(ref.object_key))
            manager.place(ref.object_key)
    assert manager.is_ready(ref.object_key)
    manager.leave(ref.object_key, "passing")


def bring_to_host(manager):
    """Poll for a fetch that ends at once, the load after it, and that load's end."""
    for _ in range(3):
        manager.poll()


def finish(manager, loader, count=1):
    loader.finish(count)
    manager.poll()


def tier(manager, ref):
    return manager.entries[ref.object_key].tier
