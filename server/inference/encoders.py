"""Threads on which long prompts are tokenized, shared fairly by the tenants.

The least served tenant's oldest job is next, counted in bytes. One thread takes no large jobs, so
that a small prompt waits for other small ones only. Jobs that nobody waits for any more are
dropped before they begin. All methods belong to the event loop's thread.
"""

import asyncio
import functools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from registry.errors import Overloaded

T = TypeVar("T")

LARGE_BYTES = 64 << 10
"""A job of more bytes is large: it takes 20 ms or more."""
MAX_WAITING_BYTES = 64 << 20
MAX_WAITING_JOBS = 1024
MAX_WAIT_S = 10.0
"""Seconds that a job may wait and run; one that has begun ends by itself, as bodies are bounded."""


@dataclass(slots=True, eq=False)
class _Job:
    size_bytes: int
    work: Callable[[], Any]
    result: asyncio.Future[Any]

    @property
    def is_large(self) -> bool:
        return self.size_bytes > LARGE_BYTES


@dataclass(slots=True)
class _Tenant:
    """A tenant with jobs that wait or run.   served: bytes begun, lifted when it came back."""

    served: int
    waiting: deque[_Job] = field(default_factory=deque)
    num_running: int = 0

    @property
    def waiting_bytes(self) -> int:
        return sum(job.size_bytes for job in self.waiting)


class Encoders:
    """A queue before two to four threads, of which one takes small jobs only."""

    def __init__(self, threads: Executor | None = None) -> None:
        self._num_threads = min(4, max(2, os.cpu_count() or 1)) if threads is None else 2
        self._threads = threads or ThreadPoolExecutor(self._num_threads, "encoder")
        self._tenants: dict[str, _Tenant] = {}
        self._level = 0
        self._num_waiting = self._waiting_bytes = 0
        self._running: list[_Job] = []

    async def run(self, tenant_id: str, size_bytes: int, work: Callable[[], T]) -> T:
        """The result of work that takes time in proportion to size_bytes.

        Raises Overloaded, and what the work raises. If the caller is cancelled, work that has not
        begun is dropped.
        """
        job = _Job(size_bytes, work, asyncio.get_running_loop().create_future())
        self._add(tenant_id, job)
        self._begin_jobs()
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                result: T = await job.result
                return result
        except TimeoutError:
            raise Overloaded() from None
        finally:
            self._drop(tenant_id, job)

    def _add(self, tenant_id: str, job: _Job) -> None:
        """Queue a job; where there is no room, the tenant with the longest queue loses its last."""
        tenant = self._tenants.setdefault(tenant_id, _Tenant(self._level))
        tenant.waiting.append(job)
        self._count(job, 1)
        while self._num_waiting > MAX_WAITING_JOBS or self._waiting_bytes > MAX_WAITING_BYTES:
            longest = max(self._tenants, key=self._queue_length)
            last = self._tenants[longest].waiting[-1]
            self._drop(longest, last)
            if not last.result.done():
                last.result.set_exception(Overloaded())

    def _queue_length(self, tenant_id: str) -> float:
        """Share of the queue's room that a tenant's jobs take."""
        tenant = self._tenants[tenant_id]
        jobs = len(tenant.waiting) / MAX_WAITING_JOBS
        return max(jobs, tenant.waiting_bytes / MAX_WAITING_BYTES)

    def _begin_jobs(self) -> None:
        while len(self._running) < self._num_threads and (tenant_id := self._next()) is not None:
            tenant = self._tenants[tenant_id]
            job = tenant.waiting.popleft()
            self._count(job, -1)
            self._level = max(self._level, tenant.served)
            tenant.served += job.size_bytes
            tenant.num_running += 1
            self._running.append(job)
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            running.add_done_callback(functools.partial(self._end, tenant_id, job))

    def _next(self) -> str | None:
        """The least served tenant whose oldest job may begin."""
        may_be_large = sum(job.is_large for job in self._running) < self._num_threads - 1
        able = [
            name
            for name, tenant in self._tenants.items()
            if tenant.waiting and (may_be_large or not tenant.waiting[0].is_large)
        ]
        return min(able, key=lambda name: self._tenants[name].served, default=None)

    def _end(self, tenant_id: str, job: _Job, done: asyncio.Future[Any]) -> None:
        self._tenants[tenant_id].num_running -= 1
        self._running.remove(job)
        error = done.exception()
        if not job.result.done():
            if error is None:
                job.result.set_result(done.result())
            else:
                job.result.set_exception(error)
        self._forget_if_idle(tenant_id)
        self._begin_jobs()

    def _drop(self, tenant_id: str, job: _Job) -> None:
        """Take a job out of the queue, unless it has begun."""
        tenant = self._tenants.get(tenant_id)
        if tenant is not None and job in tenant.waiting:
            tenant.waiting.remove(job)
            self._count(job, -1)
            self._forget_if_idle(tenant_id)

    def _count(self, job: _Job, sign: int) -> None:
        self._num_waiting += sign
        self._waiting_bytes += sign * job.size_bytes

    def _forget_if_idle(self, tenant_id: str) -> None:
        tenant = self._tenants.get(tenant_id)
        if tenant is not None and not tenant.waiting and not tenant.num_running:
            del self._tenants[tenant_id]
