"""Threads that tokenize: whose job is next, and who loses a place."""

import asyncio
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.errors import Overloaded
from server.inference import encoders
from server.inference.encoders import LARGE_BYTES, Encoders


@dataclass
class Desk:
    """Encoders of two threads, and jobs that end when the test says so."""

    pool: Encoders = field(default_factory=lambda: Encoders(ThreadPoolExecutor(2)))
    begun: list[str] = field(default_factory=list)
    gates: dict[str, threading.Event] = field(default_factory=dict)

    def send(self, tenant_id, name, size_bytes=1000, *, is_open=False):
        gate = self.gates[name] = threading.Event()
        if is_open:
            gate.set()

        def work():
            self.begun.append(name)
            gate.wait()
            return name

        return asyncio.ensure_future(self.pool.run(tenant_id, size_bytes, work))

    def open_all(self):
        for gate in self.gates.values():
            gate.set()


async def turn():
    for _ in range(5):
        await asyncio.sleep(0)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.fixture
async def desk():
    """A desk, all of whose jobs end with the test."""
    desk = Desk()
    yield desk
    desk.open_all()


async def test_a_small_prompt_waits_for_no_large_one_of_however_many_tenants(desk):
    large = [desk.send(f"t{i}", f"large-{i}", LARGE_BYTES + 1) for i in range(5)]
    assert await desk.send("good", "small", is_open=True) == "small"
    assert desk.begun == ["large-0", "small"]
    desk.open_all()
    await asyncio.gather(*large)


async def test_the_least_served_tenant_is_next(desk):
    first = [desk.send("greedy", f"greedy-{i}", 30_000) for i in range(8)]
    await until(lambda: len(desk.begun) == 2)
    good = [desk.send("good", f"good-{i}", 10_000) for i in range(3)]
    desk.open_all()
    await asyncio.gather(*first, *good)
    assert {"good-0", "good-1", "good-2"} <= set(desk.begun[2:7])


async def test_a_job_that_nobody_waits_for_never_begins(desk):
    running = [desk.send("a", f"running-{i}") for i in range(2)]
    left = desk.send("a", "left")
    await turn()
    left.cancel()
    await turn()
    desk.open_all()
    await asyncio.gather(*running)
    assert await desk.send("b", "after", is_open=True) == "after"
    assert desk.begun == ["running-0", "running-1", "after"]


async def test_a_full_queue_refuses_the_last_job_of_the_tenant_with_the_longest_queue(
    desk, monkeypatch
):
    monkeypatch.setattr(encoders, "MAX_WAITING_JOBS", 4)
    running = [desk.send("a", f"running-{i}") for i in range(2)]
    greedy = [desk.send("greedy", f"greedy-{i}") for i in range(4)]
    await turn()
    good = desk.send("good", "good")
    with pytest.raises(Overloaded):
        await greedy[-1]
    desk.open_all()
    assert await asyncio.gather(*running, *greedy[:-1], good)
    assert "greedy-3" not in desk.begun


async def test_a_job_that_waits_too_long_is_refused(desk, monkeypatch):
    monkeypatch.setattr(encoders, "MAX_WAIT_S", 0.01)
    running = [desk.send("a", f"running-{i}") for i in range(2)]
    await turn()
    with pytest.raises(Overloaded):
        await desk.send("a", "late")
    assert "late" not in desk.begun
    await asyncio.gather(*running, return_exceptions=True)


def test_an_error_of_the_work_is_the_callers():
    def work():
        raise ValueError("no template")

    with pytest.raises(ValueError, match="no template"):
        asyncio.run(Encoders().run("t", 1, work))


class AtOnce(Executor):
    """Runs each job where it is submitted, so that jobs run in the order of the pool's choice."""

    def submit(self, fn, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([1, 20_000, LARGE_BYTES])), max_size=60
    )
)
async def test_the_service_of_tenants_that_wait_differs_by_a_few_jobs_only(jobs):
    """The bound of fair queueing, with two threads: no tenant gets far ahead of one that waits."""
    waiting = {name: sum(n == name for n, _ in jobs) for name in "abc"}
    served = dict.fromkeys("abc", 0)

    def begin(name, size_bytes):
        waiting[name] -= 1
        served[name] += size_bytes
        behind = min((served[n] for n in "abc" if waiting[n]), default=served[name])
        assert served[name] - behind <= 3 * LARGE_BYTES

    pool = Encoders(AtOnce())
    await asyncio.gather(
        *(pool.run(name, size, lambda n=name, s=size: begin(n, s)) for name, size in jobs)
    )
    assert not any(waiting.values())
