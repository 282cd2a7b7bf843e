"""Room for parts: the disk's reserve and the tenants' shares hold, whatever the tenants send."""

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from registry.errors import NoRoom, Unavailable
from registry.storage.free_space import FreeSpace, WorkDir
from registry.uploads.parts import Pending
from server.adapters.spool import MAX_PARTS, Spool
from tests.registry.fake_disk import FakeDisk

TENANTS = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("begin"), TENANTS, st.integers(1, 300)),
    st.tuples(st.just("receive"), st.integers(0, 9)),
    st.tuples(st.just("finish"), st.integers(0, 9)),
    st.tuples(st.just("abandon"), st.integers(0, 9)),
    st.tuples(st.just("complete"), TENANTS),
)
RESERVE, PENDING, SHARE = 1000, 900, 0.4


def at_once(coroutine):
    """Run what waits for nothing."""
    with contextlib.suppress(StopIteration):
        coroutine.send(None)


async def nothing(tenant_id):
    return Pending(0, 0)


class Parts:
    """A spool, and parts that have begun; the disk has what was written and no more.

    Each part is on the disk twice while it is stored: in the spool and in the store.
    """

    def __init__(self, folder, free_bytes):
        self.disk = FakeDisk(free_bytes)
        self.spool = Spool(
            WorkDir(folder / "work", FreeSpace(RESERVE, self.disk)),
            folder / "store",
            self.pending,
            max_pending_bytes=PENDING,
            max_pending_share=SHARE,
        )
        self.stored = {}
        self.begun = []

    def begin(self, tenant_id, size_bytes):
        place = self.spool.place(tenant_id, size_bytes)
        at_once(place.__aenter__())
        self.begun.append([tenant_id, size_bytes, 0, place])

    async def pending(self, tenant_id):
        return Pending(sum(self.stored.values()), self.stored.get(tenant_id, 0))

    def receive(self, number):
        if self.begun:
            part = self.begun[number % len(self.begun)]
            self.disk.free_bytes -= part[1] - part[2]
            part[2] = part[1]

    def finish(self, number):
        if self.begun:
            self.receive(number)
            tenant_id, size_bytes, _, place = self.begun.pop(number % len(self.begun))
            self.disk.free_bytes -= size_bytes  # in the store; then the spool's file goes
            self.check()
            self.stored[tenant_id] = self.stored.get(tenant_id, 0) + size_bytes
            self.disk.free_bytes += size_bytes
            at_once(place.__aexit__(None, None, None))

    def abandon(self, number):
        if self.begun:
            _, _, received, place = self.begun.pop(number % len(self.begun))
            self.disk.free_bytes += received
            at_once(place.__aexit__(None, None, None))

    def complete(self, tenant_id):
        self.disk.free_bytes += self.stored.pop(tenant_id, 0)

    def check(self):
        assert self.disk.free_bytes >= RESERVE
        assert sum(self.stored.values()) <= PENDING
        assert all(size_bytes <= PENDING * SHARE for size_bytes in self.stored.values())


@settings(max_examples=150, deadline=None)
@example(
    free_bytes=1800, steps=[("begin", "a", 300), ("begin", "b", 300), ("finish", 0), ("finish", 0)]
)
@given(free_bytes=st.integers(RESERVE, 1900), steps=st.lists(STEPS, max_size=40))
def test_neither_reserve_nor_shares_are_ever_exceeded(tmp_path_factory, free_bytes, steps):
    parts = Parts(tmp_path_factory.mktemp("spool"), free_bytes)
    for step, *arguments in steps:
        with contextlib.suppress(NoRoom, Unavailable):
            getattr(parts, step)(*arguments)
        parts.check()
    while parts.begun:
        parts.abandon(0)
    assert parts.spool._work.space.left_bytes(parts.spool._work.path) == (
        parts.disk.free_bytes - RESERVE
    )


def test_a_tenant_at_its_share_leaves_the_rest_to_others(tmp_path):
    parts = Parts(tmp_path, 100_000)
    parts.begin("a", 360)
    with pytest.raises(NoRoom, match="360 bytes"):
        parts.begin("a", 1)
    parts.begin("b", 360)
    parts.finish(0)
    parts.finish(0)
    with pytest.raises(NoRoom, match="The server's disk"):
        parts.begin("c", 181)
    parts.begin("c", 180)
    parts.abandon(0)


async def test_a_small_volume_has_less_for_unfinished_uploads(tmp_path):
    work = WorkDir(tmp_path, FreeSpace(0, FakeDisk(40_000_000, 40_000_000)))
    spool = Spool(work, tmp_path / "store", nothing)
    with pytest.raises(NoRoom, match="2500000 bytes"):
        async with spool.place("a", 2_500_001):
            pass


async def test_a_disk_that_fails_otherwise_is_busy_for_a_while(tmp_path):
    (tmp_path / "work").write_bytes(b"no folder")
    spool = Spool(WorkDir(tmp_path / "work"), None, nothing)
    with pytest.raises(Unavailable):
        async with spool.place("a", 1):
            pass
    (tmp_path / "work").unlink()
    async with contextlib.AsyncExitStack() as stack:
        for i in range(MAX_PARTS):
            await stack.enter_async_context(spool.place(f"t{i}", 1))
