"""Requests, prefetches, pins, failures in any order: counts add up, no request waits for ever."""

from collections import Counter
from dataclasses import replace

import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import integers, lists, sampled_from

from lora.errors import Failure
from lora.host_region import HostRegion
from tests.engine.fakes import make_adapter
from tests.lora.managers import finish, make_manager, make_waiter


class ManagerMachine(RuleBasedStateMachine):
    """Requests, releases, pins and a slow, failing loader, in any order."""

    arena_is_host = True

    def __init__(self):
        super().__init__()
        self.manager, self.loader = make_manager(
            num_slabs=6,
            at_once=False,
            host_cache_bytes=3999,
            max_fetches=2,
            max_entries=3,
            arena_is_host=self.arena_is_host,
        )
        self.refs = [
            replace(make_adapter(f"a{i}"), size_bytes=1000 * (i % 3 + 1)) for i in range(6)
        ]
        self.loader.slabs = {ref.object_key: i % 3 + 1 for i, ref in enumerate(self.refs)}
        if not self.arena_is_host:
            self.loader.region = HostRegion(torch.zeros(3, 1000, dtype=torch.uint8))
        self.joined: dict[str, str] = {}
        self.held: list[str] = []
        self.was_there_ms: Counter[tuple] = Counter()
        self.metered_ms: Counter[tuple] = Counter()

    @rule(i=integers(0, 5), tenant=sampled_from("tu"), priority=integers(0, 1))
    def join(self, i, tenant, priority):
        request_id = f"r{len(self.joined)}-{i}"
        if request_id not in self.joined:
            waiter = make_waiter(request_id, tenant, len(self.joined), priority)
            self.manager.join(self.refs[i], waiter)
            self.joined[request_id] = self.refs[i].object_key

    @rule(which=integers(0, 20))
    def leave(self, which):
        if self.joined:
            request_id = sorted(self.joined)[which % len(self.joined)]
            self.manager.leave(self.joined.pop(request_id), request_id)

    @rule(i=integers(0, 5))
    def prefetch(self, i):
        self.manager.prefetch(self.refs[i], "t")

    @rule(which=lists(integers(0, 5), max_size=3, unique=True))
    def pin(self, which):
        self.manager.pin([self.refs[i] for i in which])

    @rule(count=integers(1, 3))
    def finish(self, count):
        self.loader.finish(count)
        self.manager.poll()
        for key in self.joined.values():
            self.manager.wait(key)

    @rule(i=integers(0, 5))
    def fail(self, i):
        key = self.refs[i].object_key
        self.loader.failures = {
            (key, "disk"): Failure("unavailable", "503"),
            (key, "host"): Failure("lost", "damaged"),
            (key, "device"): Failure("unavailable", "out of memory"),
        }

    @rule(i=integers(0, 5))
    def place(self, i):
        entry = self.manager.entries.get(self.refs[i].object_key)
        if entry and entry.tier == "host" and self.manager.arena.make_room(entry.packed.num_slabs):
            self.manager.place(entry.key)

    @rule(i=integers(0, 5))
    def acquire(self, i):
        key = self.refs[i].object_key
        if key in self.manager.entries and self.manager.is_ready(key):
            self.manager.acquire(key)
            self.held.append(key)

    @rule()
    def release(self):
        if self.held:
            self.manager.release(self.held.pop())

    @rule(count=integers(1, 6))
    def make_room(self, count):
        self.manager.arena.make_room(count)

    @rule(seconds=integers(1, 10))
    def wait(self, seconds):
        for key, entry in self.manager.entries.items():
            tier = "device" if entry.tier == "loading" else entry.tier
            if tier in ("device", "host", "disk"):
                stay = key, tier, len(entry.slabs), entry.is_pinned
                self.was_there_ms[stay] += 1000 * seconds
        self.manager.clock.now += seconds

    @rule()
    def take_residency(self):
        for stay, duration_ms in self.manager.machine.meter.take():
            key = stay.adapter.object_key
            self.metered_ms[key, stay.tier, stay.slabs, stay.is_pinned] += duration_ms

    @invariant()
    def nobody_in_use_was_evicted_and_no_slab_is_lost(self):
        assert all(self.manager.is_ready(key) for key in self.held)
        assert all(key in self.manager.entries for key in self.joined.values())
        self.manager.check_integrity()
        self.manager.arena.check_integrity()

    def teardown(self):
        """Residency adds up, and all waiting requests are served once nothing fails any more."""
        self.take_residency()
        assert self.metered_ms == self.was_there_ms
        self.loader.failures = {}
        manager = self.manager
        while self.held:
            self.release()
        manager.pin([])
        for _ in range(60):
            manager.clock.now += 100
            finish(manager, self.loader, 10)
            for request_id, key in list(self.joined.items()):
                manager.wait(key)
                if manager.is_ready(key):
                    manager.leave(key, request_id)
                    del self.joined[request_id]
                elif (needed := manager.slabs_needed(key)) and manager.arena.make_room(needed):
                    manager.place(key)
        assert not self.joined, "somebody waits for ever"


class DeviceManagerMachine(ManagerMachine):
    """The same before a device: adapters are read into slabs of a region, which never runs out."""

    arena_is_host = False

    @invariant()
    def as_much_of_the_host_is_taken_as_is_counted(self):
        manager = self.manager
        held = [e.packed.region_slabs for e in manager.entries.values() if e.packed is not None]
        slabs = [slab for places in held for slab in places]
        assert len(slabs) == len(set(slabs))
        assert 1000 * len(slabs) <= manager.machine.host.used_bytes <= 3999


TestManagerMachine = ManagerMachine.TestCase
TestDeviceManagerMachine = DeviceManagerMachine.TestCase
TestManagerMachine.settings = TestDeviceManagerMachine.settings = settings(
    max_examples=30, stateful_step_count=50, deadline=None
)
