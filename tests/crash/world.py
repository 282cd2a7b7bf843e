"""Gateways and one engine on one database: start, kill, start again, bring to rest."""

import asyncio
import contextlib
import functools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from engine.journal.lines import Record, read_records
from engine.steps.meter import TokenMeter
from engine.wire.records import EndRecord, StartRecord
from server.billing.tables import holds, usage_events
from server.database.clock import now_ms
from server.database.database import Database
from server.pool.control_files import numbered
from tests.crash.children import Life, socket_of
from tests.crash.nursery import Nursery
from tests.crash.points import READY_PATH, Kill

T = TypeVar("T")

_LOOK_S = 0.02
_LIMIT_S = 40.0
"""Limit of every wait, far above the time it takes, so that it ends only waits that hang."""
_MAX_LIVES = 20


@dataclass
class World:
    """Gateways and an engine on one database, and the kills that are planned for them.

    folder: made by `furnish`.   kills: for each process, the kill in each of its first lives.
    num_gateways: gateways that serve at once, on sockets of their own.

    deaths: processes that died, in order.   cut_steps: (prompt tokens, sampled tokens) of the last
    step of each engine that died.
    """

    folder: Path
    database: Database
    nursery: Nursery
    kills: dict[str, list[Kill]]
    waits_for_post: bool = False
    has_drafts: bool = True
    num_gateways: int = 1
    deaths: list[str] = field(default_factory=list)
    cut_steps: list[tuple[int, int]] = field(default_factory=list)
    _pids: dict[str, int] = field(default_factory=dict)
    _keepers: list[asyncio.Task[None]] = field(default_factory=list)
    _lives: Counter[str] = field(default_factory=Counter)

    # ---- processes ----

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Run all processes, each started again whenever it dies; kill them at the end."""
        gateways = [numbered("gateway", number) for number in self.numbers]
        processes = ["engine", *gateways]
        self._keepers = keepers = [asyncio.create_task(self._keep(each)) for each in processes]
        try:
            await self.until(self._is_ready)
            yield
        finally:
            for keeper in keepers:
                keeper.cancel()
            for process in processes:
                self.kill(process)
            await asyncio.gather(*keepers, return_exceptions=True)

    def kill(self, process: str) -> None:
        if pid := self._pids.get(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds. Raises TimeoutError, and AssertionError if a process does
        not stay alive.
        """
        async with asyncio.timeout(_LIMIT_S):
            while not await asyncio.to_thread(condition):
                for keeper in self._keepers:
                    if keeper.done():
                        keeper.result()
                await asyncio.sleep(_LOOK_S)

    async def rest(self) -> int:
        """Wait until no request runs and all ends are posted. Then expire the open holds, wait
        until they are voided, and return their number.
        """
        for _ in range(2):  # a dead gateway's messages may arrive after the first look
            await self.until(self._is_quiet)
        num_expired = self.database.write_sync(_expire)
        await self.until(self._has_no_open_hold)
        return num_expired

    async def _keep(self, process: str) -> None:
        while True:
            life = self._lives[process]
            assert life < _MAX_LIVES, f"the {process} does not stay alive"
            self._lives[process] += 1
            kills = self.kills.get(process, [])
            kill = kills[life] if life < len(kills) else None
            url = self.database.url.render_as_string(hide_password=False)
            pid = self.nursery.start(
                Life(process, str(self.folder), url, kill, self.waits_for_post, self.has_drafts)
            )
            self._pids[process] = pid
            await _death(pid)
            self.deaths.append(process)
            if process == "engine" and self.meter.exists():
                self.cut_steps.append(TokenMeter.read(self.meter)[2:])

    def _is_ready(self) -> bool:
        try:
            return all(http.get(READY_PATH).status_code == 200 for http in self._https)
        except httpx.TransportError:
            return False

    @functools.cached_property
    def _https(self) -> list[httpx.Client]:
        transports = [httpx.HTTPTransport(uds=str(it), verify=False) for it in self.sockets]
        return [httpx.Client(transport=it, base_url="http://chorale") for it in transports]

    @property
    def numbers(self) -> range:
        """Numbers of the gateways."""
        return range(1, self.num_gateways + 1)

    @property
    def sockets(self) -> list[Path]:
        """Unix sockets at which the gateways serve HTTP."""
        return [socket_of(self.folder, number) for number in self.numbers]

    # ---- files and database ----

    @property
    def meter(self) -> Path:
        return self.folder / "engine" / "meter"

    @property
    def journal(self) -> Path:
        return self.folder / "engine" / "journal"

    def killed_at(self) -> list[str]:
        """Return the failpoints at which processes died."""
        mark = self.folder / "killed"
        return mark.read_text().split() if mark.exists() else []

    def records(self) -> list[Record]:
        """Read the whole journal, deleted segments included, from its files."""
        for path in (self.folder / "archive").glob("*.journal"):
            path.rename(self.journal / path.name)
        return list(read_records(self.journal))

    def _is_quiet(self) -> bool:
        if not self._is_ready():
            return False
        records = list(read_records(self.journal))
        started = {r.request_id for r in records if isinstance(r, StartRecord)}
        ended = {r.request_id for r in records if isinstance(r, EndRecord)}
        posted = set(self._read(lambda conn: conn.scalars(sa.select(usage_events.c.request_id))))
        return started <= ended <= posted and self._is_all_answered()

    def _is_all_answered(self) -> bool:
        """Whether gateways have noted as failed all requests that ones before them left."""
        texts = [path.read_text() for path in self.folder.glob("unanswered*")]
        marks = Counter(line[0] for text in texts for line in text.splitlines())
        return marks["+"] == marks["-"]

    def _has_no_open_hold(self) -> bool:
        query = sa.select(sa.func.count()).where(holds.c.state == "open")
        return self._read(lambda conn: conn.scalars(query)) == [0]

    def _read(self, fn: Callable[[Connection], Iterable[T]]) -> list[T]:
        return self.database.read_sync(lambda conn: list(fn(conn)))


def _expire(conn: Connection) -> int:
    # Holds expire just now: the auditor would report a hold that stays open for a day longer.
    query = sa.update(holds).where(holds.c.state == "open").values(expires_at_ms=now_ms() - 1)
    return conn.execute(query).rowcount


async def _death(pid: int) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:  # the process has ended already
        return
    loop.add_reader(watched, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)
