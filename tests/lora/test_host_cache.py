"""The host's memory: its limit, and which adapters make room for which."""

from dataclasses import replace

import pytest

from lora.arena import Arena
from lora.manager import AdapterManager
from tests.engine.fakes import FakeClock, FakeLoader, make_adapter
from tests.lora.managers import bring_in, bring_to_host, make_manager, make_waiter, tier


@pytest.mark.parametrize("arena_is_host", [True, False])
def test_where_the_arena_is_host_memory_a_placed_adapter_keeps_no_second_copy(arena_is_host):
    manager, _ = make_manager(arena_is_host=arena_is_host)
    bring_in(manager, make_adapter())
    assert manager.machine.host.used_bytes == (0 if arena_is_host else 1000)


class MixedUpLoader(FakeLoader):
    """A loader that reads the file of another adapter."""

    def load(self, ref):
        super().load(replace(ref, digest="another"))


def test_another_adapters_weights_are_never_taken_for_this_ones():
    manager = AdapterManager(Arena(8), MixedUpLoader(), clock=FakeClock())
    manager.join(make_adapter(), make_waiter())
    for _ in range(2):
        manager.poll()
    with pytest.raises(AssertionError, match="another adapter was read"):
        manager.poll()


def test_an_adapter_larger_than_the_host_cache_is_refused_and_costs_nobody_anything():
    manager, _ = make_manager(host_cache_bytes=1500, arena_is_host=False)
    here, large = make_adapter("here"), replace(make_adapter("large"), size_bytes=1501)
    manager.join(here, make_waiter("here"))
    bring_to_host(manager)
    manager.leave(here.object_key, "here")
    manager.join(large, make_waiter("large", arrival=1))
    bring_to_host(manager)
    failure = manager.wait(large.object_key)
    assert failure.kind == "too_large"
    assert "set host_cache_bytes to 1501 at least" in failure.error
    assert tier(manager, here) == "host"


def test_an_urgent_request_takes_the_host_memory_of_one_that_waits_in_vain():
    """The arena has no room for the adapter of the lower class, perhaps for long."""
    manager, _ = make_manager(host_cache_bytes=1500, arena_is_host=False)
    patient, urgent = make_adapter("patient"), make_adapter("urgent")
    manager.join(patient, make_waiter("patient", arrival=0, priority=1))
    bring_to_host(manager)
    assert tier(manager, patient) == "host"
    manager.join(urgent, make_waiter("urgent", arrival=1))
    bring_to_host(manager)
    assert [tier(manager, ref) for ref in (patient, urgent)] == ["fetching", "host"]
    bring_to_host(manager)
    assert [tier(manager, ref) for ref in (patient, urgent)] == ["disk", "host"]


def test_a_prefetch_pushes_nobody_elses_adapter_out_of_the_host():
    manager, _ = make_manager(host_cache_bytes=1500, arena_is_host=False)
    theirs, mine, more = (make_adapter(name) for name in ("theirs", "mine", "more"))
    manager.prefetch(theirs, "them")
    bring_to_host(manager)
    manager.prefetch(mine, "me")
    bring_to_host(manager)
    assert [tier(manager, ref) for ref in (theirs, mine)] == ["host", "disk"]
    manager.join(more, make_waiter())  # a request may evict another tenant's
    bring_to_host(manager)
    assert [tier(manager, ref) for ref in (theirs, more)] == ["remote", "host"]
