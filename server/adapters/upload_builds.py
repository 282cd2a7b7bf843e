"""Builds of uploads in this gateway: at most one per upload, however often it is requested."""

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from registry.uploads.rows import Upload
from server.adapters.spool import uploads_busy

# Each build assembles up to two adapters' bytes on disk.
MAX_RUNNING = 4
MAX_WAITING = 64

Build = Callable[[str, str], Upload]


class UploadBuilds:
    """Runs builds in threads.

    build: takes (tenant_id, upload_id) and blocks its thread until the files are checked.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self._tasks: dict[str, asyncio.Task[Upload]] = {}
        self._places = asyncio.Semaphore(MAX_RUNNING)
        self._tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def build(self, tenant_id: str, upload_id: str) -> Upload:
        """Start the build or join the running one; it continues if nobody waits for it any more.

        Raises like registry.uploads.build.UploadBuilder, and Unavailable when too many builds wait.
        """
        # The key includes the tenant, so that no other tenant can join the build.
        key = f"{tenant_id} {upload_id}"
        task = self._tasks.get(key)
        if task is None:
            if len(self._tasks) >= MAX_RUNNING + MAX_WAITING:
                raise uploads_busy("Too many uploads are being checked; ask again shortly.")
            task = asyncio.create_task(self._run(tenant_id, upload_id))
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key))
        return await asyncio.shield(task)

    async def _run(self, tenant_id: str, upload_id: str) -> Upload:
        # Each tenant has one build at a time: its hundred uploads do not take all places.
        turn = self._tenants.setdefault(tenant_id, asyncio.Lock())
        async with turn, self._places:
            return await asyncio.to_thread(self._build, tenant_id, upload_id)
