"""A thread for the work of grammars, which tenants share in turns."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

_IDLE_S = 10.0
_STACK_BYTES = 16 << 20
"""Memory for a thread's stack, which the system provides as it is used: llguidance recurses."""

Job = Callable[[], None]
"""Work that raises nothing: it keeps its result, or its fault, for whoever waits for it."""


class Lane:
    """Does jobs on one thread; the tenants that have some take turns, one job each.

    rests: whether the thread rests after a job as long as the job ran on the processor, so that it
    never takes more than half a core.
    Each answer waits for one job at most, which bounds the queue. The thread ends when it has had
    nothing to do for a while, and a job starts the next one.
    """

    def __init__(self, name: str, *, rests: bool = False) -> None:
        self._name = name
        self._rests = rests
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()
        self._has_jobs = threading.Condition()
        self._has_thread = False

    def submit(self, tenant_id: str, job: Job) -> None:
        with self._has_jobs:
            self._jobs.setdefault(tenant_id, deque()).append(job)
            if not self._has_thread:
                self._start()
            self._has_jobs.notify()

    def _start(self) -> None:
        before = threading.stack_size(_STACK_BYTES)
        threading.Thread(target=self._run, name=self._name, daemon=True).start()
        threading.stack_size(before)
        self._has_thread = True

    def _run(self) -> None:
        while (job := self._next()) is not None:
            begun = time.thread_time()
            job()
            if self._rests:
                time.sleep(time.thread_time() - begun)

    def _next(self) -> Job | None:
        """The next tenant's oldest job; None if none comes."""
        with self._has_jobs:
            if not self._has_jobs.wait_for(lambda: bool(self._jobs), _IDLE_S):
                self._has_thread = False
                return None
            tenant_id, jobs = self._jobs.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._jobs[tenant_id] = jobs  # behind the other tenants
            return job
